"""Tensors in files, and the reads that fill a rank's box of one."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._tensors.boxes import Box
from fsdp_sft._tensors.safetensors import DTYPE_NAMES, Header, TensorEntry, open_file, read_header
from fsdp_sft.errors import CheckpointCorruptError, CheckpointFormatError

# Pieces: boxes of a tensor, each a strided view of one stored tensor. No I/O.

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of a target that is a strided view of one source tensor.

    Attributes:
        start: Index of the box's first element in the target, per dimension.
        size: Extent of the box, per dimension.
        key: Name of the source in the checkpoint.
        offset: Number of the source's element, in row-major order, that fills the first element of the box.
        stride: Distance in the source between neighbours in the box, in elements, per dimension.
    """

    start: Ints
    size: Ints
    key: str
    offset: int
    stride: Ints


def contiguous_strides(shape: Sequence[int]) -> Ints:
    """Strides of a row-major tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def intersect(piece: Piece, box: Box) -> Piece | None:
    """The part of a piece that lies inside a box of the target; None if that is empty.

    ``start`` of the result still counts from the target's first element, not from the box's.
    """
    common = Box(piece.start, piece.size).intersect(box)
    if common is None:
        return None
    # Along each dimension the result begins `a - b` strides of the source further on. The strides stay.
    skipped = sum((a - b) * s for a, b, s in zip(common.offset, piece.start, piece.stride, strict=True))
    return Piece(common.offset, common.shape, piece.key, piece.offset + skipped, piece.stride)


@dataclass(frozen=True)
class ByteRange:
    """A run of bytes of a file."""

    file: Path
    start: int
    num_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class Read:
    """What is read for a part of a parameter or buffer, small enough to be held at once.

    Attributes:
        key: Name of the stored tensor, for messages.
        runs: The bytes.
        make: Function from the bytes of each run, uint8 and on the device of ``place``, to the values: a view
            of them, or what is decoded from packed values and scales.
        place: View of the shard, of the values' size, to whose dtype they are cast.
        compare: Whether ``place`` must have these values already, instead of being filled.
        stored_as: Dtype of the elements, if they lie one after the other in the one run and in ``place``, of
            one dimension. Such a read may be large: it is done a buffer at a time, or straight to its place.
    """

    key: str
    runs: tuple[ByteRange, ...]
    make: Callable[[list[torch.Tensor]], torch.Tensor]
    place: torch.Tensor
    compare: bool = False
    stored_as: torch.dtype | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the runs."""
        return sum(run.num_bytes for run in self.runs)


class Stored(ABC):
    """A tensor, or one part of a tensor, that is stored somewhere.

    Attributes:
        entry: Dtype and shape in which it is published, and how many bytes it takes where it is stored.
        format: Name of the format in which its values are stored.
        stride: Distance between neighbours where it is stored, in elements, per dimension; None is row-major.
    """

    entry: TensorEntry
    format: str
    stride: Ints | None = None

    @abstractmethod
    def all_runs(self) -> tuple[ByteRange, ...]:
        """Byte ranges of the whole tensor."""

    @abstractmethod
    def _read(self, part: Piece, place: torch.Tensor, compare: bool) -> Iterator[Read]:
        """Reads that fill ``place`` with ``part``; see ``reads``."""

    def piece(self, key: str, start: Ints | None = None) -> Piece:
        """The tensor as a piece of the full one, in which it begins at ``start`` (None: at the origin)."""
        shape = self.entry.shape
        return Piece(start or (0,) * len(shape), shape, key, 0, self.stride or contiguous_strides(shape))

    def reads(self, piece: Piece, box: Box, local: torch.Tensor, *, compare: bool = False) -> Iterator[Read]:
        """Reads for the part of ``piece`` inside a rank's box; none if there is no such part.

        Args:
            piece: A box of the full tensor, as a strided view of what lies here.
            box: This rank's box of the full tensor.
            local: This rank's shard, the memory of ``box``.
            compare: See ``Read``.
        """
        part = intersect(piece, box)
        if part is not None:
            place = local[Box(part.start, part.size).relative_to(box).slices]
            yield from self._read(part, place, compare)


@dataclass(frozen=True)
class InFile(Stored):
    """A tensor, or one part of a tensor, in one run of a file.

    Attributes:
        file: Path of the file.
        entry: Dtype, shape and byte range.
    """

    file: Path
    entry: TensorEntry

    @property
    def format(self) -> str:  # type: ignore[override]
        """The name that safetensors has for its dtype, such as ``"bf16"``."""
        return DTYPE_NAMES.get(self.entry.dtype, str(self.entry.dtype).removeprefix("torch.")).lower()

    def all_runs(self) -> tuple[ByteRange, ...]:
        """The bytes of all of it."""
        return (ByteRange(self.file, self.entry.start, self.entry.num_bytes),)

    def _read(self, part: Piece, place: torch.Tensor, compare: bool) -> Iterator[Read]:
        dtype, every = self.entry.dtype, _dims(part, place)
        stored_as = dtype if not compare and len(every) == 1 and every[0][1:] == (1, 1) else None
        limit = copied_bytes(place.device) if stored_as is None else _LARGE_BYTES
        for at, place_at, dims in _cut(
            part.offset, int(place.storage_offset()), every, dtype.itemsize, limit
        ):
            size, stride, place_stride = zip(*dims, strict=True)
            span = 1 + sum((n - 1) * step for n, step, _ in dims)  # from the first element to the last
            run = ByteRange(self.file, self.entry.start + at * dtype.itemsize, span * dtype.itemsize)
            view = place.as_strided(size, place_stride, place_at)
            yield Read(part.key, (run,), partial(_strided, dtype, size, stride), view, compare, stored_as)


