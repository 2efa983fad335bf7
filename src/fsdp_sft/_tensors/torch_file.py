"""Files that ``torch.save`` wrote, read as data: names, dtypes, shapes and byte ranges of their tensors.

Such a file is an uncompressed zip archive of the tensors' storages and of a pickle that says which tensor is
a view of which storage. The pickle is read by ``pickle_data``, which runs nothing, and the byte ranges like
those of a safetensors file.

Source: ``torch/serialization.py`` and ``torch/_utils.py``.
"""

import math
import os
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from fsdp_sft._process.bounds import MAX_HEADER_BYTES, check_sizes
from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._tensors.pickle_data import Named, NotDataError, PickledObject, empty_dict, read_pickle
from fsdp_sft._tensors.safetensors import Header, TensorEntry, open_file
from fsdp_sft.errors import CheckpointFormatError

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., length of the name, length of the extra field
_SIGNATURE = b"PK\x03\x04"
_CONVERT = "convert it once: torch.save(torch.load(path, weights_only=True), path)"


@dataclass(frozen=True, eq=False)
class Storage:
    """Bytes in the archive.

    Attributes:
        key: Name of the record below ``data/``.
        dtype: Dtype that the reference names; None for bytes alone.
    """

    key: str
    dtype: torch.dtype | None


@dataclass(frozen=True, eq=False)
class SavedTensor:
    """A tensor as the pickle describes it.

    Attributes:
        storage: The bytes of which it is a view.
        offset: Its first element, counted from the storage's first byte in elements.
        shape: Size of each dimension.
        stride: Elements from one index to the next, for each dimension.
        dtype: Dtype of its elements.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Unusual(PickledObject):
    """Something that torch stores and that is no plain tensor, number, text or container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind


@dataclass(frozen=True)
class TorchFile:
    """What a file of ``torch.save`` holds.

    Attributes:
        value: Its contents; ``SavedTensor`` stands for a tensor.
        records: (first byte, size) of each storage in the file, by its key.
    """

    value: Any
    records: Mapping[str, tuple[int, int]]

    def entry(self, name: str, tensor: Any) -> TensorEntry:
        """Where the bytes of a tensor lie.

        Raises:
            ValueError: If it is no tensor, is no view of plain numbers, or lies outside of the archive.
        """
        if not isinstance(tensor, SavedTensor):
            kind = tensor.kind if isinstance(tensor, Unusual) else type(tensor).__name__
            how = "is not stored as plain numbers of its own:" if isinstance(tensor, Unusual) else "is"
            raise ValueError(
                f"{name!r} {how} {kind}, not a tensor: the file must be a state dict of plain tensors "
                "(.clone(), .to_dense() or .resolve_neg() first)"
            )
        shape, stride = tensor.shape, tensor.stride
        moving = [(size, step) for size, step in zip(shape, stride, strict=True) if size > 1]
        span = 1 + sum((size - 1) * step for size, step in moving)
        if 0 not in shape and math.prod(size for size, _ in moving) > span:
            raise ValueError(
                f"{name!r} is not stored as plain numbers of its own (shape {shape}, strides {stride}); "
                "store a plain copy of it (.clone())"
            )
        if 0 in shape:
            return TensorEntry(tensor.dtype, shape, 0, 0)
        length = span * tensor.dtype.itemsize
        first, size = self.records.get(tensor.storage.key, (0, 0))
        start = tensor.offset * tensor.dtype.itemsize
        if start + length > size:
            raise ValueError(f"{name!r} lies outside of the archive's records; {_CONVERT}")
        own = None if _is_contiguous(moving) else stride
        return TensorEntry(tensor.dtype, shape, first + start, first + start + length, own)


def _is_contiguous(moving: list[tuple[int, int]]) -> bool:
    """Whether dimensions of these sizes and strides, those of one index left out, follow without gaps."""
    expected = 1
    for size, step in reversed(moving):
        if step != expected:
            return False
        expected *= size
    return True


def read_torch_file(file: IO[bytes]) -> TorchFile:
    """The contents of a file that ``torch.save`` wrote, without the bytes of its tensors.

    Args:
        file: The file, or the part of a file, from its first byte on.

    Raises:
        NotDataError: If it wants to call or make something that data does not need; nothing is run.
        ValueError: If it is damaged, compressed, big-endian or older than torch 1.6. A damaged archive may
            also raise ``zipfile.BadZipFile``, ``NotImplementedError`` or ``struct.error``.

    Memory: In proportion to the pickle, which has at most 100 MB.
    """
    file.seek(0)
    if file.read(4) != _SIGNATURE:
        raise ValueError(f"it is not a zip archive, so it is damaged or from before torch 1.6; {_CONVERT}")
    with zipfile.ZipFile(file) as archive:
        infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        for info in infos.values():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ValueError(f"{info.filename} is compressed, which torch.save never does; {_CONVERT}")
        if "data.pkl" not in infos:
            raise ValueError(f"it has no pickle, so torch.save has not written it; {_CONVERT}")
        if infos["data.pkl"].file_size > MAX_HEADER_BYTES:
            size = infos["data.pkl"].file_size
            raise ValueError(f"its pickle has {size} bytes, more than {MAX_HEADER_BYTES}")
        order = infos.get("byteorder")
        if order is not None and (order.file_size > 8 or archive.read(order) != b"little"):
            raise ValueError(f"its numbers are big-endian; {_CONVERT}")
        value = read_pickle(archive.read(infos["data.pkl"]), _known, _storage)
    records = {
        name.removeprefix("data/"): (_start(file, info), info.file_size)
        for name, info in infos.items()
        if name.startswith("data/")
    }
    end = max((start + size for start, size in records.values()), default=0)
    if end > file.seek(0, os.SEEK_END):
        raise ValueError(f"a record of the archive ends at byte {end}, after the file")
    return TorchFile(value, records)


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
            found = read_torch_file(file)
            if not isinstance(found.value, dict):
                raise ValueError(f"it holds {type(found.value).__name__}, not a dictionary of tensors")
            entries = {_text(name): found.entry(name, value) for name, value in found.value.items()}
            file_bytes = os.fstat(file.fileno()).st_size
    except (OSError, ValueError, *BROKEN_ARCHIVE) as error:
        blame_no_file(error, path)
        raise damaged(f"{path} cannot be used: {_reason(error)}") from None
    return Header(dict(sorted(entries.items(), key=lambda item: item[1].start)), {}, file_bytes)


