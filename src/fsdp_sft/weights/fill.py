"""Filling the shards of a model by a plan, in phases that all ranks go through together."""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.conversions import keep_used_conversions, run_conversion
from fsdp_sft._compat.fsdp import adopt_shards
from fsdp_sft._model.adapters import copy_saved_modules, without_adapters
from fsdp_sft._model.named import named_tensors
from fsdp_sft._quantised.recipes import RECIPES
from fsdp_sft._ranks.agree import agreed, all_reduce_sum, tell, this_rank
from fsdp_sft._tensors.boxes import Box, box_of, local_of, part_of, replicate_dims, whole
from fsdp_sft._tensors.packed import Packed
from fsdp_sft._tensors.packed_shard import PackedLayout, PackedShard, RowFormat
from fsdp_sft._tensors.reader import check_same, do_reads, threads_that_read
from fsdp_sft._tensors.stored import Piece, Read, Stored, intersect
from fsdp_sft.errors import CheckpointMismatchError
from fsdp_sft.shard.packing import (
    STORED,
    PackedWeights,
    empty_shard,
    fill_packed,
    is_as_stored,
    layout_of,
    packed_weights,
    put_packed,
)
from fsdp_sft.weights.finish import LoadReport, Source, fill_new_rows, initialise_rest, materialise
from fsdp_sft.weights.plan import LoadPlan, Target

_logger = logging.getLogger(__name__)
_PROGRESS_AFTER_SECONDS = 3


def fill(
    model: nn.Module,
    plan: LoadPlan,
    stored: Mapping[str, Stored],
    sources: Mapping[str, Source],
    *,
    seed: int,
    started: float,
) -> LoadReport:
    """Allocate a model's tensors and fill them by a plan.

    Args:
        model: The model, with its adapters.
        plan: Plan for its base, with the same targets on all ranks.
        stored: The checkpoint's tensors, by name.
        sources: What ``account`` returned.
        seed: Seed for initialising what the checkpoint lacks.
        started: When the load began, by ``time.perf_counter``.

    Collective: all ranks.
    """
    with agreed("reading the checkpoint"):
        with without_adapters(model) as base:
            tensors = named_tensors(base)
            packed = layouts_of(packed_weights(model), plan, stored, tensors)
        device = materialise(model, {id(tensors[name]) for name in packed})
    with without_adapters(model) as base:
        load = _Load(base, plan, stored, packed, device, named_tensors(base), _readers(base, plan, packed))
        with agreed("reading the checkpoint"):
            bytes_read = _read_own(load)
        for name, (mesh, dim, reader) in load.readers.items():
            local = local_of(load.tensors[name])
            if local.numel():
                dist.broadcast(local, group=mesh.get_group(dim), group_src=reader)
        with agreed("converting what is computed, and comparing tied weights"):
            bytes_read += _convert_and_compare(load)
        with agreed("finishing the load"):
            initialise_rest(base, plan, seed=seed)
        fill_new_rows(base, plan)
        with agreed("finishing the load"):
            keep_used_conversions(base, plan.conversions)
    with agreed("finishing the load"):
        if packed:
            adopt_shards(model)
        copy_saved_modules(model)
    report = LoadReport(
        bytes_read=bytes_read,
        job_bytes_read=int(all_reduce_sum([bytes_read])[0]),
        checkpoint_bytes=sum(tensor.entry.num_bytes for tensor in stored.values()),
        converted_bytes=sum(stored[key].entry.num_bytes for group in plan.groups for key in group.keys),
        seconds=time.perf_counter() - started,
        loaded=[*plan.targets, *(target.name for target in plan.duplicates)],
        missing=plan.missing,
        unexpected=plan.unexpected,
        initialised=plan.initialised,
        formats=dict(Counter(tensor.format for tensor in stored.values()).most_common()),
        sources=sources,
    )
    tell(_logger, "%s: %s", getattr(model, "name_or_path", "") or type(model).__name__, report)
    return report


@dataclass(frozen=True)
class _Load:
    """What the phases of one load share.

    Attributes:
        model: The model that is loaded, without its adapters.
        plan: What to read for each tensor.
        stored: The checkpoint's tensors, by name.
        packed: How weights that stay packed lie in rows, by name.
        device: Where shards lie.
        tensors: The model's parameters and buffers, by name.
        readers: For tensors that replicas have, which of them reads: (mesh, its dimension, index along it).
    """

    model: nn.Module
    plan: LoadPlan
    stored: Mapping[str, Stored]
    packed: Mapping[str, PackedLayout]
    device: torch.device
    tensors: Mapping[str, torch.Tensor]
    readers: Mapping[str, tuple[Any, int, int]]


def _readers(
    base: nn.Module, plan: LoadPlan, packed: Mapping[str, PackedLayout]
) -> dict[str, tuple[Any, int, int]]:
    """The replica that reads each target: the one that has the fewest elements to read so far."""
    readers: dict[str, tuple[Any, int, int]] = {}
    taken: Counter[int] = Counter()
    tensors = named_tensors(base)
    for name, target in plan.targets.items():
        found = replicate_dims(tensors[name])
        if target.group is None and found is not None and name not in packed:
            mesh, dims = found
            reader = min(range(mesh.size(dims[0])), key=taken.__getitem__)
            taken[reader] += tensors[name].numel()
            readers[name] = (mesh, dims[0], reader)
    return readers


