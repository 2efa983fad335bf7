"""Files that ``torch.save`` wrote: names, dtypes, shapes and byte ranges of their tensors, and no code run.

torch's own reader of plain data (``weights_only``) reads the pickle alone, out of a small archive without the
tensors. Where each storage lies is taken from the archive's own directory. What would cost more than the file
has bytes is refused before.
"""

import io
import math
import os
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from fsdp_sft._compat.serialization import first_byte, load_without_memory
from fsdp_sft._process.bounds import MAX_HEADER_BYTES, check_sizes
from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._tensors.safetensors import Header, TensorEntry, open_file
from fsdp_sft.errors import CheckpointFormatError

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., length of the name, length of the extra field
_SIGNATURE = b"PK\x03\x04"
_CONVERT = "convert it once: torch.save(torch.load(path, weights_only=True), path)"
_DAMAGED = (  # what a damaged archive or pickle makes zipfile and torch raise
    *(OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, AssertionError),
    *(ArithmeticError, EOFError, struct.error, zipfile.BadZipFile),
)
_Places = dict[str, tuple[int, int]]  # (first byte, size) of each storage in the file, by its key


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

    Memory: In proportion to the pickle, which has at most 100 MB.
    """
    try:
        with os.fdopen(open_file(path), "rb") as file:
            pickled, places = _records(file)
            state, keys = _without_tensors(pickled, places)
            if not isinstance(state, dict):
                raise ValueError(f"it holds {type(state).__name__}, not a dictionary of tensors")
            entries = {name: _entry(name, value, keys, places) for name, value in state.items()}
            file_bytes = os.fstat(file.fileno()).st_size
    except pickle.UnpicklingError as error:
        why = str(error.__context__ or error).splitlines()[0]
        raise damaged(
            f"{path} cannot be used: its pickle holds more than tensors, and was not run; save a state dict "
            f"({why:.200})"
        ) from None
    except _DAMAGED as error:
        blame_no_file(error, path)
        why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error!s:.200}"
        raise damaged(f"{path} cannot be used: {why}") from None
    return Header(dict(sorted(entries.items(), key=lambda item: item[1].start)), {}, file_bytes)


def _records(file: IO[bytes]) -> tuple[bytes, _Places]:
    """The pickle of an archive, and where its storages lie.

    Raises:
        ValueError: If it is none that ``torch.save`` writes on this kind of machine.
    """
    if file.read(4) != _SIGNATURE:
        raise ValueError(f"it is not a zip archive, so it is damaged or from before torch 1.6; {_CONVERT}")
    with zipfile.ZipFile(file) as archive:
        infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        for info in infos.values():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ValueError(f"{info.filename} is compressed, which torch.save never does; {_CONVERT}")
        if "data.pkl" not in infos:
            raise ValueError(f"it has no pickle, so torch.save has not written it; {_CONVERT}")
        if (size := infos["data.pkl"].file_size) > MAX_HEADER_BYTES:
            raise ValueError(f"its pickle has {size} bytes, more than {MAX_HEADER_BYTES}")
        order = infos.get("byteorder")
        if order is not None and (order.file_size > 8 or archive.read(order) != b"little"):
            raise ValueError(f"its numbers are big-endian; {_CONVERT}")
        pickled = archive.read(infos["data.pkl"])
    places = {
        name.removeprefix("data/"): (_start(file, info), info.file_size)
        for name, info in infos.items()
        if name.startswith("data/")
    }
    if max((sum(place) for place in places.values()), default=0) > file.seek(0, os.SEEK_END):
        raise ValueError("a record of the archive ends after the file")
    return pickled, places


def _start(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """First byte of a record's contents, after its local header, whose length the directory does not say."""
    file.seek(info.header_offset)
    signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != _SIGNATURE:
        raise ValueError(f"{info.filename} is not where the archive's directory says")
    return info.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)


def _without_tensors(pickled: bytes, places: _Places) -> tuple[Any, dict[int, str]]:
    """What a pickle holds, and the key of each storage by its place in an archive of empty records."""
    _refuse_costly(pickled)
    copy = io.BytesIO()
    with zipfile.ZipFile(copy, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
        for key in places:
            archive.writestr(f"archive/data/{key}", b"")
        keys = {
            _start(copy, info): info.filename.removeprefix("archive/data/") for info in archive.infolist()
        }
    copy.seek(0)
    return load_without_memory(copy), keys


def _refuse_costly(pickled: bytes) -> None:
    """Refuse what a state dict has no need of, and what would cost more than the file has bytes.

    A tuple that is named again (60 pairs of pairs are 2^60 parts), and names out of other places than torch
    (``bytearray`` makes as many bytes as it is asked for).

    Raises:
        ValueError: If there is such a thing, or it is no pickle.
    """
    tuples: set[Any] = set()
    is_tuple = False
    for code, argument, _ in pickletools.genops(pickled):
        if "PUT" in code.name and is_tuple:
            tuples.add(argument)
        elif "GET" in code.name and argument in tuples:
            raise ValueError("its pickle names a tuple again, which no state dict does")
        elif "GLOBAL" in code.name and not str(argument).startswith(("torch", "collections OrderedDict")):
            raise pickle.UnpicklingError(f"it names {argument}")
        is_tuple = code.name.startswith("TUPLE")


def _entry(name: Any, tensor: Any, keys: dict[int, str], places: _Places) -> TensorEntry:
    """Where the bytes of a tensor lie.

    Raises:
        ValueError: If its name is no text, or it is no tensor or no view of plain numbers, or lies outside
            of the archive.
    """
    if not isinstance(name, str):
        raise ValueError(f"a key of it is {type(name).__name__}, and not the name of a tensor")
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name!r} is {type(tensor).__name__}, not a tensor: the file must be a state dict")
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized
    if not is_plain or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{name!r} is not stored as plain numbers of its own (.to_dense() or .resolve_neg() first)"
        )
    shape = check_sizes(tuple(tensor.shape), "the shape of a tensor")
    stride = check_sizes(tensor.stride(), "the strides of a tensor")
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if 0 in shape:
        return TensorEntry(tensor.dtype, shape, 0, 0)
    if math.prod(shape) > span:
        raise ValueError(
            f"{name!r} is not stored as plain numbers of its own (shape {shape}, strides {stride}); "
            "store a plain copy of it (.clone())"
        )
    length, start = span * tensor.itemsize, int(tensor.storage_offset()) * tensor.itemsize
    first, size = places[keys[first_byte(tensor)]]
    if start + length > size:
        raise ValueError(f"{name!r} lies outside of the archive's records; {_CONVERT}")
    own = None if tensor.is_contiguous() else stride
    return TensorEntry(tensor.dtype, shape, first + start, first + start + length, own)
