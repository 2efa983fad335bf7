"""Filling the shards of a model by a plan, in phases that all ranks go through together."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_sft._compat.conversions import keep_used_conversions
from fsdp_sft._compat.fsdp import adopt_shards, put_shard
from fsdp_sft._compat.models import initialise_computed
from fsdp_sft._model.published import published, trained_copies
from fsdp_sft._model.sharded import materialise
from fsdp_sft._model.view import named_tensors, slot
from fsdp_sft._process.generators import unmoved
from fsdp_sft._quantised.recipes import RECIPES
from fsdp_sft._ranks.agree import agreed, all_reduce_sum, this_rank
from fsdp_sft._tensors.boxes import Box, box_of, local_of
from fsdp_sft._tensors.packed import Packed, RowFormat
from fsdp_sft._tensors.packed_shard import PackedLayout, PackedShard
from fsdp_sft._tensors.reader import do_reads, threads_that_read
from fsdp_sft._tensors.sharding import own_part
from fsdp_sft._tensors.stored import Piece, Read, Stored, intersect
from fsdp_sft.errors import CheckpointMismatchError
from fsdp_sft.shard.packing import (
    STORED,
    empty_shard,
    fill_packed,
    layout_of,
    packed_weights,
)
from fsdp_sft.weights.plan import LoadPlan, Target

_PROGRESS_AFTER_SECONDS = 3
_PIECE_ELEMENTS = 1 << 20  # widened to float64 at once


def fill(plan: LoadPlan, *, seed: int) -> int:
    """Allocate a model's tensors and fill them by a plan; returns the number of bytes read by this rank.

    Args:
        plan: The plan, with the same targets on all ranks.
        seed: Seed for initialising what the checkpoint lacks.

    Collective: all ranks.
    """
    model = plan.model
    weights = packed_weights(model)
    names, kind = (weights.names, weights.kind) if weights is not None else ((), STORED)
    with agreed("reading the checkpoint"):
        layouts = layouts_of(names, kind, plan)
        device = materialise(model, {id(plan.tensors[name]) for name in layouts})
    with published(model) as base:
        tensors = named_tensors(base)
        readers = _readers(plan, tensors, layouts)
        with agreed("reading the checkpoint"):
            shards: dict[str, PackedShard] = {}
            for name, layout in layouts.items():
                parameter: Any = tensors[name]
                shards[name] = empty_shard(parameter, layout, device)
                put_shard(*slot(base, name), shards[name])
            bytes_read = _read_own(plan, tensors, readers, shards, kind)
        for name, (group, reader) in readers.items():
            local = local_of(tensors[name])
            if local.numel():
                dist.broadcast(local, group=group, group_src=reader)
        with agreed("comparing tied weights"):
            again = [_reads(plan, twice, tensors[twice.name], compare=True) for twice in plan.duplicates]
            bytes_read += do_reads(itertools.chain(*again), workers=threads_that_read())
        with agreed("finishing the load"):
            initialise_rest(base, plan, tensors, seed=seed)
        fill_new_rows(plan, tensors)
    with agreed("finishing the load"):
        keep_used_conversions(base, plan.conversions)
        if layouts:
            adopt_shards(model)
        for source, target in trained_copies(model):
            local_of(target).copy_(local_of(source))
    return bytes_read


def _readers(
    plan: LoadPlan, tensors: Mapping[str, torch.Tensor], layouts: Mapping[str, PackedLayout]
) -> dict[str, tuple[dist.ProcessGroup, int]]:
    """The group of replicas of each target that has any, and which reads: the one with the least so far."""
    readers: dict[str, tuple[dist.ProcessGroup, int]] = {}
    taken: Counter[int] = Counter()
    for name in plan.targets:
        tensor = tensors[name]
        if not isinstance(tensor, DTensor) or name in layouts:
            continue
        mesh = tensor.device_mesh
        copied = [d for d, p in enumerate(tensor.placements) if isinstance(p, Replicate) and mesh.size(d) > 1]
        if copied:
            reader = min(range(mesh.size(copied[0])), key=taken.__getitem__)
            taken[reader] += tensor.numel()
            readers[name] = mesh.get_group(copied[0]), reader
    return readers


def _read_own(
    plan: LoadPlan,
    tensors: Mapping[str, torch.Tensor],
    readers: Mapping[str, tuple[dist.ProcessGroup, int]],
    shards: Mapping[str, PackedShard],
    kind: str,
) -> int:
    """Read everything that this rank reads by itself into its shards; the number of bytes read.

    Memory: What is packed now is held in its own dtype, one part of a weight at a time.
    """
    from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

    reads: list[Read] = []
    for name, target in plan.targets.items():
        group, reader = readers.get(name, (None, 0))
        if name in shards:
            if kind == STORED:
                reads += row_reads(target, plan.stored, shards[name], box_of(tensors[name]))
        elif group is None or group.rank() == reader:
            reads += _reads(plan, target, tensors[name])
    with tqdm(
        total=sum(read.num_bytes for read in reads),
        unit="B",
        unit_scale=True,
        desc="loading weights (rank 0)",
        delay=_PROGRESS_AFTER_SECONDS,
        disable=this_rank() != 0,
    ) as bar:
        done = do_reads(reads, workers=threads_that_read(), progress=bar.update)
    for name, shard in shards.items() if kind != STORED else ():
        box = box_of(tensors[name])
        values = torch.empty(box.shape, dtype=tensors[name].dtype, device=shard.device)
        pieces = plan.targets[name].pieces
        parts = [read for piece in pieces for read in plan.stored[piece.key].reads(piece, box, values)]
        done += do_reads(parts, workers=threads_that_read())
        fill_packed(shard, values)
    return done


def _reads(plan: LoadPlan, target: Target, tensor: torch.Tensor, *, compare: bool = False) -> Iterator[Read]:
    """This rank's reads for a target: each of its pieces, intersected with its shard."""
    box, local = box_of(tensor), local_of(tensor)
    for piece in target.pieces:
        yield from plan.stored[piece.key].reads(piece, box, local, compare=compare)


