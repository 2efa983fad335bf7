"""Where each element of a converted tensor comes from, found by running the conversion without data.

transformers often lays parameters out differently from the checkpoint: it stacks experts, joins
projections, splits a fused one. A rank that needs only its shard of the result has to know which bytes of
which stored tensors the shard is made of.

A ``Traced`` tensor answers that. It has a shape, no data, and a list of pieces; each piece is a box of the
tensor together with the strided view of one stored tensor (the source) that fills the box. transformers' own
conversion code runs on traced tensors and moves their boxes exactly as it would move numbers, so this library
repeats no conversion rule. Code that computes on elements instead of moving them raises ``UntraceableError``.

A worked example. The checkpoint holds two matrices for each of two experts, every one of shape ``(3, 2)``.
The model wants one tensor of shape ``(2, 6, 2)``: experts stacked along dimension 0, and the rows of *gate*
and *up* joined along dimension 1::

    conversion    gate_up = cat([stack([gate of 0, gate of 1]), stack([up of 0, up of 1])], dim=1)

    row                  0       1       2       3       4       5
                     +-----------------------+-----------------------+
    gate_up[0]       |    experts.0.gate     |     experts.0.up      |
                     +-----------------------+-----------------------+
    gate_up[1]       |    experts.1.gate     |     experts.1.up      |
                     +-----------------------+-----------------------+
                                     |<------------->|
                                      shard of rank 1, where three
                                      ranks share dimension 1

The traced result remembers four boxes, one for each stored matrix. ``offset`` and ``stride`` count elements
of the source in its row-major order; a dimension in which the box has extent 1 has a stride that is never
used (here the 0 of the stacked dimension).

>>> from fsdp_sft._tensors.boxes import Box
>>> from fsdp_sft._tensors.stored import intersect
>>> from fsdp_sft.weights.provenance import source
>>> names = ["experts.0.gate", "experts.1.gate", "experts.0.up", "experts.1.up"]
>>> gate_0, gate_1, up_0, up_1 = (source(name, (3, 2), torch.bfloat16) for name in names)
>>> gate_up = torch.cat([torch.stack([gate_0, gate_1]), torch.stack([up_0, up_1])], dim=1)
>>> for piece in gate_up.pieces:
...     print(piece)
Piece(start=(0, 0, 0), size=(1, 3, 2), key='experts.0.gate', offset=0, stride=(0, 2, 1))
Piece(start=(1, 0, 0), size=(1, 3, 2), key='experts.1.gate', offset=0, stride=(0, 2, 1))
Piece(start=(0, 3, 0), size=(1, 3, 2), key='experts.0.up', offset=0, stride=(0, 2, 1))
Piece(start=(1, 3, 0), size=(1, 3, 2), key='experts.1.up', offset=0, stride=(0, 2, 1))

Rank 1 holds rows 2 and 3 of both experts, a box that cuts through all four pieces. What it has to read is
each piece intersected with that box: the last row of each *gate*, which begins at element 4 of the stored
matrix, and the first row of each *up*.

>>> shard = Box(offset=(0, 2, 0), shape=(2, 2, 2))
>>> for piece in gate_up.pieces:
...     print(intersect(piece, shard))
Piece(start=(0, 2, 0), size=(1, 1, 2), key='experts.0.gate', offset=4, stride=(0, 2, 1))
Piece(start=(1, 2, 0), size=(1, 1, 2), key='experts.1.gate', offset=4, stride=(0, 2, 1))
Piece(start=(0, 3, 0), size=(1, 1, 2), key='experts.0.up', offset=0, stride=(0, 2, 1))
Piece(start=(1, 3, 0), size=(1, 1, 2), key='experts.1.up', offset=0, stride=(0, 2, 1))

The first of these is elements 4 and 5 of ``experts.0.gate``: in bfloat16 the bytes 8 to 11 after the place at
which the tensor begins in its file (``InFile.reads`` does this sum). The opposite direction, a fused matrix
split in three, works the same way; the second third begins at element 4 of the source:

>>> queries, keys, values = source("qkv", (6, 2), torch.bfloat16).chunk(3)
>>> keys.pieces
[Piece(start=(0, 0), size=(2, 2), key='qkv', offset=4, stride=(2, 1))]
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fsdp_sft._compat.modules import wrapper_tensor
from fsdp_sft._tensors.stored import Ints, Piece, contiguous_strides

MAX_PIECES = 1 << 16  # per tensor; a tensor in more pieces than this is cheaper to convert as a whole


class UntraceableError(RuntimeError):
    """A conversion does something other than move elements."""


def source(key: str, shape: Ints, dtype: torch.dtype, stride: Ints | None = None) -> "Traced":
    """A whole tensor of the checkpoint, as a traced tensor of one piece; row-major if ``stride`` is None."""
    stride = stride or contiguous_strides(shape)
    return Traced(shape, dtype, [Piece((0,) * len(shape), shape, key, 0, stride)])


class Traced(torch.Tensor):
    """A tensor without data that knows its pieces. torch always sees it as contiguous."""

    pieces: list[Piece]

    @staticmethod
    def __new__(cls, shape: Ints, dtype: torch.dtype, pieces: list[Piece]) -> "Traced":
        """Make a traced tensor of a shape and dtype from its pieces, which must tile it."""
        if len(pieces) > MAX_PIECES:
            raise UntraceableError(f"more than {MAX_PIECES} pieces")
        tensor: Traced = wrapper_tensor(cls, shape, dtype)
        tensor.pieces = pieces
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation: move the pieces as ``func`` would move the elements."""
        handler = _HANDLERS.get(func.overloadpacket)
        if handler is None or not _all_traced(args):
            raise UntraceableError(f"{func} does more than move elements")
        return handler(*args, **(kwargs or {}))


