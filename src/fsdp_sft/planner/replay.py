"""One optimizer step on paper: who holds how many bytes when, in the order in which FSDP2 allocates.

Source of the order: ``torch/distributed/fsdp/_fully_shard`` (``FSDPParamGroup``, ``foreach_all_gather``,
``foreach_reduce``), torch 2.11 to 2.13.
"""

from collections import defaultdict
from dataclasses import dataclass, fields

import torch

from fsdp_sft.optimizer import working_bytes
from fsdp_sft.planner.model import Group, Skeleton
from fsdp_sft.planner.setup import Setup
from fsdp_sft.planner.trace import Footprint, Trace

MASTERS = "parameters (shards)"
OPTIMIZER = "optimizer states"
GRADIENTS = "gradients (shards)"
UNSHARDED = "gathered parameters"
ALL_GATHER = "all-gather buffers"
WHOLE_GRADIENTS = "gradients before reduction"
REDUCE_SCATTER = "reduce-scatter buffers"
KEPT = "activations kept"
CHECKPOINTED = "activations of checkpointed blocks"
INPUTS = "embedding, rotary tables, mask"
HEAD = "logits and loss"
WORKING = "block at work"
UPDATE = "optimizer at work"
WORKSPACE = "cuBLAS workspace"


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a step.

    Attributes:
        total: Bytes.
        phase: ``"loss"``, ``"backward"`` or ``"optimizer"``.
        parts: What they are; they add up to ``total``.
    """

    total: int
    phase: str
    parts: dict[str, int]


def replay(skeleton: Skeleton, trace: Trace, setup: Setup) -> Peak:
    """Find the peak of one optimizer step in the steady state, when optimizer states exist."""
    step = _Step(skeleton, trace, setup)
    accumulates = setup.grad_accum_steps > 1
    if setup.grad_sync == "last" and accumulates:
        step.micro_step(reduce=False)
        if setup.grad_accum_steps > 2:
            step.micro_step(reduce=False)
    elif accumulates:
        step.micro_step()
    step.micro_step()
    step.optimizer()
    return Peak(step.best, step.best_phase, dict(step.best_parts))


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one FSDP2 group."""

    gathered: int  # as the compute sees it, padded
    buffer: int  # of that, what an all-gather brings
    ahead: int  # of the buffer, what is gathered while the block before runs: not experts of their own group
    cast: int  # this rank's part of it, the all-gather's input
    gradients: int  # of the trained parameters, in the compute dtype
    reduced: int  # the same in the dtype of the reduction, padded
    scattered: int  # this rank's part of that
    last_gradient: int  # of the last trained parameter: foreach_reduce's loop variable outlives its loop
    shard_gradients: int  # as the optimizer reads it
    moved: int  # gathered parameters not cut along their first dimension: they are copied once more
    largest_moved_gradient: int  # of such a parameter
    last_moved_gradient: int  # the same for the last: foreach_reduce's pieces of it outlive its loop


