"""The header of a file that ``torch.save`` wrote: names, dtypes, shapes and byte ranges of its tensors.

Such a file is an uncompressed zip archive of the tensors' storages and of a pickle that says which tensor is
a view of which storage. ``torch.load(weights_only=True)`` reads the pickle, builds tensors and containers,
and calls nothing else; ``map_location="meta"`` keeps it from reading any storage. The byte ranges are then
read like those of a safetensors file.
"""

import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from fsdp_sft._compat.modules import offset_in_checkpoint
from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._tensors.safetensors import MAX_HEADER_BYTES, Header, TensorEntry, open_file
from fsdp_sft.errors import CheckpointFormatError

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., length of the name, length of the extra field
_SIGNATURE = b"PK\x03\x04"
_CONVERT = "convert it once: torch.save(torch.load(path, weights_only=True), path)"


def read_pickled(path: Path, damaged: type[Exception] = CheckpointFormatError) -> Header:
    """Names, dtypes, shapes and byte ranges of the tensors in a file that ``torch.save`` wrote.

    Two names may stand for the same bytes, and a tensor may be a part of a larger storage.

    Args:
        path: File with a dictionary of names to tensors; the last component must not be a symbolic link.
        damaged: Class of the error for a file that cannot be used.

    Raises:
        CheckpointFormatError: If the file is damaged, is not such a dictionary, wants to run code, is older
            than torch 1.6, or holds a tensor that is no view of plain numbers (then it is ``damaged``).
        OSError: If this process may open no more files, or may not open this one.

    Memory: The pickle, at most 100 MB, and no tensor.
    """
    try:
        with os.fdopen(open_file(path), "rb") as file:
            records = _records(file)
            file.seek(0)
            state = torch.load(file, map_location="meta", weights_only=True, mmap=False)
            if not isinstance(state, dict):
                raise ValueError(f"it holds {type(state).__name__}, not a dictionary of tensors")
            entries = {_checked(name): _entry(name, value, records) for name, value in state.items()}
            file_bytes = os.fstat(file.fileno()).st_size
    except Exception as error:  # whatever the archive or the pickle makes torch raise
        blame_no_file(error, path)
        raise damaged(f"{path} cannot be used: {_reason(error)}") from None
    return Header(dict(sorted(entries.items(), key=lambda item: item[1].start)), {}, file_bytes)


def _reason(error: Exception) -> str:
    """Why a file could not be read, in one line."""
    # torch's first lines say how to run the pickle anyway; the reason comes further down.
    lines = str(error).splitlines() or [""]
    if isinstance(error, pickle.UnpicklingError):
        detail = next((line.strip() for line in lines if "Unpickler error" in line), lines[0])
        return f"its pickle holds more than tensors, and was not run; save a state dict ({detail})"
    return f"{type(error).__name__}: {lines[0]}"


def _records(file: IO[bytes]) -> dict[int, int]:
    """Length of each record of the archive, by its first byte; all must be stored uncompressed."""
    if file.read(4) != _SIGNATURE:
        raise ValueError(f"it is not a zip archive, so it is damaged or from before torch 1.6; {_CONVERT}")
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{info.filename} is compressed, which torch.save never does; {_CONVERT}")
            if info.filename.endswith("/data.pkl") and info.file_size > MAX_HEADER_BYTES:
                raise ValueError(f"its pickle has {info.file_size} bytes, more than {MAX_HEADER_BYTES}")
            if info.filename.endswith("/byteorder") and archive.read(info) != b"little":
                raise ValueError(f"its numbers are big-endian; {_CONVERT}")
    return {_start(file, info): info.file_size for info in infos}


def _start(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """First byte of a record's contents, after its local header, whose length the directory does not say."""
    file.seek(info.header_offset)
    signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != _SIGNATURE:
        raise ValueError(f"{info.filename} is not where the archive's directory says")
    return info.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)


def _checked(name: Any) -> str:
    """A key of the dictionary, which must be a string."""
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is not the name of a tensor")
    return name


def _entry(name: str, tensor: Any, records: dict[int, int]) -> TensorEntry:
    """Dtype, shape, strides and byte range of one tensor, which must be a view of numbers inside a record."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise ValueError(f"{name!r} is {type(tensor).__name__}, not a tensor: the file must be a state dict")
    plain = tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
    strides = (
        [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1] if plain else []
    )
    if not plain or tensor.is_quantized or 0 in strides:
        raise ValueError(
            f"{name!r} is not stored as plain numbers of its own ({tensor.layout}, {tensor.dtype}, shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride() if plain else 'none'}); store a plain "
            "copy of it (.clone(), or .to_dense() first)"
        )
    if tensor.numel() == 0:
        return TensorEntry(tensor.dtype, tuple(tensor.shape), 0, 0)
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    length = span * tensor.dtype.itemsize
    first = offset_in_checkpoint(tensor)
    start = first + int(tensor.storage_offset()) * tensor.dtype.itemsize
    # torch computes the offset from the sizes of the records before it. In an archive that another program
    # wrote it may be wrong, so it must be the beginning of a record.
    if start < first or start + length > first + records.get(first, 0):
        raise ValueError(f"{name!r} lies outside of the archive's records; {_CONVERT}")
    stride = None if tensor.is_contiguous() else tuple(tensor.stride())
    return TensorEntry(tensor.dtype, tuple(tensor.shape), start, start + length, stride)