BROKEN_ARCHIVE = (
    *(zipfile.BadZipFile, NotImplementedError, RuntimeError),
    *(struct.error, EOFError, KeyError, OverflowError),
)
"""What a damaged archive makes ``zipfile`` raise, beside ValueError and OSError."""


def _reason(error: Exception) -> str:
    """Why a file could not be read, in one line."""
    if isinstance(error, NotDataError):
        return f"its pickle holds more than tensors, and was not run; save a state dict ({error})"
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def _start(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """First byte of a record's contents, after its local header, whose length the directory does not say."""
    file.seek(info.header_offset)
    signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != _SIGNATURE:
        raise ValueError(f"{info.filename} is not where the archive's directory says")
    return info.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)


def _text(name: Any) -> str:
    """A key of the dictionary, which must be a text."""
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is not the name of a tensor")
    return name


def _storage(reference: Any) -> Storage:
    """A storage by its reference: ("storage", its class, key, device, number of elements)."""
    if type(reference) is not tuple or len(reference) != 5 or reference[0] != "storage":
        raise TypeError("a reference is not to a storage")
    _, dtype, key, _, _ = reference
    if not isinstance(key, str) or not (dtype is None or isinstance(dtype, torch.dtype)):
        raise TypeError("a reference is not to a storage")
    return Storage(key, dtype)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *more: Any) -> SavedTensor | Unusual:
    """A tensor; ``more`` is (requires_grad, hooks, metadata)."""
    return _view(storage, offset, shape, stride, getattr(storage, "dtype", None), more[2:])


def _tensor_with_dtype(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *more: Any
) -> SavedTensor | Unusual:
    """A tensor of a dtype that no storage has a class for."""
    return _view(storage, offset, shape, stride, dtype, more)


def _view(
    storage: Any, offset: Any, shape: Any, stride: Any, dtype: Any, metadata: tuple[Any, ...]
) -> SavedTensor | Unusual:
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor has no bytes, or no dtype")
    if type(shape) is not tuple or type(stride) is not tuple:  # a list would be copied for each tensor
        raise TypeError("the shape of a tensor is no tuple")
    if any(metadata):
        return Unusual("a conjugate or negated view")
    return SavedTensor(
        storage,
        check_sizes((offset,), "the offset of a tensor")[0],
        check_sizes(shape, "the shape of a tensor"),
        check_sizes(stride, "the strides of a tensor"),
        dtype,
    )


def _with_attributes(function: Any, cls: Any, arguments: Any, state: Any) -> Any:
    """A tensor with attributes of its own, which are left out; a subclass is refused."""
    if not isinstance(function, Named) or type(arguments) is not tuple:
        raise TypeError("a tensor is made by no function")
    made = function.make(*arguments)
    return made if cls == "tensor" else Unusual("a tensor of a class of its own")


DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
"""Dtypes by their names in torch; asking torch for any other name might import a part of it."""
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
}
_FUNCTIONS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): Named(empty_dict),
    ("torch._utils", "_rebuild_tensor"): Named(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): Named(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): Named(_tensor_with_dtype),
    ("torch._utils", "_rebuild_parameter"): Named(lambda data, *_: data),
    ("torch._utils", "_rebuild_parameter_with_state"): Named(lambda data, *_: data),
    ("torch._tensor", "_rebuild_from_type_v2"): Named(_with_attributes),
    ("torch", "Tensor"): "tensor",
    ("torch.nn.parameter", "Parameter"): "tensor",
    ("torch.storage", "UntypedStorage"): None,
    ("torch", "device"): Named(lambda *_: Unusual("a device")),
    ("torch", "Size"): Named(lambda sizes: sizes),
    ("torch.serialization", "_get_layout"): Named(lambda *_: None),
    ("_codecs", "encode"): Named(lambda *_: Unusual("bytes")),
}


def _known(module: str, name: str) -> Any:
    """What stands for a function or a class that a file of ``torch.save`` names; nothing is imported."""
    if (module, name) in _FUNCTIONS:
        return _FUNCTIONS[module, name]
    if module == "torch" and (name in DTYPES or name in _STORAGES):
        return DTYPES[name] if name in DTYPES else _STORAGES[name]
    if module == "torch._utils" and name.startswith("_rebuild_"):
        kind = name.removeprefix("_rebuild_").removesuffix("_v2").replace("_", " ")
        return Named(lambda *_: Unusual(f"a {kind}"))
    raise NotDataError(f"it names {module}.{name}, which no state dict needs")
