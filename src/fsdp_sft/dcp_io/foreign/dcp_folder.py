"""A folder of torch's distributed checkpoint: ``.metadata``, a pickle, and ``.distcp`` files of tensors.

The pickles are read as data. Each entry of a ``.distcp`` file is one that ``torch.save`` wrote.

Source: ``torch/distributed/checkpoint/filesystem.py`` and ``metadata.py``.
"""

import io
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch

from fsdp_sft._process.bounds import MAX_METADATA_BYTES, check_sizes
from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._tensors.boxes import Box, tiling_problem
from fsdp_sft._tensors.disk import closing, read_bytes
from fsdp_sft._tensors.pickle_data import Named, NotDataError, PickledObject, empty_dict, read_pickle
from fsdp_sft._tensors.safetensors import open_file, read_at
from fsdp_sft._tensors.torch_file import (
    BROKEN_ARCHIVE,
    DTYPES,
    SavedTensor,
    TorchFile,
    Unusual,
    read_torch_file,
)
from fsdp_sft.dcp_io.foreign.source import ForeignTensor
from fsdp_sft.errors import CheckpointCorruptError, CheckpointFormatError

METADATA_NAME = ".metadata"
_MODULE = "torch.distributed.checkpoint"
_TENSOR_PROPERTIES = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
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
_NOT_METADATA = (AttributeError, LookupError, TypeError, ValueError)


def _known(module: str, name: str) -> Any:
    """What stands for each of the few names that such metadata uses; refuses any other name."""
    if (module, name) in _RECORDS:
        return Named(lambda *_: PickledObject(_TENSOR_PROPERTIES))
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    if (module, name) == ("torch", "Size"):
        return Named(lambda sizes: sizes)
    if (module, name) == ("collections", "OrderedDict"):
        return Named(empty_dict)
    if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath", "WindowsPath"):
        return Named(lambda *_: "a path")
    known = {("torch.serialization", "_get_layout"), (f"{_MODULE}.metadata", "_MEM_FORMAT_ENCODING")}
    if (module, name) not in known:
        raise NotDataError(f"it names {module}.{name}, which no such metadata needs")
    return Named(lambda *_: None)


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
            metadata = read_pickle(read_bytes(path, MAX_METADATA_BYTES), _known)
            self._places = {
                (str(index.fqn), _offset(index)): info for index, info in metadata.storage_data.items()
            }
            described = metadata.state_dict_metadata
            self.others = [key for key, entry in described.items() if not hasattr(entry, "size")]
            self.tensors = {
                key: self._tensor(key, entry) for key, entry in described.items() if hasattr(entry, "size")
            }
        except _NOT_METADATA as error:
            reason = str(error) if isinstance(error, ValueError) else repr(error)
            raise CheckpointCorruptError(
                f"{path} is not metadata of a distributed checkpoint: {reason}"
            ) from None

    def value(self, key: str) -> Any:
        """The entry under a name that is not a tensor's: a number, a string, a tuple or the like.

        Raises:
            CheckpointFormatError: If it is an object of another class. None of its code is run.
        """
        return plain_value(key, self._load(key, self._places[key, None])[0].value)

    def _tensor(self, key: str, entry: Any) -> ForeignTensor:
        """A tensor by its metadata, checked."""
        shape = check_sizes(entry.size, f"the shape of {key}")
        boxes = [
            Box(check_sizes(chunk.offsets, f"a part of {key}"), check_sizes(chunk.sizes, f"a part of {key}"))
            for chunk in entry.chunks
        ]
        problem = tiling_problem(shape, boxes)
        if problem is not None:
            raise ValueError(f"{key}: {problem}")
        missing = [box for box in boxes if (key, box.offset) not in self._places]
        if missing:
            raise ValueError(f"{key} has a part at {missing[0].offset} that is in no file")
        dtype = entry.properties.dtype
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{key} has no dtype")
        return ForeignTensor(shape, dtype, partial(self._read, key, boxes, dtype))

    def _read(self, key: str, boxes: list[Box], dtype: torch.dtype, wanted: Box) -> torch.Tensor:
        """A box of a tensor, read from the parts that intersect it."""
        out = torch.empty(wanted.shape, dtype=dtype)
        for box in boxes:
            common = box.intersect(wanted)
            if common is None or not common.numel:
                continue
            part = self._part(key, box, dtype)
            out[common.relative_to(wanted).slices] = part[common.relative_to(box).slices]
        return out

    def _part(self, key: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """A part of a tensor, as it lies in its file."""
        saved, data = self._load(key, self._places[key, box.offset])
        try:
            entry = saved.entry(key, saved.value)
        except ValueError as error:
            raise CheckpointCorruptError(f"{self._folder}: {key} at {box.offset}: {error}") from None
        if (entry.shape, entry.dtype) != (box.shape, dtype):
            raise CheckpointCorruptError(
                f"{self._folder}: {key} at {box.offset} is not what the metadata says"
            )
        count = entry.num_bytes // dtype.itemsize
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=entry.start)
        return flat.view(box.shape) if entry.stride is None else flat.as_strided(box.shape, entry.stride)

    def _load(self, key: str, info: Any) -> tuple[TorchFile, bytearray]:
        """One entry of a file, what was passed to ``torch.save``, and its bytes."""
        if getattr(info, "transform_descriptors", None):
            raise CheckpointFormatError(f"{self._folder}: {key} is compressed or otherwise transformed")
        path = self._folder / PurePath(str(getattr(info, "relative_path", "(no file)"))).name
        try:
            fd = open_file(path)
            with closing(fd):
                offset, length = check_sizes((info.offset, info.length), "its place in the file")
                if offset + length > os.fstat(fd).st_size:
                    raise ValueError(f"it is said to have {length} bytes at {offset}")
                data = bytearray(length)
                read_at(fd, offset, memoryview(data))
            return read_torch_file(io.BytesIO(data)), data
        except NotDataError as error:
            raise CheckpointFormatError(
                f"{path}: {key} is an object, which is not unpickled: that could run any code ({error})"
            ) from None
        except (OSError, CheckpointFormatError, *_NOT_METADATA, *BROKEN_ARCHIVE) as error:
            blame_no_file(error, path)
            raise CheckpointCorruptError(f"{path}: {key} cannot be read: {error}") from None


def plain_value(key: str, value: Any) -> Any:
    """A value of numbers, texts and containers.

    Raises:
        CheckpointFormatError: If there is a tensor or an object in it.
    """
    if isinstance(value, (SavedTensor, Unusual)):
        raise CheckpointFormatError(f"{key} is not a number, a text, or a list or dict of these")
    for inner in value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ():
        plain_value(key, inner)
    return value


def _offset(index: Any) -> tuple[int, ...] | None:
    """Index at which a part begins; None for an entry that is not a tensor, which has no such attribute."""
    offset = getattr(index, "offset", None)
    return None if offset is None else check_sizes(offset, "the place of a part")


def below(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The entries whose names begin with ``prefix``, by the rest of their names."""
    return {key.removeprefix(prefix): entry for key, entry in tensors.items() if key.startswith(prefix)}