def _strided(dtype: torch.dtype, size: Ints, stride: Ints, raws: list[torch.Tensor]) -> torch.Tensor:
    """The elements of a box among the bytes from its first to its last."""
    return raws[0].view(dtype).as_strided(size, stride)


# A box cut into parts of bounded size, each one read.

_LARGE_BYTES = 8 << 20  # one read where file and shard have no gaps, and one copy to an accelerator
_COPIED_BYTES = 1 << 18  # copied out at once on the host: they are still in the core's cache
MIN_RUN_BYTES = 512  # runs shorter than this are read together, with the gaps between them


def copied_bytes(device: torch.device) -> int:
    """Bytes to copy at once to a shard on ``device``."""
    return _COPIED_BYTES if device.type == "cpu" else _LARGE_BYTES


# The first element of a part of a box in the stored tensor, and in the storage of the shard; for each of its
# dimensions the size, and the distance of neighbours in these two.
_Cut: TypeAlias = tuple[int, int, list[tuple[int, int, int]]]


def _dims(part: Piece, place: torch.Tensor) -> list[tuple[int, int, int]]:
    """The dimensions of a piece, the outermost in the file first."""
    dims = sorted(
        (dim for dim in zip(part.size, part.stride, place.stride(), strict=True) if dim[0] > 1),
        key=lambda dim: -dim[1],
    )
    # Neighbouring dimensions become one where both the file and the shard go through them without a gap.
    merged: list[tuple[int, int, int]] = []
    for size, step, place_step in dims:
        if merged and merged[-1][1:] == (size * step, size * place_step):
            merged[-1] = (merged[-1][0] * size, step, place_step)
        else:
            merged.append((size, step, place_step))
    return merged or [(1, 1, 1)]


def _cut(
    at: int, place_at: int, dims: list[tuple[int, int, int]], itemsize: int, limit: int
) -> Iterator[_Cut]:
    """Parts of a box, which is cut along its outermost dimension until a read fits and wastes little.

    "Wastes little" means that at least 95 % of the bytes read are needed, or that what is skipped or needed
    is too short to be worth a separate read.
    """
    (size, step, place_step), inner = dims[0], dims[1:]
    inner_span = 1 + sum((n - 1) * s for n, s, _ in inner)  # from first to last element of one row
    inner_bytes = inner_span * itemsize
    needed = math.prod(n for n, _, _ in inner)  # elements of one row that belong to the box
    # One read for several rows wastes little, although it includes the gaps between them. A read for a short
    # row alone takes as long as a gap of about 100 KB, whatever the device.
    is_short = needed * itemsize < MIN_RUN_BYTES and step * itemsize <= _COPIED_BYTES
    dense = needed * 20 >= step * 19 or is_short
    fits = (inner_bytes <= limit and needed * 20 >= inner_span * 19) or inner_bytes < MIN_RUN_BYTES
    rows = max(1, (limit - inner_bytes) // (step * itemsize) + 1) if dense and fits else 1
    for row in range(0, size, rows):
        begin, place_begin = at + row * step, place_at + row * place_step
        if fits:
            yield begin, place_begin, [(min(rows, size - row), step, place_step), *inner]
        else:
            yield from _cut(begin, place_begin, inner, itemsize, limit)


def file_header(path: Path, damaged: type[Exception], advice: str = "") -> Header:
    """The header of a safetensors file, checked.

    Args:
        path: The file; the last component must not be a symbolic link.
        damaged: Class of the error for a file that cannot be used.
        advice: What to do about it, for the error.

    Raises:
        CheckpointFormatError: If the file or its header is damaged or missing (then it is ``damaged``).
        OSError: If this process may open no more files, or may not open this one.
    """
    try:
        with os.fdopen(open_file(path), "rb") as file:
            return read_header(file.fileno())
    except (OSError, CheckpointFormatError) as error:
        blame_no_file(error, path)
        raise damaged(f"{path} cannot be read: {error}{advice}") from error


class StoredFolder:
    """The safetensors files below a folder, which hold parts of tensors.

    A file is open only while its header is read; the headers are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._headers: dict[str, Header] = {}

    def header(self, file: str) -> Header:
        """The header of a file, checked and remembered.

        Raises:
            CheckpointCorruptError: If the file or its header is damaged or missing.
            OSError: If this process may open no more files, or may not open this one.
        """
        if file not in self._headers:
            self._headers[file] = file_header(self.folder / file, CheckpointCorruptError)
        return self._headers[file]

    def reads(
        self, key: str, parts: Iterable[tuple[str, Box]], box: Box, out: torch.Tensor
    ) -> Iterator[Read]:
        """Reads that fill ``out`` with the box ``box`` of a tensor.

        Args:
            key: Name of the tensor in the files.
            parts: (file, box of the tensor in it) pairs; they must cover ``box``.
            box: Box of the tensor that is wanted.
            out: Tensor to fill, of the box's shape, on any device; values are cast to its dtype.
        """
        for file, part in parts:
            if part.numel:
                stored = InFile(self.folder / file, self.header(file).entries[key])
                yield from stored.reads(stored.piece(key, part.offset), box, out)
