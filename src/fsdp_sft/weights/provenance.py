"""Where each element of a converted tensor comes from: the conversion run on tensors without data.

A ``Traced`` tensor has a shape and a list of pieces: boxes of it that are strided views of one source.
Running transformers' own conversion code on such tensors moves the boxes about as it would the numbers, so no
rule of ours repeats what a conversion does. Code that computes instead of moving raises ``UntraceableError``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp_sft._boxes import Box
from fsdp_sft._compat import wrapper_tensor

MAX_PIECES = 1 << 16  # per tensor; a permutation finer than this is cheaper to convert whole

Ints = tuple[int, ...]


class UntraceableError(RuntimeError):
    """A conversion does something else than move elements about."""


@dataclass(frozen=True)
class Piece:
    """A box of a target that is a strided view of one source tensor.

    Attributes:
        start: First index of the box in the target, by dimension.
        size: Extent of the box, by dimension.
        key: Name of the source in the checkpoint.
        offset: Element of the source (in its row-major order) that the box begins with.
        stride: Elements of the source between neighbours in the box, by dimension.
    """

    start: Ints
    size: Ints
    key: str
    offset: int
    stride: Ints

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)


def contiguous_strides(shape: Sequence[int]) -> Ints:
    """Strides of a row-major tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def source(key: str, shape: Ints, dtype: torch.dtype) -> "Traced":
    """A whole tensor of the checkpoint."""
    return Traced(shape, dtype, [Piece((0,) * len(shape), shape, key, 0, contiguous_strides(shape))])


def intersect(piece: Piece, box: Box) -> Piece | None:
    """The part of a piece inside a box of the target, still in the target's coordinates; None if empty."""
    common = Box(piece.start, piece.size).intersect(box)
    if common is None:
        return None
    skipped = sum((a - b) * s for a, b, s in zip(common.offset, piece.start, piece.stride, strict=True))
    return Piece(common.offset, common.shape, piece.key, piece.offset + skipped, piece.stride)