def _all_traced(args: Sequence[Any]) -> bool:
    """Whether all tensors among the arguments, and in lists among them, are traced."""
    flat = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else [arg])]
    return all(isinstance(item, Traced) for item in flat if isinstance(item, torch.Tensor))


def _like(tensor: Traced, shape: Sequence[int], pieces: list[Piece]) -> Traced:
    """A traced tensor of the dtype of another one."""
    return Traced(tuple(shape), tensor.dtype, pieces)


# One function for each torch operation that moves elements, with the operation's arguments; see `_HANDLERS`
# at the end of the file.


def _same(tensor: Traced, *_: Any, **__: Any) -> Traced:
    return _like(tensor, tensor.shape, tensor.pieces)


def _cast(tensor: Traced, *, dtype: torch.dtype | None = None, **_: Any) -> Traced:
    """A cast that keeps every value: the bytes that are read are cast to the shard's dtype anyway."""
    if dtype not in (None, tensor.dtype) and (
        dtype != torch.float32 or tensor.dtype not in (torch.float16, torch.bfloat16)
    ):
        raise UntraceableError(f"it casts {tensor.dtype} to {dtype}")
    return Traced(tuple(tensor.shape), dtype or tensor.dtype, tensor.pieces)


def _slice(tensor: Traced, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Traced:
    """``tensor[start:end:step]`` along ``dim``: each piece keeps those of its indices that are taken."""
    dim %= tensor.ndim
    first, last, step = slice(start, end, step).indices(tensor.shape[dim])
    length = max(0, -(-(last - first) // step))  # -(-a // b) is a / b rounded up
    pieces = []
    for piece in tensor.pieces:
        skip = -(-max(0, piece.start[dim] - first) // step)  # indices of the result before this piece
        at = first + skip * step  # the first index of `tensor` that is taken and not before this piece
        stop = min(piece.start[dim] + piece.size[dim], last)
        count = -(-(stop - at) // step)  # indices taken from this piece; not positive if there are none
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
    # A dimension of extent 1 has index 0 alone, so leaving it out of the permutation loses nothing.
    return _permuted(tensor, kept)


def _unsqueeze(tensor: Traced, dim: int) -> Traced:
    """A new dimension of extent 1, in which every piece has the stride 0, which is never used."""
    dim %= tensor.ndim + 1
    pieces = [
        Piece(_into(p.start, dim, 0), _into(p.size, dim, 1), p.key, p.offset, _into(p.stride, dim, 0))
        for p in tensor.pieces
    ]
    return _like(tensor, _into(tuple(tensor.shape), dim, 1), pieces)


def _permuted(tensor: Traced, order: Sequence[int]) -> Traced:
    """The dimensions in another order; those that ``order`` does not name are dropped."""

    def take(values: Sequence[int]) -> Ints:
        return tuple(values[d] for d in order)

    pieces = [Piece(take(p.start), take(p.size), p.key, p.offset, take(p.stride)) for p in tensor.pieces]
    return _like(tensor, take(tensor.shape), pieces)


def _transpose(tensor: Traced, first: int, second: int) -> Traced:
    order = list(range(tensor.ndim))
    order[first], order[second] = order[second], order[first]
    return _permuted(tensor, order)


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    """Tensors joined along ``dim``: pieces move by the extents of the tensors before their own."""
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
    """Reshape: each piece becomes as many boxes of the new shape as it takes to hold the same elements.

    A box of the old shape need not be a box of the new one. Columns 0 to 2 of a (4, 6) matrix, seen as 24
    elements, are four runs of three elements with gaps between them, hence four pieces.
    """
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
    """The shortest runs of dimensions, old and new, that have the same number of elements.

    A view maps each run onto its partner without mixing it with the rest: (4, 6, 5) seen as (24, 5) is
    [(0, 1) -> (0), (2) -> (1)]. So runs are reshaped one by one, and a dimension that the view leaves alone
    cannot break a piece up.
    """
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        first_i, first_j = i, j
        left = right = 1  # elements of the two runs so far; the one that has fewer takes the next dimension
        while (i == first_i and j == first_j) or left != right:
            if i < len(old) and (left <= right or j >= len(new)):
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        groups.append((range(first_i, i), range(first_j, j)))
    return groups


_Axis = tuple[Ints, Ints, Ints]  # start, size and stride of a piece in some of its dimensions


def _reshaped(piece: Piece, old: Ints, new: Ints, groups: list[tuple[range, range]]) -> list[Piece]:
    """The pieces that a piece becomes when the target's shape changes from ``old`` to ``new``.

    Each run of dimensions is first merged into one dimension, in which the piece is a set of lines, and then
    split into the new dimensions. The results of all runs are combined as a Cartesian product: their starts,
    sizes and strides are put side by side, and their offsets in the source are added.
    """
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
    """The lines that a box becomes when its dimensions are merged into one.

    A line is (offset, start, size, stride): ``size`` elements of the merged dimension from ``start`` on. They
    lie ``stride`` elements apart in the source, the first of them ``offset`` elements after the first of the
    piece. Rows 0 and 1 of a (4, 6) matrix are one line, (0, 0, 12, 1). Columns 0 to 2 of these rows are two,
    (0, 0, 3, 1) and (6, 6, 3, 1).

    Args:
        box: Start, size and stride of the box in each dimension.
        shape: Extent of each dimension.

    Raises:
        UntraceableError: If there would be more than ``MAX_PIECES`` lines.
    """
    lines = [(0, 0, 1, 0)]  # a single element, to which dimensions are added from the innermost outwards
    inner = 1  # elements of the dimensions merged so far
    for (start, size, stride), extent in zip(reversed(box), reversed(shape), strict=True):
        # Whether the box covers the merged dimensions completely: only then do its lines touch each other.
        whole = len(lines) == 1 and lines[0][1] == 0 and lines[0][2] == inner
        if size == 1:
            # One index of this dimension: every line moves there, none is added.
            lines = [(o, start * inner + s, n, t) for o, s, n, t in lines]
        elif whole and (inner == 1 or stride == lines[0][3] * inner):
            # The next index continues in the source where the line ends, so the line only becomes longer.
            lines = [(0, start * inner, size * inner, stride if inner == 1 else lines[0][3])]
        else:
            # Gaps in the target or jumps in the source: one copy of the lines for each index.
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
    """The boxes that a line becomes when its dimension is split into ``shape``: (offset, axis) of each.

    A line may begin and end in the middle of a row of the new shape, so it has up to three parts: the rest of
    its first row, all complete rows together, and the beginning of its last row. Each part is then split in
    the dimensions within a row. 9 elements from index 4 on, in rows of 6, are elements 4 and 5 of row 0, all
    of row 1, and element 0 of row 2.
    """
    offset, start, size, stride = line
    if not shape:
        return [(offset, ((), (), ()))]
    inner = math.prod(shape[1:])  # elements of a row
    boxes: list[tuple[int, _Axis]] = []
    at = start
    while at < start + size:
        row, column = divmod(at, inner)
        rows = (start + size - at) // inner if column == 0 else 0  # complete ones from here on
        count = rows * inner if rows else min(inner - column, start + size - at)
        span = (0, 0, inner, stride) if rows else (0, column, count, stride)
        for more, (s, n, t) in _unflattened(span, shape[1:]):
            extent = max(rows, 1)
            axis = ((row, *s), (extent, *n), (stride * inner, *t))
            boxes.append((offset + (at - start) * stride + more, axis))
        at += count
    return boxes


def _with(values: Ints, position: int, value: int) -> Ints:
    """``values`` with the one at ``position`` replaced."""
    return (*values[:position], value, *values[position + 1 :])


def _into(values: Ints, position: int, value: int) -> Ints:
    """``values`` with one more inserted at ``position``."""
    return (*values[:position], value, *values[position:])


_aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten._to_copy: _cast,
    _aten.alias: _same,
    _aten.cat: _cat,
    _aten.clone: _same,
    _aten.detach: _same,
    _aten.permute: lambda tensor, dims: _permuted(tensor, [d % tensor.ndim for d in dims]),
    _aten.reshape: _view,
    _aten._reshape_alias: lambda tensor, shape, _: _view(tensor, shape),
    _aten._unsafe_view: _view,
    _aten.select: _select,
    _aten.slice: _slice,
    _aten.split: _split,
    _aten.split_with_sizes: _split,
    _aten.squeeze: _squeeze,
    _aten.stack: _stack,
    _aten.t: lambda tensor: _permuted(tensor, range(tensor.ndim)[::-1]),
    _aten.transpose: _transpose,
    _aten.unbind: _unbind,
    _aten.unsqueeze: _unsqueeze,
    _aten.view: _view,
}
