"""Filling the shards of a model by a plan, in phases that all ranks go through together."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fsdp_sft._compat.conversions import keep_used_conversions, run_conversion
from fsdp_sft._compat.fsdp import adopt_shards
from fsdp_sft._model.adapters import copy_saved_modules, without_adapters
from fsdp_sft._model.named import named_tensors
from fsdp_sft._ranks.agree import agreed, all_reduce_sum, control_group, tell, this_rank, world_size
from fsdp_sft._tensors.boxes import Box, box_of, local_of, part_of, replicate_dims, whole
from fsdp_sft._tensors.packed_shard import PackedLayout, PackedShard
from fsdp_sft._tensors.reader import check_all_finite, check_same, do_reads
from fsdp_sft._tensors.stored import Read
from fsdp_sft.shard.packing import (
    empty_shard,
    fill_packed,
    is_as_stored,
    packed_weights,
    put_packed,
)
from fsdp_sft.weights.finish import (
    LoadReport,
    Source,
    check_shards_finite,
    initialise_rest,
    materialise,
    progress_bar,
)
from fsdp_sft.weights.plan import ConvertedGroup, LoadPlan, Target
from fsdp_sft.weights.resolve import Checkpoint
from fsdp_sft.weights.rows import layouts_of, row_reads
from fsdp_sft.weights.vocabulary import fill_new_rows

_logger = logging.getLogger(__name__)
_BROADCAST_BYTES = 16 << 20  # sent at once


@dataclass(frozen=True)
class Reading:
    """Options for reading a plan.

    Attributes:
        strategy: ``"slice"`` or ``"exchange"``.
        workers: Number of threads that read.
        check_finite: Whether NaN and infinity are errors.
        seed: Seed for initialising what the checkpoint lacks.
    """

    strategy: str
    workers: int = 1
    check_finite: bool = False
    seed: int = 0


def fill(
    model: nn.Module,
    plan: LoadPlan,
    checkpoint: Checkpoint,
    sources: Mapping[str, Source],
    reading: Reading,
    *,
    reason: str,
    started: float,
) -> LoadReport:
    """Allocate a model's tensors and fill them by a plan.

    Args:
        model: The model, with its adapters.
        plan: Plan for its base, with the same targets on all ranks.
        checkpoint: Where the plan's pieces lie.
        sources: What ``account`` returned.
        reading: Options for reading.
        reason: Reason for the strategy, in words.
        started: When the load began, by ``time.perf_counter``.

    Collective: all ranks.
    """
    with agreed("reading the checkpoint"):
        with without_adapters(model) as base:
            tensors = named_tensors(base)
            packed = layouts_of(packed_weights(model), plan, checkpoint.sources, tensors)
        device = materialise(model, {id(tensors[name]) for name in packed})
    with without_adapters(model) as base:
        with agreed("reading the checkpoint"):
            load = _Load(base, plan, checkpoint, reading, packed, device)
            bytes_read = _read_own(load)
        bytes_read += _exchange(load)
        with agreed("comparing tied weights"):
            bytes_read += _compare_duplicates(load)
        with agreed("finishing the load"):
            initialise_rest(base, plan, seed=reading.seed)
        fill_new_rows(base, plan.short)
        with agreed("finishing the load"):
            if reading.check_finite:
                check_shards_finite(base, plan)
            if plan.twin is not None:
                keep_used_conversions(base, plan.conversions)
    with agreed("finishing the load"):
        if packed:
            adopt_shards(model)
        copy_saved_modules(model)
    report = LoadReport(
        bytes_read=bytes_read,
        job_bytes_read=int(all_reduce_sum([bytes_read])[0]),
        checkpoint_bytes=checkpoint.total_bytes,
        seconds=time.perf_counter() - started,
        loaded=[*plan.targets, *(target.name for target in plan.duplicates)],
        missing=plan.missing,
        unexpected=plan.unexpected,
        initialised=plan.initialised,
        strategy=reading.strategy,
        reason=reason,
        class_bytes=plan.class_bytes,
        formats=checkpoint.formats,
        sources=sources,
    )
    tell(_logger, "%s: %s", getattr(model, "name_or_path", "") or type(model).__name__, report)
    return report


@dataclass
class _Load:
    """What the phases of one load share: the model, the plan, the files and the options.

    Attributes:
        model: The model that is loaded, without its adapters.
        plan: What to read for each tensor.
        checkpoint: The files.
        how: How they are read.
        packed: How weights that stay packed lie in rows, by name.
        device: Where shards lie.
    """

    model: nn.Module
    plan: LoadPlan
    checkpoint: Checkpoint
    how: Reading
    packed: Mapping[str, PackedLayout]
    device: torch.device

    def __post_init__(self) -> None:
        self.tensors = named_tensors(self.model)
        # Tied weights that the checkpoint stores under both names must be equal. Where they come out of a
        # conversion, this rank's part of the second one is kept here until both are complete.
        self.converted_duplicates: dict[str, torch.Tensor] = {
            target.name: torch.empty_like(local_of(self.tensors[target.name]))
            for target in self.plan.duplicates
            if target.group is not None
        }
        self.readers = _readers(self) if self.how.strategy == "exchange" else {}

    def is_checked(self, target: Target) -> bool:
        """Whether NaN and infinity among a target's values are errors."""
        return self.how.check_finite and target.is_parameter and self.tensors[target.name].is_floating_point()

    def place_of(self, target: Target) -> torch.Tensor:
        """Memory for this rank's part of a converted target."""
        aside = self.converted_duplicates.get(target.name)
        return local_of(self.tensors[target.name]) if aside is None else aside

    def run(self, reads: Iterable[Read], progress: Callable[[int], None] = lambda _: None) -> int:
        """Do reads; the number of bytes."""
        return do_reads(reads, workers=self.how.workers, progress=progress)