class Traced(torch.Tensor):
    """A tensor without data that knows its pieces; always contiguous as far as torch is concerned."""

    pieces: list[Piece]

    @staticmethod
    def __new__(cls, shape: Ints, dtype: torch.dtype, pieces: list[Piece]) -> "Traced":
        """Make one; see the class."""
        if len(pieces) > MAX_PIECES:
            raise UntraceableError(f"more than {MAX_PIECES} pieces")
        tensor: Traced = wrapper_tensor(cls, shape, dtype)
        tensor.pieces = pieces
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Move the pieces as ``func`` moves elements."""
        handler = _HANDLERS.get(func.overloadpacket)
        if handler is None or not _all_traced(args):
            raise UntraceableError(f"{func} does more than move elements")
        return handler(*args, **(kwargs or {}))


def _all_traced(args: Sequence[Any]) -> bool:
    flat = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else [arg])]
    return all(isinstance(item, Traced) for item in flat if isinstance(item, torch.Tensor))


def _like(tensor: Traced, shape: Sequence[int], pieces: list[Piece]) -> Traced:
    return Traced(tuple(shape), tensor.dtype, pieces)


def _same(tensor: Traced, *_: Any, **__: Any) -> Traced:
    return _like(tensor, tensor.shape, tensor.pieces)


def _slice(tensor: Traced, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Traced:
    dim %= tensor.ndim
    first, last, step = slice(start, end, step).indices(tensor.shape[dim])
    length = max(0, -(-(last - first) // step))
    pieces = []
    for piece in tensor.pieces:
        skip = -(-max(0, piece.start[dim] - first) // step)  # positions of the result before this piece
        at = first + skip * step
        stop = min(piece.start[dim] + piece.size[dim], last)
        count = -(-(stop - at) // step)
        if count > 0:
            offset = piece.offset + (at - piece.start[dim]) * piece.stride[dim]
            stride = piece.stride[dim] * step
            pieces.append(
                Piece(
                    _with(piece.start, dim, skip),
                    _with(piece.size, dim, count),
                    piece.key,
                    offset,
                    _with(piece.stride, dim, stride),
                )
            )
    return _like(tensor, _with(tuple(tensor.shape), dim, length), pieces)


def _select(tensor: Traced, dim: int, index: int) -> Traced:
    dim %= tensor.ndim
    index = range(tensor.shape[dim])[index]  # raises where torch does
    return _squeeze(_slice(tensor, dim, index, index + 1), dim)


def _unbind(tensor: Traced, dim: int = 0) -> list[Traced]:
    return [_select(tensor, dim, index) for index in range(tensor.shape[dim])]


def _split(tensor: Traced, sizes: int | Sequence[int], dim: int = 0) -> list[Traced]:
    total = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - at) for at in range(0, total, sizes)]
    if sum(sizes) != total:
        raise ValueError(f"cannot split {total} elements into {list(sizes)}")
    parts, at = [], 0
    for size in sizes:
        parts.append(_slice(tensor, dim, at, at + size))
        at += size
    return parts


def _squeeze(tensor: Traced, dim: int | Sequence[int] | None = None) -> Traced:
    if dim is None:
        dims = set(range(tensor.ndim))
    else:
        dims = {d % tensor.ndim for d in ([dim] if isinstance(dim, int) else dim)}
    kept = [d for d in range(tensor.ndim) if d not in dims or tensor.shape[d] != 1]
    return _permuted(tensor, kept)


def _unsqueeze(tensor: Traced, dim: int) -> Traced:
    dim %= tensor.ndim + 1
    pieces = [
        Piece(_into(p.start, dim, 0), _into(p.size, dim, 1), p.key, p.offset, _into(p.stride, dim, 0))
        for p in tensor.pieces
    ]
    return _like(tensor, _into(tuple(tensor.shape), dim, 1), pieces)


def _permuted(tensor: Traced, order: Sequence[int]) -> Traced:
    def take(values: Sequence[int]) -> Ints:
        return tuple(values[d] for d in order)

    pieces = [Piece(take(p.start), take(p.size), p.key, p.offset, take(p.stride)) for p in tensor.pieces]
    return _like(tensor, take(tensor.shape), pieces)


def _permute(tensor: Traced, dims: Sequence[int]) -> Traced:
    return _permuted(tensor, [d % tensor.ndim for d in dims])


def _t(tensor: Traced) -> Traced:
    return _permuted(tensor, range(tensor.ndim)[::-1])


def _transpose(tensor: Traced, first: int, second: int) -> Traced:
    order = list(range(tensor.ndim))
    order[first], order[second] = order[second], order[first]
    return _permuted(tensor, order)


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    dim %= tensors[0].ndim
    pieces, at = [], 0
    for tensor in tensors:
        others = [n for d, n in enumerate(tensor.shape) if d != dim]
        if others != [n for d, n in enumerate(tensors[0].shape) if d != dim]:
            raise ValueError(f"cannot join shapes {tuple(tensors[0].shape)} and {tuple(tensor.shape)}")
        pieces += [replace(p, start=_with(p.start, dim, p.start[dim] + at)) for p in tensor.pieces]
        at += tensor.shape[dim]
    return _like(tensors[0], _with(tuple(tensors[0].shape), dim, at), pieces)


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    return _cat([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _view(tensor: Traced, shape: Sequence[int] | torch.dtype) -> Traced:
    if isinstance(shape, torch.dtype):
        raise UntraceableError(f"the bits are taken for {shape}")
    sizes = list(shape)
    if -1 in sizes:
        known = math.prod(n for n in sizes if n != -1)
        sizes[sizes.index(-1)] = tensor.numel() // max(known, 1)
    if math.prod(sizes) != tensor.numel():
        raise ValueError(f"cannot view shape {tuple(tensor.shape)} as {tuple(shape)}")
    if tensor.numel() == 0:
        return _like(tensor, sizes, [])
    groups = _matching_dims(tuple(tensor.shape), tuple(sizes))
    pieces: list[Piece] = []
    for piece in tensor.pieces:
        pieces += _reshaped(piece, tuple(tensor.shape), tuple(sizes), groups)
        if len(pieces) > MAX_PIECES:
            raise UntraceableError(f"more than {MAX_PIECES} pieces")
    return _like(tensor, sizes, pieces)


def _matching_dims(old: Ints, new: Ints) -> list[tuple[range, range]]:
    """Runs of dimensions with equal products, which a view maps onto each other."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        first_i, first_j = i, j
        left = right = 1
        while (i == first_i and j == first_j) or left != right:
            if i < len(old) and (left <= right or j >= len(new)):
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        groups.append((range(first_i, i), range(first_j, j)))
    return groups