# What no checkpoint holds: computed buffers, initialised keys, rows of new tokens.


@torch.no_grad()
def initialise_rest(
    model: nn.Module, plan: LoadPlan, tensors: Mapping[str, torch.Tensor], *, seed: int
) -> None:
    """Compute the buffers that no checkpoint holds, and initialise the keys that this one lacks.

    The model's own code does both. The values are the same on every rank, and equal to those of plain
    ``from_pretrained`` after ``torch.manual_seed(seed)``.
    """
    with unmoved(seed=seed):
        values = initialise_computed(plan.twin, set(plan.initialised))
    persistent = plan.twin.state_dict().keys()
    for name, value in values.items():
        if name not in tensors:
            continue  # a module that the caller has taken out
        tensor = tensors[name]
        if name not in persistent:
            setattr(*slot(model, name), value.to(tensor.device, tensor.dtype))
            continue
        local_of(tensor).copy_(value[box_of(tensor).slices])


@torch.no_grad()
def fill_new_rows(plan: LoadPlan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set the rows of new tokens to the mean of the old ones, taken in float64 and the same on all ranks.

    Collective: all ranks.
    """
    for name, target in plan.targets.items():
        tensor, shape = tensors[name], target.shape
        if shape == tensor.shape:
            continue
        old, box, local = shape[0], box_of(tensor), local_of(tensor)
        sums = torch.zeros(shape[1:], dtype=torch.float64)
        # This rank's share of the old rows. Of replicas only the owner adds it, so that no row counts twice.
        held = Box((0, *box.offset[1:]), (old, *box.shape[1:])).intersect(box)
        if held is not None and own_part(tensor) is not None:
            rows = local[held.relative_to(box).slices]
            # In pieces, since torch widens everything that it sums at once.
            pieces = rows.split(max(1, _PIECE_ELEMENTS // max(1, rows[:1].numel())))
            sums[held.slices[1:]] = sum(piece.sum(0, dtype=torch.float64) for piece in pieces).cpu()
        mean = torch.tensor(all_reduce_sum(sums.reshape(-1).tolist()), dtype=torch.float64) / old
        added = Box((old, *box.offset[1:]), (tensor.shape[0] - old, *box.shape[1:])).intersect(box)
        if added is not None:
            own = mean.reshape(shape[1:])[added.slices[1:]].to(tensor.dtype)
            local[added.relative_to(box).slices].copy_(own.to(local.device).expand(added.shape))


# Frozen weights that stay packed: which rows of the checkpoint are theirs, and the reads that fill them.


def layouts_of(names: Collection[str], kind: str, plan: LoadPlan) -> dict[str, PackedLayout]:
    """How each weight that is kept packed lies in rows, by name.

    With ``"stored"`` those that the checkpoint has in 16 bits are left out: they stay so.

    Raises:
        CheckpointMismatchError: If rows of a weight have no bytes of their own.
    """
    found: dict[str, PackedLayout] = {}
    for name in sorted(names):
        tensor, target = plan.tensors[name], plan.targets.get(name)
        if target is None or not isinstance(tensor, DTensor):
            raise CheckpointMismatchError(f"the checkpoint has no values for {name}, which is to be packed")
        if kind != STORED:
            form = RECIPES[kind].form(target.shape[-1])
            found[name] = layout_of(tensor, form, transposed=False)
        elif any(isinstance(plan.stored[piece.key], Packed) for piece in target.pieces):
            form, column = rows_of(target, plan.stored)
            found[name] = layout_of(tensor, form, transposed=column != len(target.shape) - 1)
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
    for piece in target.pieces:
        if (common := intersect(piece, box)) is None:
            continue
        stored: Any = sources[piece.key]
        # Number of each row where it is stored, and in the shard.
        there, here = torch.tensor(common.offset // stored.width), torch.tensor(0)
        for dim in (d for d in range(len(common.size)) if d != column):
            index = torch.arange(common.size[dim])
            there = there[..., None] + index * (common.stride[dim] // stored.width)
            here = here[..., None] * box.shape[dim] + common.start[dim] - box.offset[dim] + index
        there, here = there.flatten(), here.flatten()
        ends = ((there.diff() != 1) | (here.diff() != 1)).nonzero().flatten() + 1
        for first, place in zip(there.tensor_split(ends), here.tensor_split(ends), strict=True):
            yield from stored.row_reads(piece.key, int(first[0]), shard.rows[int(place[0]) :][: len(place)])