def _read_own(load: _Load) -> int:
    """Read everything that this rank reads by itself into its shards; the number of bytes read."""
    from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

    targets = [target for target in load.plan.targets.values() if target.group is None]
    plain = list(_reads_of(load, [target for target in targets if target.name not in load.packed]))
    with tqdm(
        total=sum(read.num_bytes for read in plain),
        unit="B",
        unit_scale=True,
        desc="loading weights (rank 0)",
        delay=_PROGRESS_AFTER_SECONDS,
        disable=this_rank() != 0,
    ) as bar:
        done = do_reads(plain, workers=threads_that_read(), progress=bar.update)
    return done + sum(_read_packed(load, target) for target in targets if target.name in load.packed)


def _reads_of(load: _Load, targets: Iterable[Target], *, compare: bool = False) -> Iterator[Read]:
    """This rank's reads for ``targets``: each of their pieces, intersected with its shard."""
    for target in targets:
        tensor = load.tensors[target.name]
        mesh, dim, reader = load.readers.get(target.name, (None, 0, 0))
        if mesh is None or mesh.get_local_rank(dim) == reader:
            box, local = box_of(tensor), local_of(tensor)
            for piece in target.pieces:
                yield from load.stored[piece.key].reads(piece, box, local, compare=compare)


def _read_packed(load: _Load, target: Target) -> int:
    """Read this rank's part of a weight that stays packed, or is packed now; the number of bytes read.

    Memory: What is packed now is held in its own dtype, one part of a weight at a time.
    """
    tensor = load.tensors[target.name]
    shard, box = _packed_shard(load, target.name), box_of(tensor)
    torch.autograd.graph.increment_version(shard.rows)  # reads do not
    if is_as_stored(load.model):
        return do_reads(row_reads(target, load.stored, shard, box), workers=threads_that_read())
    values = torch.empty(box.shape, dtype=tensor.dtype, device=load.device)
    reads = [r for piece in target.pieces for r in load.stored[piece.key].reads(piece, box, values)]
    count = do_reads(reads, workers=threads_that_read())
    fill_packed(shard, values)
    return count


def _packed_shard(load: _Load, name: str) -> PackedShard:
    """The shard of packed bytes that a weight has, or gets now."""
    parameter: Any = load.tensors[name]
    local = local_of(parameter)
    if isinstance(local, PackedShard) and local.lies == load.packed[name]:
        return local
    shard = empty_shard(parameter, load.packed[name], load.device)
    put_packed(load.model, name, shard)
    return shard


@torch.no_grad()
def _convert_and_compare(load: _Load) -> int:
    """Run the conversions that need whole tensors, and keep this rank's part; the bytes that it has read.

    What the checkpoint has under further names of a tied tensor must be equal. It is compared at the end,
    when all that was read or computed is there.
    """
    bytes_read, twice = 0, []
    for number, group in enumerate(load.plan.groups):
        sources = {key: torch.empty(load.stored[key].entry.shape, dtype=group.dtype) for key in group.keys}
        reads = [
            read
            for key, values in sources.items()
            for read in load.stored[key].reads(load.stored[key].piece(key), whole(values.shape), values)
        ]
        bytes_read += do_reads(reads, workers=threads_that_read())
        # Nothing but `made` may refer to the sources, so that the conversion can free each one after its use.
        reads.clear()
        made = {pattern: [sources.pop(key) for key in keys] for pattern, keys in group.sources.items()}
        converted = run_conversion(load.plan.twin, group.first_target, group.converter, made)
        for target in load.plan.targets.values():
            if target.group == number:
                _take(load, target, converted[target.name])
        for target in load.plan.duplicates:
            if target.group == number:
                own = part_of(converted[target.name], box_of(load.tensors[target.name]))
                twice.append((target.name, own.clone()))
    for name, values in twice:
        local = local_of(load.tensors[name])
        check_same(name, local, values.to(local.device, local.dtype))
    direct = [target for target in load.plan.duplicates if target.group is None]
    return bytes_read + do_reads(_reads_of(load, direct, compare=True), workers=threads_that_read())


def _take(load: _Load, target: Target, values: torch.Tensor) -> None:
    """Copy this rank's part of a converted tensor into its shard."""
    box = box_of(load.tensors[target.name])
    if target.name in load.packed:
        fill_packed(_packed_shard(load, target.name), part_of(values, box))
    elif (common := whole(target.shape).intersect(box)) is not None:
        mine = part_of(local_of(load.tensors[target.name]), common.relative_to(box))
        mine.copy_(part_of(values, common))


# Frozen weights that stay packed: which rows of the checkpoint are theirs, and the reads that fill them.


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
                yield from stored.row_reads(piece.key, row + first * step, rows)
