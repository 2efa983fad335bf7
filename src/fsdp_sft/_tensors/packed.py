"""Tensors whose values are computed from what is stored: packed bytes, and the scales that belong to them.

A rank that holds rows 100 to 200 of a matrix needs the packed bytes of these rows, and of the scales those
that the same rows share. Which these are follows from one number for each stored tensor and dimension: how
many values have one of its elements in common (``StoredPart.each``). So a format says only what its tensors
are called, how many values share each of their elements, and how values are made of them
(``Packed.decode``).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, TypeAlias

import torch

from fsdp_sft._tensors.boxes import Box, chunk_of
from fsdp_sft._tensors.safetensors import TensorEntry
from fsdp_sft._tensors.stored import MIN_RUN_BYTES, ByteRange, InFile, Ints, Piece, Read, Stored, intersect

# Values that a thread computes at once: with what they are computed from, and what comes in between, they
# take up to 48 bytes each.
_AT_ONCE = 1 << 19
_ALIGNMENT = 8  # bytes: a row of bytes begins where an element of any dtype can

Decode: TypeAlias = Callable[[Mapping[str, torch.Tensor], range, range], torch.Tensor]
_PartRead: TypeAlias = tuple[tuple[ByteRange, ...], Callable[[list[torch.Tensor]], torch.Tensor]]


@dataclass(frozen=True)
class StoredPart:
    """A stored tensor that values are computed from.

    Attributes:
        stored: The tensor.
        each: Number of rows, and of columns, of the values that share one of its elements. 0: each of its
            rows, or columns, belongs to all values in that dimension. None: all of it is read for any value.
        columns: Number of its elements in each row.
    """

    stored: InFile
    each: tuple[int, int] | None = None
    columns: int = 1

    def read(self, rows: range, columns: range, height: int) -> "_PartRead":
        """What to read of it for a box of values: runs, and the function that makes a tensor of their bytes.

        Args:
            rows: The box's rows, counted over all matrices.
            columns: Its columns.
            height: Number of rows of each matrix.
        """
        entry = self.stored.entry
        if self.each is None:
            return self.stored.all_runs(), partial(_whole, entry.dtype, entry.shape)
        down, across = self.each
        first, last, place = 0, math.prod(entry.shape) // self.columns - 1, None
        if down:
            first, last = (int(_rows_of(range(at, at + 1), height, down)) for at in (rows[0], rows[-1]))
        if down > 1:
            place = _rows_of(rows, height, down) - first
        left, right = (columns.start // across, -(-columns.stop // across)) if across else (0, self.columns)
        count, size = last + 1 - first, entry.dtype.itemsize
        row_bytes, wanted = self.columns * size, (right - left) * size
        start = entry.start + first * row_bytes
        if wanted == row_bytes or wanted < MIN_RUN_BYTES or 2 * wanted >= row_bytes:
            whole = ByteRange(self.stored.file, start, count * row_bytes)
            return (whole,), partial(_rows, entry.dtype, count, slice(left, right), place)
        starts = range(start + left * size, start + left * size + count * row_bytes, row_bytes)
        runs = tuple(ByteRange(self.stored.file, at, wanted) for at in starts)
        return runs, partial(_rows, entry.dtype, count, slice(None), place)


def _rows_of(rows: range, height: int, down: int) -> torch.Tensor:
    """The rows of a part that belong to rows of values, ``down`` of which share one; int64."""
    numbers = torch.arange(rows.start, rows.stop)
    return numbers // height * -(-height // down) + numbers % height // down


def _whole(dtype: torch.dtype, shape: Ints, raws: list[torch.Tensor]) -> torch.Tensor:
    """A part of which all is read."""
    return raws[0].view(dtype).view(shape)


def _rows(
    dtype: torch.dtype, count: int, cut: slice, place: torch.Tensor | None, raws: list[torch.Tensor]
) -> torch.Tensor:
    """Rows of a part, of which those columns are kept; ``place`` has the row of each row of values."""
    rows = (raws[0] if len(raws) == 1 else torch.cat(raws)).view(count, -1)
    if place is not None:
        rows = rows[place.to(rows.device)]  # bytes: not every dtype can be indexed on every device
    return rows.view(dtype)[:, cut]


class _Block(NamedTuple):
    """The rows and columns of values that a piece needs, and the view of them that it is."""

    rows: range
    columns: range
    row_steps: Ints  # by how many rows neighbours of the piece are apart, per dimension
    column_steps: Ints
    column: int  # of the piece's first value

    def view(self, values: torch.Tensor, size: Ints) -> torch.Tensor:
        step = values.stride(0)
        strides = [r * step + c for r, c in zip(self.row_steps, self.column_steps, strict=True)]
        return values.as_strided(size, strides, self.column - self.columns.start)


@dataclass(frozen=True)
class RowFormat:
    """How the values of a row are computed from its bytes.

    Attributes:
        name: Name of the format, with what distinguishes it.
        width: Number of values in a row.
        parts: What each part is, its dtype and its number of elements in a row, in the order in which they
            lie; those of larger elements first.
        decode: Function from the parts of some rows, ``(rows, elements)``, to their values in float32; see
            ``Packed.decode``.
        at_once: Number of values that are computed at once, of up to 24 bytes each in between.
    """

    name: str
    width: int
    parts: tuple[tuple[str, torch.dtype, int], ...]
    decode: Decode
    at_once: ClassVar[int] = 1 << 22

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, with what fills it up."""
        used = sum(dtype.itemsize * count for _, dtype, count in self.parts)
        return -(-used // _ALIGNMENT) * _ALIGNMENT

    def is_like(self, other: "RowFormat") -> bool:
        """Whether rows of both can lie in one tensor."""
        return (self.name, self.width, self.parts) == (other.name, other.width, other.parts)

    def joined(self, parts: Mapping[str, torch.Tensor], count: int) -> torch.Tensor:
        """Bytes ``(count, row_bytes)`` of the parts of rows; a part of one row belongs to all."""
        device, at = parts[self.parts[0][0]].device, 0
        made = torch.zeros((count, self.row_bytes), dtype=torch.uint8, device=device)
        for name, dtype, elements in self.parts:
            size = dtype.itemsize * elements
            part = parts[name].reshape(-1, elements).contiguous()
            made[:, at : at + size] = part.view(torch.uint8)
            at += size
        return made

    def values_into(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Compute values ``(rows, width)``, in the dtype of where they go, a part of them at a time."""
        step = max(1, self.at_once // self.width)
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            parts, at = {}, 0
            for name, dtype, elements in self.parts:
                size = dtype.itemsize * elements
                parts[name] = some[:, at : at + size].contiguous().view(dtype)
                at += size
            found = self.decode(parts, range(len(some)), range(self.width))
            values[first : first + step].copy_(found[:, : self.width])


@dataclass(frozen=True)
class Packed(Stored):
    """A tensor whose values are computed from several stored ones.

    Its values lie in rows: those of a matrix, and of further matrices of the same size behind it. ``entry``
    says what is published, and ``stride`` how it lies in these, so it may be transposed.

    Attributes:
        entry: Shape of the published tensor. The dtype holds all of its values: float32, or a
            narrower one if they are exact in it. Start and end say how many bytes its parts take.
        format: Name of the format.
        width: Number of values in each row.
        height: Number of rows of each matrix.
        parts: Stored tensors that the values are computed from, by what they are.
        decode: Function from the parts of some rows and columns, and the numbers of these, to their values
            in float32. The columns begin where an element of every part begins. A part has a row for each row
            of values, unless its ``each`` says that all of its rows belong to all. Values of further columns
            may follow those that were asked for.
        by_rows: The same from parts that all have a row for each row of values, whatever the numbers of the
            rows; None if a row has no bytes of its own. Parts of one element are repeated for each row.
        stride: See ``Stored``.
    """

    entry: TensorEntry
    format: str
    width: int
    height: int
    parts: Mapping[str, StoredPart]
    decode: Decode
    by_rows: Decode | None = None
    stride: Ints | None = None

    def row_format(self) -> RowFormat | None:
        """How a row's values are computed from its own bytes; None if it has none of its own."""
        if self.by_rows is None:
            return None
        kept = [
            (name, part.stored.entry.dtype, 1 if part.each is None else part.columns)
            for name, part in self.parts.items()
            if (part.each is not None and part.each[0]) or math.prod(part.stored.entry.shape) == 1
        ]
        kept.sort(key=lambda part: -part[1].itemsize)
        return RowFormat(self.format, self.width, tuple(kept), self.by_rows)

    def row_reads(self, key: str, first: int, place: torch.Tensor) -> Iterator[Read]:
        """Reads of the bytes of rows as they are.

        Args:
            key: Name of this tensor, for messages.
            first: The first row, counted over all matrices.
            place: Where the bytes go, ``(rows, row_bytes)`` of ``row_format``.
        """
        form = self.row_format()
        assert form is not None
        every = range(self.width)
        for at, part in zip(
            itertools.count(first, step := max(1, _AT_ONCE // self.width)), place.split(step), strict=False
        ):
            rows = range(at, at + len(part))
            reads = {own: self.parts[own].read(rows, every, self.height) for own, *_ in form.parts}
            yield Read(key, _runs_of(reads), partial(_joined, form, reads, len(part)), part)

    def all_runs(self) -> tuple[ByteRange, ...]:
        """The bytes of all parts."""
        return tuple(run for part in self.parts.values() for run in part.stored.all_runs())

    def _read(self, part: Piece, place: torch.Tensor, compare: bool) -> Iterator[Read]:
        unit = math.lcm(*(p.each[1] for p in self.parts.values() if p.each is not None and p.each[1]))
        for cut, view in _cuts(part, place, self.width, max(_AT_ONCE, 2 * unit)):
            block = _block(cut, self.width)
            begin, end = block.columns.start // unit * unit, -(-block.columns.stop // unit) * unit
            block = block._replace(columns=range(begin, min(end, self.width)))
            reads = {own: p.read(block.rows, block.columns, self.height) for own, p in self.parts.items()}
            compute = partial(self._values, block, reads, cut.size)
            yield Read(cut.key, _runs_of(reads), compute, view, compare)

    def _values(
        self, block: _Block, reads: Mapping[str, _PartRead], size: Ints, raws: list[torch.Tensor]
    ) -> torch.Tensor:
        values = self.decode(_parts_of(reads, raws), block.rows, block.columns)
        return _in_order(block.view(values, size))


def _joined(
    form: RowFormat, reads: Mapping[str, _PartRead], count: int, raws: list[torch.Tensor]
) -> torch.Tensor:
    """The bytes of rows, side by side."""
    return form.joined(_parts_of(reads, raws), count)


def _runs_of(reads: Mapping[str, _PartRead]) -> tuple[ByteRange, ...]:
    return tuple(run for runs, _ in reads.values() for run in runs)


def _parts_of(reads: Mapping[str, _PartRead], raws: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parts, from the bytes of all their runs."""
    left = iter(raws)
    return {name: make([next(left) for _ in runs]) for name, (runs, make) in reads.items()}


def _in_order(values: torch.Tensor) -> torch.Tensor:
    """The same values, if they are a transposed matrix in the order of its rows.

    On CPUs torch transposes six times as fast from and into contiguous memory as into a part of a shard.
    """
    matrix = values.squeeze()
    if matrix.ndim != 2 or matrix.stride(0) != 1 or matrix.stride(1) == 1:
        return values
    ordered = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
    return ordered.copy_(matrix.t().contiguous().t()).view(values.shape)


def _cuts(part: Piece, place: torch.Tensor, width: int, at_once: int) -> Iterator[tuple[Piece, torch.Tensor]]:
    """A piece in parts that need about ``at_once`` values at most, and the views that these fill.

    It is cut along its dimension of the largest stride, so that each part lies within the fewest rows.
    """
    block = _block(part, width)
    if len(block.rows) * len(block.columns) <= at_once:
        yield part, place
        return
    outer = max(range(len(part.size)), key=lambda d: (part.size[d] > 1, part.stride[d]))
    size = part.size[outer]
    chunks = -(-size // max(1, min(at_once // max(1, part.stride[outer]), -(-size // 2))))
    for index, view in enumerate(place.chunk(chunks, outer)):
        own = intersect(part, chunk_of(Box(part.start, part.size), outer, chunks, index))
        assert own is not None
        yield from _cuts(own, view, width, at_once)


def _block(part: Piece, width: int) -> _Block:
    """The block of rows and columns that a piece lies in."""
    row, column = divmod(part.offset, width)
    downwards = [step >= width and step % width == 0 for step in part.stride]
    span = 1 + sum(
        (n - 1) * step for n, step, down in zip(part.size, part.stride, downwards, strict=True) if not down
    )
    if column + span > width:  # it goes on in the next row: all columns, side by side
        last = (
            part.offset + sum((n - 1) * step for n, step in zip(part.size, part.stride, strict=True))
        ) // width
        return _Block(range(row, last + 1), range(width), tuple(0 for _ in part.size), part.stride, column)
    row_steps = tuple(step // width if down else 0 for step, down in zip(part.stride, downwards, strict=True))
    column_steps = tuple(0 if down else step for step, down in zip(part.stride, downwards, strict=True))
    rows = 1 + sum((n - 1) * step for n, step in zip(part.size, row_steps, strict=True))
    return _Block(range(row, row + rows), range(column, column + span), row_steps, column_steps, column)