def _read_own(load: _Load) -> int:
    """Read everything that this rank reads by itself into its shards; the number of bytes read."""
    targets = [target for target in load.plan.targets.values() if target.group is None]
    plain = list(_reads_of(load, [target for target in targets if target.name not in load.packed], "copy"))
    with progress_bar(sum(read.num_bytes for read in plain)) as progress:
        done = load.run(plain, progress)
    return done + sum(_read_packed(load, target) for target in targets if target.name in load.packed)


def _read_packed(load: _Load, target: Target) -> int:
    """Read this rank's part of a weight that stays packed, or is packed now; the number of bytes read.

    Memory: What is packed now is held in its own dtype, one part of a weight at a time.
    """
    tensor, sources = load.tensors[target.name], load.checkpoint.sources
    shard, box = _packed_shard(load, target.name), box_of(tensor)
    torch.autograd.graph.increment_version(shard.rows)  # reads do not
    if is_as_stored(load.model):
        count = load.run(row_reads(target, sources, shard, box))
        if load.is_checked(target):
            check_all_finite({target.name: shard.dense(torch.float32)})
        return count
    values = torch.empty(box.shape, dtype=tensor.dtype, device=load.device)
    own: list[Read] = []
    for piece in target.pieces:
        checked = load.is_checked(target)
        own += sources[piece.key].reads(target.name, piece, box, values, check_finite=checked)
    count = load.run(own)
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


def _exchange(load: _Load) -> int:
    """Broadcast shards between replicas, and convert what has to be converted whole; the bytes read for that.

    Collective: all ranks.
    """
    for name, (mesh, dim, reader) in load.readers.items():
        local = local_of(load.tensors[name])
        if local.numel():
            dist.broadcast(local, group=mesh.get_group(dim), group_src=reader)
    return _fill_converted(load)


def _readers(load: _Load) -> dict[str, tuple[Any, int, int]]:
    """The replica that reads each target: (mesh, dimension of the mesh, index along it).

    Each target goes to the replica that has the fewest elements to read so far.
    """
    readers: dict[str, tuple[Any, int, int]] = {}
    taken: dict[int, int] = {}
    for name, target in load.plan.targets.items():
        found = replicate_dims(load.tensors[name])
        if target.group is None and found is not None and name not in load.packed:
            mesh, dims = found
            reader = min(range(mesh.size(dims[0])), key=lambda index: taken.get(index, 0))
            taken[reader] = taken.get(reader, 0) + load.tensors[name].numel()
            readers[name] = (mesh, dims[0], reader)
    return readers


def _reads_of(
    load: _Load,
    targets: Iterable[Target],
    mode: Literal["copy", "compare"],
) -> Iterable[Read]:
    """This rank's reads for ``targets``: each of their pieces, intersected with its shard."""
    for target in targets:
        tensor = load.tensors[target.name]
        if target.name in load.readers:
            mesh, dim, reader = load.readers[target.name]
            if mesh.get_local_rank(dim) != reader:
                continue
        box, local = box_of(tensor), local_of(tensor)
        checked = load.is_checked(target)
        for piece in target.pieces:
            stored = load.checkpoint.sources[piece.key]
            yield from stored.reads(target.name, piece, box, local, check_finite=checked, mode=mode)


