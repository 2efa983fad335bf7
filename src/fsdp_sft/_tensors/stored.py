"""Tensors in files, and the reads that fill a rank's box of one."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from fsdp_sft._process.limits import blame_no_file
from fsdp_sft._tensors.boxes import Box
from fsdp_sft._tensors.disk import closing
from fsdp_sft._tensors.safetensors import DTYPE_NAMES, Header, TensorEntry, open_file, read_header
from fsdp_sft.errors import CheckpointCorruptError, CheckpointFormatError

# Jobs for the reader: what a rank reads from stored tensors.

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

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.size)

    @property
    def span(self) -> int:
        """Number of the source's elements from the first to the last of the box."""
        return 1 + sum((size - 1) * step for size, step in zip(self.size, self.stride, strict=True))

    def narrowed(self, dim: int, at: int, size: int) -> "Piece":
        """The piece narrowed to the indices ``at`` to ``at + size`` of the box along a dimension."""
        starts, sizes = list(self.start), list(self.size)
        starts[dim] += at
        sizes[dim] = size
        offset = self.offset + at * self.stride[dim]
        return Piece(tuple(starts), tuple(sizes), self.key, offset, self.stride)


def contiguous_strides(shape: Sequence[int]) -> Ints:
    """Strides of a row-major tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def is_row_major(size: Ints, stride: Ints) -> bool:
    """Whether strides are row-major and leave no gaps."""
    expected = contiguous_strides(size)
    return all(a == b for a, b, n in zip(stride, expected, size, strict=True) if n > 1)


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


Mode = Literal["copy", "compare"]


@dataclass(frozen=True)
class Job:
    """A strided box of one stored tensor, and the memory that it is read into.

    Attributes:
        name: Name of the parameter or buffer, for messages.
        key: Name of the stored tensor in its file.
        file: Path of the file.
        start: Byte of the file at which the box begins.
        dtype: Dtype of the stored elements.
        size: Extent of the box, per dimension.
        stride: Distance between neighbours in the file, in stored elements, per dimension.
        dest: View of the shard, of that size.
        check_finite: Whether NaN and infinity are errors.
        mode: ``"copy"`` fills ``dest``; ``"compare"`` requires that it has the same values already.
    """

    name: str
    key: str
    file: Path
    start: int
    dtype: torch.dtype
    size: Ints
    stride: Ints
    dest: torch.Tensor
    check_finite: bool = False
    mode: Mode = "copy"

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored elements."""
        return self.dest.numel() * self.dtype.itemsize

    @cached_property
    def is_direct(self) -> bool:
        """Whether the bytes can be read straight into ``dest``."""
        dest = self.dest
        return (
            self.mode == "copy"
            and not self.check_finite
            and dest.is_cpu
            and dest.dtype == self.dtype
            and dest.is_contiguous()
            and is_row_major(self.size, self.stride)
        )


@dataclass(frozen=True)
class ByteRange:
    """A run of bytes of a file."""

    file: Path
    start: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Computation:
    """A box of values that are computed from several runs of bytes.

    Attributes:
        name: Name of the parameter or buffer, for messages.
        key: Name of the stored tensor.
        runs: What is read for it; small enough to be held at once.
        compute: Function from the bytes of the runs, each uint8 and on the device of ``dest``, to the values.
        dest: View of the shard, of the values' size.
        check_finite: Whether NaN and infinity are errors.
        mode: See ``Job``.
    """

    name: str
    key: str
    runs: tuple[ByteRange, ...]
    compute: Callable[[list[torch.Tensor]], torch.Tensor]
    dest: torch.Tensor
    check_finite: bool = False
    mode: Mode = "copy"

    @property
    def num_bytes(self) -> int:
        """Bytes of the runs."""
        return sum(run.num_bytes for run in self.runs)


AT_ONCE = 1 << 19  # values that are computed at once


class Stored(ABC):
    """A tensor, or one part of a tensor, that is stored somewhere.

    Attributes:
        entry: Dtype and shape in which it is published, and how many bytes it takes where it is stored.
        format: Name of the format in which its values are stored.
    """

    entry: TensorEntry
    format: str

    @abstractmethod
    def all_runs(self) -> tuple[ByteRange, ...]:
        """Byte ranges of the whole tensor."""

    @abstractmethod
    def _read(
        self, name: str, part: Piece, place: torch.Tensor, check_finite: bool, mode: Mode, at_once: int
    ) -> Iterator[Job | Computation]:
        """Jobs that fill ``place`` with ``part``; see ``jobs``."""

    def piece(self, key: str, start: Ints | None = None) -> Piece:
        """The tensor as a piece of the full one, in which it begins at ``start`` (None: at the origin)."""
        shape = self.entry.shape
        return Piece(
            start or (0,) * len(shape), shape, key, 0, self.entry.stride or contiguous_strides(shape)
        )

    def jobs(
        self,
        name: str,
        piece: Piece,
        box: Box,
        local: torch.Tensor,
        *,
        check_finite: bool = False,
        mode: Mode = "copy",
        at_once: int = AT_ONCE,
    ) -> Iterator[Job | Computation]:
        """Jobs that read the part of ``piece`` inside a rank's box; none if there is no such part.

        Args:
            name: Name of the parameter or buffer, for messages.
            piece: A box of the full tensor, as a strided view of what lies here.
            box: This rank's box of the full tensor.
            local: This rank's shard, the memory of ``box``.
            check_finite: See ``Job``.
            mode: See ``Job``.
            at_once: About how many values may be computed at once, if they are computed.
        """
        part = intersect(piece, box)
        if part is not None:
            place = local[Box(part.start, part.size).relative_to(box).slices]
            yield from self._read(name, part, place, check_finite, mode, at_once)


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

    def _read(
        self, name: str, part: Piece, place: torch.Tensor, check_finite: bool, mode: Mode, at_once: int
    ) -> Iterator[Job]:
        start = self.entry.start + part.offset * self.entry.dtype.itemsize
        yield Job(
            name,
            part.key,
            self.file,
            start,
            self.entry.dtype,
            part.size,
            part.stride,
            place,
            check_finite,
            mode,
        )


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
        fd = open_file(path)
        with closing(fd):
            return read_header(fd)
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

    def jobs(
        self, key: str, parts: Iterable[tuple[str, Box]], box: Box, out: torch.Tensor
    ) -> Iterator[Job | Computation]:
        """Jobs that fill ``out`` with the box ``box`` of a tensor.

        Args:
            key: Name of the tensor in the files.
            parts: (file, box of the tensor in it) pairs; they must cover ``box``.
            box: Box of the tensor that is wanted.
            out: Tensor to fill, of the box's shape, on any device; values are cast to its dtype.
        """
        for file, part in parts:
            if part.numel:
                stored = InFile(self.folder / file, self.header(file).entries[key])
                yield from stored.jobs(key, stored.piece(key, part.offset), box, out)
