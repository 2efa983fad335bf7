"""How long an optimizer step takes, by a roofline: an operation takes the longer of its FLOPs and its bytes.

The rates are the device's, times the shares of them that training reaches. Only these shares were fitted;
docs/how-to/plan-a-run.md says to what, and how far off they are.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from fsdp_sft.planner.ledger import Workload
from fsdp_sft.planner.model import Skeleton
from fsdp_sft.planner.parameters import Group, decoding, group_sizes
from fsdp_sft.planner.run import Run
from fsdp_sft.planner.trace import Trace, trace

Bound = Literal["compute", "memory bandwidth", "network"]

_TOUCHES = 6  # times that exchanged tensors are read or written on their way: cut, joined, put in place
# Bytes that an update reads and writes, in units of the trained masters' bytes. One fused kernel reads
# master, gradient and two states and writes three of them. Lists of tensors pass through memory at each
# operation.
_UPDATE_TRIPS = {"adamw_fused": 7, "sgd": 3, "sgd_momentum": 5, "adamw8bit": 4, "adamw_stochastic": 40}
_LISTED_TRIPS = 21
# Seconds for which a device waits for the host where the host reads the sizes of an exchange of tokens: about
# ten operations have to be launched before the device is busy again. Not fitted: no published run shows it.
_HOST_WAITS = 5e-5


@dataclass(frozen=True)
class Rates:
    """Shares of a device's rates that training reaches.

    Attributes:
        products: Share of the rate of the best large matrix product. Products of a training step are smaller,
            and the device runs warmer.
        attention: The same for a fused attention kernel, which does more than multiply.
        memory: Share of the bandwidth of the device's memory.
        network: Share of the links' bandwidth.
        contention: Seconds by which a second of collectives slows the computation that hides it, since they
            take multiprocessors and memory bandwidth from it.
        operation: Shortest time of an operation, in seconds.
        wide: Rate of products in float32 as a share of that in 16 bits (TF32; half of it without).
    """

    products: float = 0.85
    attention: float = 0.5
    memory: float = 0.9
    network: float = 0.8
    contention: float = 0.4
    operation: float = 6e-6
    wide: float = 1 / 8


RATES = Rates()


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by part.

    Attributes:
        compute: Computation of one micro-step, recomputation included.
        recompute: The part of ``compute`` that checkpointing adds.
        memory_bound: The part of ``compute`` in which the device waits for its memory.
        communication: Gathers and reductions of one micro-step, which overlap with the computation.
        exposed: The time that ``communication`` adds to a micro-step: what the computation does not hide, and
            the slowdown of the computation itself.
        exchange: Exchanges of one micro-step between ranks that share rows or experts; they do not overlap.
        optimizer: Gradient norm and update.
        total: The whole step.
    """

    compute: float
    recompute: float
    memory_bound: float
    communication: float
    exposed: float
    exchange: float
    optimizer: float
    total: float

    @property
    def bound(self) -> Bound:
        """The resource that limits the speed."""
        if self.communication > self.compute or self.exposed + self.exchange > self.compute:
            return "network"
        return "memory bandwidth" if self.memory_bound > self.compute / 2 else "compute"


def step_time(skeleton: Skeleton, run: Run, rates: Rates = RATES) -> StepTime:
    """Predict the seconds of one optimizer step: micro-steps, and the update.

    The forward and the backward each take the longer of computation (slowed by contention) and communication.
    The gathers before the first block and the reductions after the last are not hidden.
    """
    seen = trace(skeleton, run)
    checkpointed = run.checkpointed(len(skeleton.blocks))
    behind = range(skeleton.first_backward, len(skeleton.kinds))
    spent = {
        (kind, name): _seconds(getattr(footprint, name), run, rates)
        for kind, footprint in seen.blocks.items()
        for name in ("forward", "again", "backward")
    }

    def spent_by(blocks: Iterable[int], name: str) -> tuple[float, float]:
        seconds = [spent[skeleton.kinds[index], name] for index in blocks]
        return sum((took for took, _ in seconds), 0.0), sum(waits for _, waits in seconds)

    spans = (
        spent_by(range(len(skeleton.kinds)), "forward"),
        spent_by(behind, "backward"),
        spent_by(checkpointed.intersection(behind), "again"),
        _seconds(seen.rest, run, rates),
    )
    (forward, backward, again, rest), waits = (took for took, _ in spans), sum(wait for _, wait in spans)
    memory = run.device.memory_bytes_per_second * rates.memory
    # FSDP2 copies within the device, out of gathers and into reductions.
    sized = [(group_sizes(group, run), number) for group, number in skeleton.distinct_groups]
    gathers = 2 if run.reshard_after_forward else 1
    copied = (n * (2 * gathers * sizes.buffer + sizes.gradients + sizes.reduced) for sizes, n in sized)
    copies = sum(copied) / memory if run.num_shards > 1 else 0.0
    packed = (layout for group in skeleton.groups for layout in group_sizes(group, run).packed)
    parts = (decoding(layout, run.param_dtype) for layout in packed)
    # Each gather computes the values of packed parameters, which memory limits.
    decoded = sum(times * _seconds(work, run, rates)[0] for _, work, times in parts)
    forward += rest / 3 + copies / 3 + decoded
    backward += again + rest * 2 / 3 + copies * 2 / 3 + decoded * (gathers - 1)
    # Where gradients are reduced once, the micro-steps before the last only gather.
    whole = _network(skeleton, run, rates, reduces=True)
    early = whole if run.grad_sync == "each" else _network(skeleton, run, rates, reduces=False)
    exchange = _exchange(skeleton, seen, run, rates, checkpointed)

    def micro_step(network: tuple[float, float, float]) -> float:
        passes = zip((forward, backward), network[:2], strict=True)
        taken = (max(own + rates.contention * min(own, link), link) for own, link in passes)
        return sum(taken) + network[2] + exchange

    # Gradients are read once for their norm, and read and written to clip them.
    trips = _UPDATE_TRIPS.get(run.optimizer, _LISTED_TRIPS) + 3
    optimizer = trips * sum(number * sizes.shard_gradients for sizes, number in sized) / memory
    return StepTime(
        compute=forward + backward,
        recompute=again,
        memory_bound=waits + copies + decoded * gathers,
        communication=sum(whole),
        exposed=max(0.0, micro_step(whole) - exchange - (forward + backward)),
        exchange=exchange,
        optimizer=optimizer,
        total=micro_step(whole) + (run.grad_accum_steps - 1) * micro_step(early) + optimizer,
    )