def _fill_converted(load: _Load) -> int:
    """Run the conversions that need whole tensors, and keep this rank's part; the bytes that it has read.

    With ``"slice"`` every rank converts every group. With ``"exchange"`` each rank converts one group of a
    batch and broadcasts the results.

    Collective: all ranks.
    """
    bytes_read = 0
    world = world_size()
    if load.how.strategy != "exchange" or world == 1 or load.packed:
        for group in load.plan.groups:
            with agreed(f"converting {group.first_target!r}"):
                count, converted = _convert(load, group)
                bytes_read += count
                for target in _targets_of(load, group):
                    _take(load, target, converted[target.name], whole(target.shape))
        return bytes_read
    for first in range(0, len(load.plan.groups), world):
        batch = load.plan.groups[first : first + world]
        mine: dict[str, torch.Tensor] = {}
        with agreed(f"converting {batch[0].first_target!r} and others"):
            if this_rank() < len(batch):
                count, mine = _convert(load, batch[this_rank()])
                bytes_read += count
        for owner, group in enumerate(batch):
            for target in _targets_of(load, group):
                _broadcast(load, target, mine.get(target.name), owner)
    return bytes_read


def _targets_of(load: _Load, group: ConvertedGroup) -> list[Target]:
    """The targets and duplicates that a group's conversion makes."""
    number = load.plan.groups.index(group)
    every = [*load.plan.targets.values(), *load.plan.duplicates]
    return [target for target in every if target.group == number]


def _convert(load: _Load, group: ConvertedGroup) -> tuple[int, dict[str, torch.Tensor]]:
    """Read a group's sources as a whole and convert them on the CPU; (bytes read, results by target)."""
    sources: dict[str, torch.Tensor] = {}
    reads: list[Read] = []
    for key in group.keys:
        stored = load.checkpoint.sources[key]
        sources[key] = torch.empty(stored.entry.shape, dtype=group.dtype)
        box = whole(stored.entry.shape)
        reads += stored.reads(key, stored.piece(key), box, sources[key])
    bytes_read = load.run(reads)
    # Nothing but `made` may refer to the sources, so that the conversion can free each one after its use.
    made = {pattern: [sources.pop(key) for key in keys] for pattern, keys in group.sources.items()}
    reads.clear()
    converted = run_conversion(load.plan.twin, group.first_target, group.converter, made)
    checked = [target.name for target in _targets_of(load, group) if load.is_checked(target)]
    check_all_finite({name: converted[name] for name in checked})
    return bytes_read, converted


def _compare_duplicates(load: _Load) -> int:
    """Check that the checkpoint has the same values under all names of a tied tensor; the bytes read.

    This comes after the exchange, in which replicas receive what they did not read.
    """
    for name, values in load.converted_duplicates.items():
        check_same(name, local_of(load.tensors[name]), values)
    direct = [target for target in load.plan.duplicates if target.group is None]
    return load.run(_reads_of(load, direct, "compare"))


def _take(load: _Load, target: Target, values: torch.Tensor, where: Box) -> None:
    """Copy into this rank's shard its intersection with ``values``, which fill the box ``where``."""
    box = box_of(load.tensors[target.name])
    common = where.intersect(box)
    if target.name in load.packed:
        assert common == box
        fill_packed(_packed_shard(load, target.name), part_of(values, box))
    elif common is not None:
        mine, theirs = part_of(load.place_of(target), common.relative_to(box)), common.relative_to(where)
        with torch.no_grad():
            mine.copy_(part_of(values, theirs))


def _broadcast(load: _Load, target: Target, values: torch.Tensor | None, owner: int) -> None:
    """Send a converted tensor from its owner to all ranks, a block of rows at a time.

    Collective: all ranks.
    """
    shape = target.shape or (1,)
    dtype = load.tensors[target.name].dtype
    rows = max(1, _BROADCAST_BYTES // max(1, dtype.itemsize * math.prod(shape[1:])))
    for at in range(0, shape[0], rows):
        count = min(rows, shape[0] - at)
        if values is not None:
            block = values.reshape(shape)[at : at + count].to(dtype).contiguous()
        else:
            block = torch.empty((count, *shape[1:]), dtype=dtype)
        dist.broadcast(block, src=owner, group=control_group())
        if target.shape:
            _take(load, target, block, Box((at, *(0 for _ in shape[1:])), (count, *shape[1:])))
        else:
            _take(load, target, block.reshape(()), Box((), ()))