class _Step:
    def __init__(self, skeleton: Skeleton, trace: Trace, setup: Setup) -> None:
        self.setup = setup
        self.trace = trace
        self.footprints: list[Footprint] = [trace.blocks[kind] for kind in skeleton.kinds]
        self.first_backward = skeleton.first_backward
        self.checkpointed = setup.checkpointed(len(skeleton.blocks))
        by_group = {id(group): _group_sizes(group, setup) for group, _ in skeleton.distinct_groups}
        by_group[id(skeleton.root)] = _group_sizes(skeleton.root, setup)
        self.sizes = [by_group[id(group)] for group in skeleton.groups]
        self.root = by_group[id(skeleton.root)]
        self.groups = skeleton.distinct_groups
        # Blocks that are made alike get the same mask, and those with a window another one.
        kept = {trace.arguments[skeleton.kinds[index]] for index in self.checkpointed}
        self.arguments = sum(size for _, size in frozenset[tuple[int, int]]().union(*kept))
        self.visits = _visits(self.checkpointed) if setup.activations_leave else {}
        self.held: dict[str, int] = defaultdict(int)
        self.total = 0
        self.best, self.best_phase, self.best_parts = -1, "", dict[str, int]()
        self.reduced = 0  # bytes of the latest reduce-scatter's input, which the next one frees
        self.accumulated = [0] * (len(self.sizes) + 1)  # whole gradients of earlier micro-steps, by group
        self.has_gradients = False
        self._hold_states()

    def _hold_states(self) -> None:
        setup, on_device = self.setup, not self.setup.cpu_offload or self.setup.gpu.name == "cpu"
        masters = states = 0
        for group, count in self.groups:
            parts = group.parts(setup.num_shards, setup.ep_size)
            trained = sum(part.shard_elements(shards, trained=True) for part, shards in parts)
            frozen = sum(part.shard_elements(shards, trained=False) for part, shards in parts)
            masters += count * (trained * setup.master_dtype.itemsize + frozen * setup.frozen_dtype.itemsize)
            states += count * _state_bytes(setup.optimizer, trained, setup.master_dtype)
        self.hold(WORKSPACE, setup.gpu.workspace_bytes)
        self.shards_on_device = on_device
        if on_device:
            self.hold(MASTERS, masters)
            self.hold(OPTIMIZER, states)

    def hold(self, part: str, size: int) -> None:
        self.held[part] += size
        self.total += size

    def free(self, part: str, size: int) -> None:
        self.hold(part, -size)

    def look(self, phase: str, part: str = "", extra: int = 0) -> None:
        """Compare this moment, with ``extra`` more bytes for ``part``, with the fullest so far."""
        if self.total + extra <= self.best:
            return
        self.best, self.best_phase = self.total + extra, phase
        parts = {name: size for name, size in self.held.items() if size}
        if extra:
            parts[part] = parts.get(part, 0) + extra
        self.best_parts = parts

    # --- forward ------------------------------------------------------------------------------------------

    def micro_step(self, *, reduce: bool = True) -> None:
        """Forward and backward of one micro-batch, with the reduction of its gradients or without."""
        last_gather = self._forward()
        self._loss(last_gather)
        self._backward(reduce=reduce)

    def _forward(self) -> int:
        several = self.setup.num_shards > 1
        previous = self._gather(self.root, "loss")
        self.hold(INPUTS, self.trace.before)
        for index, footprint in enumerate(self.footprints):
            sizes = self.sizes[index]
            self._input_leaves(self.visits.get(index))
            if several:
                self.hold(ALL_GATHER, sizes.buffer)
                self.look("loss", ALL_GATHER, sizes.cast)
                self.free(ALL_GATHER, previous)
                previous = sizes.buffer
            self.hold(UNSHARDED, sizes.gathered)
            self.look("loss", ALL_GATHER, sizes.moved)
            saves = index >= self.first_backward and index not in self.checkpointed
            self.look("loss", WORKING, footprint.forward_peak if saves else footprint.unsaved_peak)
            if index >= self.first_backward:
                kept = footprint.kept
                if index in self.checkpointed:
                    kept = footprint.output + footprint.decisions
                self.hold(CHECKPOINTED if index in self.checkpointed else KEPT, kept)
            if self.setup.reshard_after_forward:
                self.free(UNSHARDED, sizes.gathered)
        return previous

    def _gather(self, sizes: _Sizes, phase: str) -> int:
        """Gather the root; its all-gather buffer, of the size returned, lives until the first block is."""
        self.hold(ALL_GATHER, sizes.buffer)
        self.look(phase, ALL_GATHER, sizes.cast)
        self.hold(UNSHARDED, sizes.gathered)
        self.look(phase, ALL_GATHER, sizes.moved)
        return sizes.buffer

    def _loss(self, last_gather: int) -> None:
        trace = self.trace
        self.hold(INPUTS, self.arguments)
        self.look("loss", HEAD, trace.head_peak)
        self.free(ALL_GATHER, last_gather)
        self.free(HEAD, self.held[HEAD])  # the outputs that a plain loop held since the last micro-step
        self.look("loss", HEAD, trace.loss_peak)
        self._prefetch(len(self.sizes) - 1)
        self.look("loss", HEAD, trace.head_backward_peak)
        self.hold(WHOLE_GRADIENTS, trace.head_gradients)
        self.hold(HEAD, trace.residue - trace.head_gradients)

    # --- backward -----------------------------------------------------------------------------------------

    def _prefetch(self, index: int) -> None:
        """Start to gather a block that the backward comes to next."""
        if index >= self.first_backward and self.setup.reshard_after_forward and self.setup.num_shards > 1:
            self.hold(ALL_GATHER, self.sizes[index].ahead)
            self.look("backward", ALL_GATHER, self.sizes[index].cast)

    def _backward(self, *, reduce: bool) -> None:
        for index in reversed(range(self.first_backward, len(self.sizes))):
            self._block_backward(index)
            self._drop_activations(index)
            self._reduce(index, self.sizes[index], reduce=reduce)
        trace = self.trace
        embedding = self.root.gradients - trace.head_gradients
        self.look("backward", WHOLE_GRADIENTS, trace.embedding_peak)
        self.hold(WHOLE_GRADIENTS, embedding)
        self.free(INPUTS, self.held[INPUTS])
        self.hold(HEAD, trace.outputs - self.held[HEAD])
        self.free(UNSHARDED, self.held[UNSHARDED])
        self._reduce(len(self.sizes), self.root, reduce=reduce)
        self.look("backward")
        self.free(REDUCE_SCATTER, self.held[REDUCE_SCATTER])
        self.reduced = 0
        self.has_gradients = self.has_gradients or reduce
        self.look("backward")

    def _block_backward(self, index: int) -> None:
        sizes, footprint = self.sizes[index], self.footprints[index]
        if self.setup.reshard_after_forward:
            self.hold(UNSHARDED, sizes.gathered)
            self.look("backward", ALL_GATHER, sizes.moved)
            if self.setup.num_shards > 1:
                self.free(ALL_GATHER, sizes.ahead)
        self._prefetch(index - 1)
        self._input_leaves(self.visits.get(index), leaves=False)
        if index in self.checkpointed:
            again = footprint.saved
            if self.setup.activations_leave and not footprint.saves_input:
                again -= footprint.output  # what came back for the recomputation alone is gone after it
            self.look("backward", WORKING, max(footprint.again_peak, again + footprint.backward_peak))
        else:
            self.look("backward", WORKING, footprint.backward_peak)
        self.free(UNSHARDED, sizes.gathered)
        self.hold(WHOLE_GRADIENTS, sizes.gradients)

    def _input_leaves(self, index: int | None, *, leaves: bool = True) -> None:
        """A checkpointed block's input is on the host once the next one begins, and comes back ahead."""
        if index is None:
            return
        before = CHECKPOINTED if index - 1 in self.checkpointed else KEPT
        size = self.footprints[index].output
        self.hold(INPUTS if index == 0 else before, -size if leaves else size)

    def _drop_activations(self, index: int) -> None:
        footprint = self.footprints[index]
        if index in self.checkpointed:
            self.free(CHECKPOINTED, footprint.output + footprint.decisions)
        else:
            self.free(KEPT, footprint.kept)

    def _reduce(self, index: int, sizes: _Sizes, *, reduce: bool) -> None:
        """What happens to a group's gradients when its backward is over."""
        if not sizes.gradients:
            return
        wide = sizes.gradients * self.setup.reduce_dtype.itemsize // self.setup.param_dtype.itemsize
        if not reduce:
            if not self.accumulated[index]:
                self.hold(WHOLE_GRADIENTS, wide)
                self.accumulated[index] = wide
            self.look("backward")
            self.free(WHOLE_GRADIENTS, sizes.gradients)
            return
        if self.accumulated[index]:
            self.look("backward")
            self.free(WHOLE_GRADIENTS, sizes.gradients)
        self.look("backward", WHOLE_GRADIENTS, sizes.largest_moved_gradient)
        self.free(REDUCE_SCATTER, self.reduced)
        self.hold(REDUCE_SCATTER, sizes.reduced)
        self.look("backward", WHOLE_GRADIENTS, sizes.last_moved_gradient)
        self.free(WHOLE_GRADIENTS, self.accumulated[index] or sizes.gradients)
        self.accumulated[index] = 0
        self.reduced = sizes.reduced
        cast = sizes.shard_gradients if sizes.shard_gradients != sizes.scattered else 0
        lingering = sizes.last_gradient + sizes.last_moved_gradient if self.setup.num_shards > 1 else 0
        self.hold(WHOLE_GRADIENTS, lingering)
        self.look("backward", REDUCE_SCATTER, sizes.scattered + cast)
        self.free(WHOLE_GRADIENTS, lingering)
        if self.shards_on_device and not self.has_gradients:
            self.hold(GRADIENTS, sizes.shard_gradients)
        if self.setup.dp_replicate > 1 and (cast or self.has_gradients):
            # FSDP2 keeps what it has all-reduced until the backward ends, even if that is not the gradient.
            self.hold(REDUCE_SCATTER, sizes.scattered)

    # --- optimizer ----------------------------------------------------------------------------------------

    def optimizer(self) -> None:
        """The update."""
        setup = self.setup
        if not self.shards_on_device:
            return
        item, shards = setup.master_dtype.itemsize, setup.num_shards
        working = 0
        parts = [
            (part, n, here) for group, n in self.groups for part, here in group.parts(shards, setup.ep_size)
        ]
        largest = max(part.largest_shard(here) for part, _, here in parts)
        looped = setup.optimizer == "adamw_for_loop" or (
            setup.optimizer == "adamw" and setup.gpu.name == "cpu"
        )
        if looped:
            working = 2 * item * largest
        elif setup.optimizer in ("adamw", "adamw_foreach"):  # denominators of all at once
            working = item * sum(n * part.shard_elements(here, trained=True) for part, n, here in parts)
        elif setup.optimizer == "adamw_stochastic":
            working = working_bytes(largest, setup.master_dtype)
        self.look("optimizer", UPDATE, working)


