"""Pieces: boxes of a tensor, each a strided view of one stored tensor. No I/O."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_sft._tensors.boxes import Box

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
