"""A folder of torch's distributed checkpoint: ``.metadata``, a pickle, and ``.distcp`` files of tensors.

The metadata is read by an unpickler that knows the few classes of which it consists, and makes plain records
of them. Each tensor is read by ``torch.load(weights_only=True)``.

Source: ``torch/distributed/checkpoint/filesystem.py`` and ``metadata.py``.
"""

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch

from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._tensors.boxes import Box, tiling_problem
from fsdp_sft._tensors.disk import closing, read_bytes
from fsdp_sft._tensors.safetensors import open_file, read_at
from fsdp_sft.dcp_io.foreign.source import ForeignTensor
from fsdp_sft.errors import CheckpointCorruptError, CheckpointFormatError

METADATA_NAME = ".metadata"
_MOST_METADATA_BYTES = 1 << 30
_MODULE = "torch.distributed.checkpoint"
_RECORDS = {
    (f"{_MODULE}.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    )
} | {(f"{_MODULE}.filesystem", "_StorageInfo")}

_NOT_METADATA = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class _Record:
    """The attributes of an object of one of the known classes."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):  # TensorProperties
            names = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
            state = dict(zip(names, state, strict=False))
        vars(self).update(state)


class _Unpickler(pickle.Unpickler):
    """An unpickler that makes records of the classes it knows, and refuses everything else.

    Classes and functions are made anew each time, since a pickle can set attributes of what it is given.
    """

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in for each of the few names that such metadata uses; refuses any other name."""
        if (module, name) in _RECORDS:
            return type(name, (_Record,), {})
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in (("torch", "Size"), ("collections", "OrderedDict")):
            return tuple if name == "Size" else OrderedDict
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath", "WindowsPath"):
            return lambda *parts: str(PurePath(*parts))
        known = {("torch.serialization", "_get_layout"), (f"{_MODULE}.metadata", "_MEM_FORMAT_ENCODING")}
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no such metadata needs")
        return lambda *_: None


class DcpFolder:
    """One folder of a distributed checkpoint.

    Attributes:
        tensors: Tensors by flat name.
        others: Names of entries that are not tensors.
    """

    def __init__(self, folder: Path) -> None:
        """Read the metadata.

        Raises:
            CheckpointCorruptError: If it is not such metadata, or the parts of a tensor do not tile it.
        """
        self._folder = folder
        path = folder / METADATA_NAME
        try:
            metadata = _Unpickler(io.BytesIO(read_bytes(path, _MOST_METADATA_BYTES))).load()
            self._places = {
                (index.fqn, _offset(index)): info for index, info in metadata.storage_data.items()
            }
            described = metadata.state_dict_metadata
            self.others = [key for key, entry in described.items() if not hasattr(entry, "size")]
            self.tensors = {
                key: self._tensor(key, entry) for key, entry in described.items() if hasattr(entry, "size")
            }
        except _NOT_METADATA as error:
            reason = str(error) if type(error) in (pickle.UnpicklingError, ValueError) else repr(error)
            raise CheckpointCorruptError(
                f"{path} is not metadata of a distributed checkpoint: {reason}"
            ) from None

    def value(self, key: str) -> Any:
        """The entry under a name that is not a tensor's: a number, a string, a tuple or the like.

        Raises:
            CheckpointFormatError: If it is an object of another class. None of its code is run.
        """
        return self._load(key, self._places[key, None])

    def _tensor(self, key: str, entry: Any) -> ForeignTensor:
        """A tensor by its metadata, checked."""
        shape = tuple(int(n) for n in entry.size)
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        problem = tiling_problem(shape, boxes)
        if problem is not None:
            raise ValueError(f"{key}: {problem}")
        missing = [box for box in boxes if (key, box.offset) not in self._places]
        if missing:
            raise ValueError(f"{key} has a part at {missing[0].offset} that is in no file")
        dtype = entry.properties.dtype
        if not isinstance(dtype, torch.dtype) or any(type(n) is not int for box in boxes for n in box.offset):
            raise ValueError(f"{key} has no dtype or no offsets")
        return ForeignTensor(shape, dtype, partial(self._read, key, boxes, dtype))

    def _read(self, key: str, boxes: list[Box], dtype: torch.dtype, wanted: Box) -> torch.Tensor:
        """A box of a tensor, read from the parts that intersect it."""
        out = torch.empty(wanted.shape, dtype=dtype)
        for box in boxes:
            common = box.intersect(wanted)
            if common is None or not common.numel:
                continue
            part = self._load(key, self._places[key, box.offset])
            if not is_plain(part) or (tuple(part.shape), part.dtype) != (box.shape, dtype):
                raise CheckpointCorruptError(
                    f"{self._folder}: {key} at {box.offset} is not what the metadata says"
                )
            out[common.relative_to(wanted).slices] = part[common.relative_to(box).slices]
        return out

    def _load(self, key: str, info: Any) -> Any:
        """One entry of a file: a tensor, or another value that was passed to ``torch.save``."""
        if getattr(info, "transform_descriptors", None):
            raise CheckpointFormatError(f"{self._folder}: {key} is compressed or otherwise transformed")
        path = self._folder / PurePath(str(getattr(info, "relative_path", "(no file)"))).name
        try:
            fd = open_file(path)
            with closing(fd):
                offset, length = int(info.offset), int(info.length)
                if not 0 <= offset <= offset + length <= os.fstat(fd).st_size or length < 0:
                    raise ValueError(f"it is said to have {length} bytes at {offset}")
                data = bytearray(length)
                read_at(fd, offset, memoryview(data))
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointFormatError(
                f"{path}: {key} is an object, which is not unpickled: that could run any code "
                f"({str(error).splitlines()[0][:200]})"
            ) from None
        except (OSError, CheckpointFormatError, *_NOT_METADATA, RuntimeError) as error:
            blame_no_file(error, path)
            raise CheckpointCorruptError(f"{path}: {key} cannot be read: {error}") from None


def is_plain(value: Any) -> bool:
    """Whether a value is an ordinary strided tensor in CPU memory."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


def _offset(index: Any) -> tuple[int, ...] | None:
    """Index at which a part begins; None for an entry that is not a tensor, which has no such attribute."""
    offset = getattr(index, "offset", None)
    return None if offset is None else tuple(offset)


def below(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries whose names begin with ``prefix``, by the rest of their names."""
    return {key.removeprefix(prefix): entry for key, entry in tensors.items() if key.startswith(prefix)}
