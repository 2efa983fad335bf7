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
from fsdp_sft._tensors.reader import check_all_finite, check_same, read_jobs
from fsdp_sft._tensors.stored import AT_ONCE, Computation, Job
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
    check_nothing_empty,
    check_shards_finite,
    initialise_rest,
    materialise,
    progress_bar,
)
from fsdp_sft.weights.plan import ConvertedGroup, LoadPlan, Target
from fsdp_sft.weights.resolve import Checkpoint
from fsdp_sft.weights.rows import layouts_of, row_jobs
from fsdp_sft.weights.vocabulary import fill_new_rows

_logger = logging.getLogger(__name__)
_BROADCAST_BYTES = 16 << 20  # sent at once
_WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
"""Wider dtypes that hold every value of a dtype. gloo sends no narrower floats than the keys."""


@dataclass(frozen=True)
class Reading:
    """Options for reading a plan.

    Attributes:
        strategy: ``"slice"`` or ``"exchange"``.
        host_budget_bytes: Bytes that all read buffers together may take.
        workers: Number of threads that read.
        check_finite: Whether NaN and infinity are errors.
        seed: Seed for initialising what the checkpoint lacks.
    """

    strategy: str
    host_budget_bytes: int = 1 << 30
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
            reads = _Reads(base, plan, checkpoint, reading, packed, device)
            bytes_read = _read_own(reads)
            staging = _staging(reads)
        bytes_read += _exchange(reads, staging)
        with agreed("comparing tied weights"):
            bytes_read += _compare_duplicates(reads)
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
        check_nothing_empty(model, sources)
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
class _Reads:
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
        # Values that each thread may compute at once, from packed ones: with what they are computed from, and
        # what comes in between, they take up to 48 bytes each.
        self.at_once = min(AT_ONCE, max(1, self.how.host_budget_bytes // (48 * self.how.workers)))

    def is_checked(self, target: Target) -> bool:
        """Whether NaN and infinity among a target's values are errors."""
        return self.how.check_finite and target.is_parameter and self.tensors[target.name].is_floating_point()

    def dtype_to_send(self, target: Target) -> torch.dtype:
        """Dtype in which a target's values pass between replicas: the stored one if it is narrower and exact.

        Casting to the shard's dtype after sending could change the bits of a NaN, so where NaN is allowed the
        shard's own dtype is sent.
        """
        stored = {self.checkpoint.sources[piece.key].entry.dtype for piece in target.pieces}
        own = self.tensors[target.name].dtype
        first = next(iter(stored), own)
        exact = own in _WIDER.get(first, ()) and len(stored) == 1
        return first if exact and self.is_checked(target) else own

    def place_of(self, target: Target) -> torch.Tensor:
        """Memory for this rank's part of a converted target."""
        aside = self.converted_duplicates.get(target.name)
        return local_of(self.tensors[target.name]) if aside is None else aside

    def run(self, jobs: Iterable[Job | Computation], progress: Callable[[int], None] = lambda _: None) -> int:
        """Do jobs; the number of bytes read."""
        return read_jobs(
            jobs,
            host_budget_bytes=self.how.host_budget_bytes,
            workers=self.how.workers,
            progress=progress,
        )


def _read_own(reads: _Reads) -> int:
    """Read everything that this rank reads by itself into its shards; the number of bytes read."""
    targets = [target for target in reads.plan.targets.values() if target.group is None]
    jobs = list(_jobs(reads, [target for target in targets if target.name not in reads.packed], "copy"))
    with progress_bar(sum(job.num_bytes for job in jobs)) as progress:
        done = reads.run(jobs, progress)
    return done + sum(_read_packed(reads, target) for target in targets if target.name in reads.packed)


def _read_packed(reads: _Reads, target: Target) -> int:
    """Read this rank's part of a weight that stays packed, or is packed now; the number of bytes read.

    Memory: What is packed now is held in its own dtype, one part of a weight at a time.
    """
    tensor, sources = reads.tensors[target.name], reads.checkpoint.sources
    shard, box = _packed_shard(reads, target.name), box_of(tensor)
    torch.autograd.graph.increment_version(shard.rows)  # reads do not
    if is_as_stored(reads.model):
        count = reads.run(row_jobs(target, sources, shard, box, reads.at_once))
        if reads.is_checked(target):
            check_all_finite({target.name: shard.dense(torch.float32)})
        return count
    values = torch.empty(box.shape, dtype=tensor.dtype, device=reads.device)
    jobs: list[Job | Computation] = []
    for piece in target.pieces:
        checked = reads.is_checked(target)
        jobs += sources[piece.key].jobs(
            target.name, piece, box, values, check_finite=checked, at_once=reads.at_once
        )
    count = reads.run(jobs)
    fill_packed(shard, values)
    return count


def _packed_shard(reads: _Reads, name: str) -> PackedShard:
    """The shard of packed bytes that a weight has, or gets now."""
    parameter: Any = reads.tensors[name]
    local = local_of(parameter)
    if isinstance(local, PackedShard) and local.lies == reads.packed[name]:
        return local
    shard = empty_shard(parameter, reads.packed[name], reads.device)
    put_packed(reads.model, name, shard)
    return shard


def _staging(reads: _Reads) -> dict[torch.dtype, torch.Tensor]:
    """Buffers, by dtype, for values that pass between replicas in another dtype than the shards'.

    They are allocated before the exchange, in which no rank may fail alone: the others would wait for it.
    """
    staging: dict[torch.dtype, torch.Tensor] = {}
    for name in reads.readers:
        local = local_of(reads.tensors[name])
        dtype = reads.dtype_to_send(reads.plan.targets[name])
        numel = min(local.numel(), _BROADCAST_BYTES // dtype.itemsize)
        if dtype != local.dtype and (dtype not in staging or staging[dtype].numel() < numel):
            staging[dtype] = torch.empty(numel, dtype=dtype, device=local.device)
    return staging


def _exchange(reads: _Reads, staging: dict[torch.dtype, torch.Tensor]) -> int:
    """Broadcast shards between replicas, and convert what has to be converted whole; the bytes read for that.

    Collective: all ranks.
    """
    for name, (mesh, dim, reader) in reads.readers.items():
        local, group = local_of(reads.tensors[name]), mesh.get_group(dim)
        dtype = reads.dtype_to_send(reads.plan.targets[name])
        if local.numel() == 0:
            continue
        if dtype == local.dtype or not local.is_contiguous():
            dist.broadcast(local, group=group, group_src=reader)
            continue
        is_reader = mesh.get_local_rank(dim) == reader
        for part in local.view(-1).split(_BROADCAST_BYTES // dtype.itemsize):
            sent = staging[dtype][: part.numel()]
            if is_reader:
                sent.copy_(part)
            dist.broadcast(sent, group=group, group_src=reader)
            if not is_reader:
                part.copy_(sent)
    return _fill_converted(reads)


def _readers(reads: _Reads) -> dict[str, tuple[Any, int, int]]:
    """The replica that reads each target: (mesh, dimension of the mesh, index along it).

    Each target goes to the replica that has the fewest elements to read so far.
    """
    readers: dict[str, tuple[Any, int, int]] = {}
    load: dict[int, int] = {}
    for name, target in reads.plan.targets.items():
        found = replicate_dims(reads.tensors[name])
        if target.group is None and found is not None and name not in reads.packed:
            mesh, dims = found
            reader = min(range(mesh.size(dims[0])), key=lambda index: load.get(index, 0))
            load[reader] = load.get(reader, 0) + reads.tensors[name].numel()
            readers[name] = (mesh, dims[0], reader)
    return readers


def _jobs(
    reads: _Reads,
    targets: Iterable[Target],
    mode: Literal["copy", "compare"],
) -> Iterable[Job | Computation]:
    """This rank's reads for ``targets``: each of their pieces, intersected with its shard."""
    for target in targets:
        tensor = reads.tensors[target.name]
        if target.name in reads.readers:
            mesh, dim, reader = reads.readers[target.name]
            if mesh.get_local_rank(dim) != reader:
                continue
        box, local = box_of(tensor), local_of(tensor)
        checked = reads.is_checked(target)
        for piece in target.pieces:
            stored = reads.checkpoint.sources[piece.key]
            yield from stored.jobs(
                target.name, piece, box, local, check_finite=checked, mode=mode, at_once=reads.at_once
            )


def _fill_converted(reads: _Reads) -> int:
    """Run the conversions that need whole tensors, and keep this rank's part; the bytes that it has read.

    With ``"slice"`` every rank converts every group. With ``"exchange"`` each rank converts one group of a
    batch and broadcasts the results.

    Collective: all ranks.
    """
    bytes_read = 0
    world = world_size()
    if reads.how.strategy != "exchange" or world == 1 or reads.packed:
        for group in reads.plan.groups:
            with agreed(f"converting {group.first_target!r}"):
                count, converted = _convert(reads, group)
                bytes_read += count
                for target in _targets_of(reads, group):
                    _take(reads, target, converted[target.name], whole(target.shape))
        return bytes_read
    for first in range(0, len(reads.plan.groups), world):
        batch = reads.plan.groups[first : first + world]
        mine: dict[str, torch.Tensor] = {}
        with agreed(f"converting {batch[0].first_target!r} and others"):
            if this_rank() < len(batch):
                count, mine = _convert(reads, batch[this_rank()])
                bytes_read += count
        for owner, group in enumerate(batch):
            for target in _targets_of(reads, group):
                _broadcast(reads, target, mine.get(target.name), owner)
    return bytes_read


def _targets_of(reads: _Reads, group: ConvertedGroup) -> list[Target]:
    """The targets and duplicates that a group's conversion makes."""
    number = reads.plan.groups.index(group)
    every = [*reads.plan.targets.values(), *reads.plan.duplicates]
    return [target for target in every if target.group == number]


def _convert(reads: _Reads, group: ConvertedGroup) -> tuple[int, dict[str, torch.Tensor]]:
    """Read a group's sources as a whole and convert them on the CPU; (bytes read, results by target)."""
    sources: dict[str, torch.Tensor] = {}
    jobs: list[Job | Computation] = []
    for key in group.keys:
        stored = reads.checkpoint.sources[key]
        sources[key] = torch.empty(stored.entry.shape, dtype=group.dtype)
        box = whole(stored.entry.shape)
        jobs += stored.jobs(key, stored.piece(key), box, sources[key], at_once=reads.at_once)
    bytes_read = reads.run(jobs)
    # Nothing but `made` may refer to the sources, so that the conversion can free each one after its use.
    made = {pattern: [sources.pop(key) for key in keys] for pattern, keys in group.sources.items()}
    jobs.clear()
    converted = run_conversion(reads.plan.twin, group.first_target, group.converter, made)
    checked = [target.name for target in _targets_of(reads, group) if reads.is_checked(target)]
    check_all_finite({name: converted[name] for name in checked})
    return bytes_read, converted


def _compare_duplicates(reads: _Reads) -> int:
    """Check that the checkpoint has the same values under all names of a tied tensor; the bytes read.

    This comes after the exchange, in which replicas receive what they did not read.
    """
    for name, values in reads.converted_duplicates.items():
        check_same(name, local_of(reads.tensors[name]), values)
    direct = [target for target in reads.plan.duplicates if target.group is None]
    return reads.run(_jobs(reads, direct, "compare"))


def _take(reads: _Reads, target: Target, values: torch.Tensor, where: Box) -> None:
    """Copy into this rank's shard its intersection with ``values``, which fill the box ``where``."""
    box = box_of(reads.tensors[target.name])
    common = where.intersect(box)
    if target.name in reads.packed:
        assert common == box
        fill_packed(_packed_shard(reads, target.name), part_of(values, box))
    elif common is not None:
        mine, theirs = part_of(reads.place_of(target), common.relative_to(box)), common.relative_to(where)
        with torch.no_grad():
            mine.copy_(part_of(values, theirs))


def _broadcast(reads: _Reads, target: Target, values: torch.Tensor | None, owner: int) -> None:
    """Send a converted tensor from its owner to all ranks, a block of rows at a time.

    Collective: all ranks.
    """
    shape = target.shape or (1,)
    dtype = reads.tensors[target.name].dtype
    rows = max(1, _BROADCAST_BYTES // max(1, dtype.itemsize * math.prod(shape[1:])))
    for at in range(0, shape[0], rows):
        count = min(rows, shape[0] - at)
        if values is not None:
            block = values.reshape(shape)[at : at + count].to(dtype).contiguous()
        else:
            block = torch.empty((count, *shape[1:]), dtype=dtype)
        dist.broadcast(block, src=owner, group=control_group())
        if target.shape:
            _take(reads, target, block, Box((at, *(0 for _ in shape[1:])), (count, *shape[1:])))
        else:
            _take(reads, target, block.reshape(()), Box((), ()))
