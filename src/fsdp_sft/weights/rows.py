"""Frozen weights that stay packed: which rows of the checkpoint are theirs, and the reads that fill them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_sft._quantised.recipes import RECIPES
from fsdp_sft._tensors.boxes import Box, local_of
from fsdp_sft._tensors.packed import Packed
from fsdp_sft._tensors.packed_shard import PackedLayout, PackedShard, RowFormat
from fsdp_sft._tensors.stored import Piece, Read, Stored, intersect
from fsdp_sft.errors import CheckpointMismatchError
from fsdp_sft.shard.packing import STORED, PackedWeights, layout_of
from fsdp_sft.weights.plan import LoadPlan, Target


def layouts_of(
    weights: PackedWeights | None,
    plan: LoadPlan,
    sources: Mapping[str, Stored],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, PackedLayout]:
    """How each weight that is kept packed lies in rows, by name.

    With ``"stored"`` those that the checkpoint has in 16 bits are left out: they stay so.

    Raises:
        CheckpointMismatchError: If rows of a weight have no bytes of their own.
    """
    found: dict[str, PackedLayout] = {}
    for name in sorted(weights.names) if weights is not None else ():
        assert weights is not None
        tensor, target = tensors[name], plan.targets.get(name)
        if target is None or not isinstance(tensor, DTensor):
            raise CheckpointMismatchError(f"the checkpoint has no values for {name}, which is to be packed")
        if weights.kind != STORED:
            form = RECIPES[weights.kind].form(target.shape[-1])
            found[name] = layout_of(tensor, form, transposed=False)
        elif any(isinstance(sources[piece.key], Packed) for piece in target.pieces):
            form, column = rows_of(target, sources)
            found[name] = layout_of(tensor, form, transposed=column != len(target.shape) - 1)
        elif target.group is not None and any(
            isinstance(sources[key], Packed) for key in plan.groups[target.group].keys
        ):
            raise _no_rows(name, "it is computed of several stored ones")
        elif isinstance(local_of(tensor), PackedShard):
            raise CheckpointMismatchError(
                f"{name} is packed, and this checkpoint has it in 16 or 32 bits: build the model anew for it"
            )
    return found


def _no_rows(name: str, why: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{name} cannot stay as it is stored: {why}. frozen_dtype='nf4' packs it anew, and None keeps it in "
        "16 bits"
    )


def rows_of(target: Target, sources: Mapping[str, Stored]) -> tuple[RowFormat, int]:
    """(format of a target's rows, the dimension along which their columns lie)."""
    forms, columns = [], set()
    for piece in target.pieces:
        stored = sources[piece.key]
        form = stored.row_format() if isinstance(stored, Packed) else None
        if form is None:
            raise _no_rows(target.name, f"rows of {piece.key} ({stored.format}) have no bytes of their own")
        column = _columns_of(piece, form.width)
        if column is None or form.width != target.shape[column]:
            raise _no_rows(target.name, f"it has parts of the rows of {piece.key}")
        forms.append(form)
        columns.add(column)
    if len(columns) > 1 or not all(form.is_like(forms[0]) for form in forms):
        raise _no_rows(target.name, f"it is joined of several formats ({sorted({f.name for f in forms})})")
    return forms[0], columns.pop()


def _columns_of(piece: Piece, width: int) -> int | None:
    """The dimension of a piece that is whole rows of its source; None if it has parts of rows."""
    for dim in range(len(piece.size) - 1, 0, -1):
        others = [step for index, step in enumerate(piece.stride) if index != dim]
        is_whole = piece.size[dim] == width and piece.stride[dim] == 1 and piece.offset % width == 0
        if is_whole and all(step % width == 0 for step in others):
            return dim
    return None


def row_reads(target: Target, sources: Mapping[str, Stored], shard: PackedShard, box: Box) -> Iterator[Read]:
    """The reads that fill a shard of packed rows: one for each run of rows, in the file and in the shard.

    Args:
        target: Where the parameter's elements are stored.
        sources: The checkpoint's tensors.
        shard: What is filled.
        box: This rank's box of the parameter.
    """
    layout = shard.lies
    column = 1 if layout.transposed else len(layout.shape) - 1
    other = next((d for d in (1, 2) if d < len(layout.shape) and d != column), None)
    for piece in target.pieces:
        common = intersect(piece, box)
        if common is None:
            continue
        stored: Any = sources[piece.key]
        begin = common.start[0] - box.offset[0]
        for index in range(common.size[0]) if other is not None else (0,):
            row = (common.offset + index * common.stride[0]) // stored.width
            place, count, step = begin, common.size[0], common.stride[0] // stored.width
            if other is not None:
                place = (begin + index) * layout.rows_each + common.start[other]
                count, step = common.size[other], common.stride[other] // stored.width
            for first in (0,) if step == 1 else range(count):
                rows = shard.rows[place + first :][: count if step == 1 else 1]
                yield from stored.row_reads(target.name, piece.key, row + first * step, rows)