def _seconds(work: Workload, run: Run, rates: Rates) -> tuple[float, float]:
    """Seconds that operations take, and how many of them are spent waiting for memory."""
    gpu = run.device
    peak = gpu.flops_per_second * gpu.achievable * (1 if run.param_dtype.itemsize == 2 else rates.wide)
    rate = {False: peak * rates.products, True: peak * rates.attention}
    memory = gpu.memory_bytes_per_second * rates.memory
    total = waiting = 0.0
    for flops, moved, attention in work:
        computes, waits = flops / rate[attention], max(moved / memory, rates.operation)
        total += max(computes, waits)
        waiting += waits if waits > computes else 0.0
    return total, waiting


def _network(skeleton: Skeleton, run: Run, rates: Rates, *, reduces: bool) -> tuple[float, float, float]:
    """Seconds of the gathers of a micro-step, and of its reductions if it ``reduces``.

    Returns:
        Those that overlap with the forward, with the backward, and with nothing.
    """
    gpu, link = run.device, run.device.node_bytes_per_second
    if run.num_shards > gpu.gpus_per_node:
        # A node fetches what it needs once, over the adapters of all its GPUs together.
        link = min(link, gpu.gpus_per_node * gpu.bytes_per_second)
    # Replicas all-reduce each shard, and all of that passes the one adapter of the rank's GPU.
    across = gpu.node_bytes_per_second if run.num_gpus <= gpu.gpus_per_node else gpu.bytes_per_second
    again = 2 * (run.dp_replicate - 1) / run.dp_replicate

    def gathers(groups: Iterable[Group]) -> float:
        return sum(group_sizes(group, run).received for group in groups) / (link * rates.network)

    def reductions(groups: Iterable[Group]) -> float:
        sizes = [group_sizes(group, run) for group in groups if reduces]
        within = sum(each.reduced - each.scattered for each in sizes) / link
        return (within + again * sum(each.scattered for each in sizes) / across) / rates.network

    first, *others = skeleton.groups
    behind = skeleton.groups[skeleton.first_backward :] if run.reshard_after_forward else ()
    hidden, alone = (*others, skeleton.head), (skeleton.root, skeleton.embedding, first)
    return gathers(hidden), gathers(behind) + reductions(hidden), gathers(alone) + reductions(alone)


def _exchange(
    skeleton: Skeleton, seen: Trace, run: Run, rates: Rates, checkpointed: Collection[int]
) -> float:
    """Seconds of the exchanges around attention or experts, in forward, backward and recomputation."""
    ranks = run.exchange_ranks
    if ranks == 1:
        return 0.0
    exchanged = sum(
        seen.blocks[kind].exchanged * (2 + (index in checkpointed))
        for index, kind in enumerate(skeleton.kinds)
    )
    gpu = run.device
    link = gpu.node_bytes_per_second if ranks <= gpu.gpus_per_node else gpu.bytes_per_second
    # Cutting and joining around experts is among the traced operations; around attention it is not.
    touches = _TOUCHES / (gpu.memory_bytes_per_second * rates.memory) if run.shares_rows else 0.0
    waits = 0.0 if run.shares_rows else _HOST_WAITS * (len(skeleton.experts) + len(checkpointed))
    return exchanged * ((ranks - 1) / ranks / (link * rates.network) + touches) + waits