_Axis = tuple[Ints, Ints, Ints]  # start, size and stride of some dimensions of a piece


def _reshaped(piece: Piece, old: Ints, new: Ints, groups: list[tuple[range, range]]) -> list[Piece]:
    partial: list[tuple[int, Ints, Ints, Ints]] = [(piece.offset, (), (), ())]
    for olds, news in groups:
        box = [(piece.start[d], piece.size[d], piece.stride[d]) for d in olds]
        lines = _flattened(box, [old[d] for d in olds])
        boxes = [part for line in lines for part in _unflattened(line, [new[d] for d in news])]
        partial = [
            (offset + more, start + s, size + n, stride + t)
            for offset, start, size, stride in partial
            for more, (s, n, t) in boxes
        ]
        if len(partial) > MAX_PIECES:
            raise UntraceableError(f"more than {MAX_PIECES} pieces")
    return [Piece(start, size, piece.key, offset, stride) for offset, start, size, stride in partial]


def _flattened(box: list[tuple[int, int, int]], shape: list[int]) -> list[tuple[int, int, int, int]]:
    """(offset, start, size, stride) of the lines that a box becomes when its dimensions are merged."""
    lines = [(0, 0, 1, 0)]
    inner = 1  # elements of the dimensions merged so far
    for (start, size, stride), extent in zip(reversed(box), reversed(shape), strict=True):
        whole = len(lines) == 1 and lines[0][1] == 0 and lines[0][2] == inner
        if size == 1:
            lines = [(o, start * inner + s, n, t) for o, s, n, t in lines]
        elif whole and (inner == 1 or stride == lines[0][3] * inner):
            lines = [(0, start * inner, size * inner, stride if inner == 1 else lines[0][3])]
        else:
            if size * len(lines) > MAX_PIECES:
                raise UntraceableError(f"more than {MAX_PIECES} pieces")
            lines = [
                (o + index * stride, (start + index) * inner + s, n, t)
                for index in range(size)
                for o, s, n, t in lines
            ]
        inner *= extent
    return lines


def _unflattened(line: tuple[int, int, int, int], shape: list[int]) -> list[tuple[int, _Axis]]:
    """(offset, axis) of the boxes that a line becomes when its dimension is split into ``shape``."""
    offset, start, size, stride = line
    if not shape:
        return [(offset, ((), (), ()))]
    inner = math.prod(shape[1:])
    boxes: list[tuple[int, _Axis]] = []
    at = start
    while at < start + size:
        row, column = divmod(at, inner)
        rows = (start + size - at) // inner if column == 0 else 0
        count = rows * inner if rows else min(inner - column, start + size - at)
        span = (0, 0, inner, stride) if rows else (0, column, count, stride)
        for more, (s, n, t) in _unflattened(span, shape[1:]):
            extent = max(rows, 1)
            axis = ((row, *s), (extent, *n), (stride * inner, *t))
            boxes.append((offset + (at - start) * stride + more, axis))
        at += count
    return boxes


def _with(values: Ints, position: int, value: int) -> Ints:
    return (*values[:position], value, *values[position + 1 :])


def _into(values: Ints, position: int, value: int) -> Ints:
    return (*values[:position], value, *values[position:])


_aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.alias: _same,
    _aten.cat: _cat,
    _aten.clone: _same,
    _aten.detach: _same,
    _aten.permute: _permute,
    _aten.reshape: _view,
    _aten._reshape_alias: lambda tensor, shape, _: _view(tensor, shape),
    _aten._unsafe_view: _view,
    _aten.select: _select,
    _aten.slice: _slice,
    _aten.split: _split,
    _aten.split_with_sizes: _split,
    _aten.squeeze: _squeeze,
    _aten.stack: _stack,
    _aten.t: _t,
    _aten.transpose: _transpose,
    _aten.unbind: _unbind,
    _aten.unsqueeze: _unsqueeze,
    _aten.view: _view,
}