def _visits(checkpointed: frozenset[int]) -> dict[int, int]:
    """Of each checkpointed block but the first, the one before it."""
    ordered = sorted(checkpointed)
    return dict(zip(ordered[1:], ordered, strict=False))


def _group_sizes(group: Group, setup: Setup) -> _Sizes:
    """Of a block, with its experts, which are a group of their own where ranks share them out."""
    first, *others = (_part_sizes(*part, setup) for part in group.parts(setup.num_shards, setup.ep_size))
    for other in others:
        first = _together(first, other)
    return first


def _together(dense: _Sizes, experts: _Sizes) -> _Sizes:
    """Both gathered, as while the experts run; of what is the last or the largest, the experts'."""
    largest = ("last_gradient", "largest_moved_gradient", "last_moved_gradient")
    pairs = {f.name: (getattr(dense, f.name), getattr(experts, f.name)) for f in fields(_Sizes)}
    sizes = {name: max(pair) if name in largest else sum(pair) for name, pair in pairs.items()}
    return _Sizes(**{**sizes, "ahead": dense.ahead})


def _part_sizes(group: Group, shards: int, setup: Setup) -> _Sizes:
    compute, reduce = setup.param_dtype.itemsize, setup.reduce_dtype.itemsize
    shard = group.shard_elements(shards)
    trained = group.shard_elements(shards, trained=True)
    moved = group.moved(shards, trained=True)
    return _Sizes(
        gathered=shard * shards * compute,
        buffer=shard * shards * compute if shards > 1 else 0,
        ahead=shard * shards * compute if shards > 1 else 0,
        cast=shard * compute if shards > 1 else 0,
        gradients=group.elements(trained=True) * compute,
        reduced=trained * shards * reduce,
        scattered=trained * reduce,
        last_gradient=group.last_trained() * compute,
        shard_gradients=trained * setup.master_dtype.itemsize,
        moved=sum(group.moved(shards)) * compute,
        largest_moved_gradient=max(moved, default=0) * compute,
        last_moved_gradient=(moved or [0])[-1] * compute,
    )


def _state_bytes(optimizer: str, elements: int, master_dtype: torch.dtype) -> int:
    item = master_dtype.itemsize
    if optimizer.startswith("adamw8bit"):
        # Two states of one byte, and one float32 scale each for every 256 values.
        # https://huggingface.co/docs/bitsandbytes/main/en/optimizers
        return 2 * elements + 2 * 4 * (-(-elements // 256))
    return {"sgd": 0, "sgd_momentum": 1}.get(optimizer, 2) * elements * item
