"""Which of the ways to run a training fit, and which of them is fastest."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from fsdp_sft.context_parallel import check_shareable
from fsdp_sft.errors import NoPlanError, UnsupportedModelError
from fsdp_sft.planner.estimate import MemoryEstimate, check_options, estimate
from fsdp_sft.planner.model import as_config, build_skeleton
from fsdp_sft.planner.setup import Setup
from fsdp_sft.planner.speed import StepTime, step_time
from fsdp_sft.planner.trace import trace
from fsdp_sft.sac import Placement, parse_ratio

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

USABLE = 0.90  # of a device: the rest is for fragments, NCCL and the CUDA context
RATIOS = tuple(Fraction(n, 24) for n in (0, 3, 4, 6, 8, 9, 12, 15, 16, 18, 20, 21, 24))

_SEARCHED = ("num_gpus", "seq_length", "micro_batch_size", "grad_accum_steps")
_LARGEST_SEARCH = 4096  # GPUs
_GIB = 1 << 30


@dataclass(frozen=True)
class RunPlan:
    """One way to run a training that fits.

    Attributes:
        num_gpus: Ranks.
        cp: Ranks that share the tokens of each row; ``num_gpus // cp`` such groups have rows of their own.
        micro_batch_size: Sequences per rank (or group of ``cp`` ranks) and forward.
        grad_accum_steps: Micro-batches per optimizer step.
        sac_ratio: Fraction of checkpointed blocks, the smallest of a fixed list that fits.
        sac_placement: Which blocks those are.
        sac_offload: Whether what they keep waits on the host, of which ``estimate.host_bytes`` are taken.
        reshard_after_forward: Whether blocks are freed between forward and backward.
        estimate: Memory per GPU.
        time: Predicted seconds of an optimizer step, by part: good for ranking.
        relative_speed: 1.0 for the fastest plan of a list.
        reasons: Why it is as fast as it is.
    """

    num_gpus: int
    cp: int
    micro_batch_size: int
    grad_accum_steps: int
    sac_ratio: Fraction
    sac_placement: Placement
    sac_offload: bool
    reshard_after_forward: bool
    estimate: MemoryEstimate
    time: StepTime
    relative_speed: float
    reasons: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """Predicted peak per GPU."""
        return self.estimate.peak_bytes


def plan_run(
    config: "PreTrainedConfig | str | os.PathLike[str]",
    *,
    num_gpus: int,
    gpu_memory_bytes: int,
    seq_length: int,
    global_batch_size: int,
    **estimate_options: Any,
) -> list[RunPlan]:
    """Find the ways to run a training that fit into memory, fastest first.

    Tries every micro-batch size that divides a rank's share of the batch, checkpointing ratios from 0 to 1,
    both placements, and blocks freed or kept after the forward. Of each, the smallest ratio that fits is
    listed; where activations that wait on the host (``sac_offload``) spare recomputation, that too. Ranks
    share rows (``cp``) in groups that divide the query heads and the ranks: where that could be faster than
    not to, within a node, and beyond it only if nothing else fits.

    Args:
        config: As for ``estimate_memory``.
        num_gpus: Ranks.
        gpu_memory_bytes: Of one device; a plan may use 90 % of it.
        seq_length: Tokens per sequence.
        global_batch_size: Sequences per optimizer step over all ranks; a multiple of ``num_gpus // cp``.
        **estimate_options: Further arguments of ``estimate_memory``. Those that would be searched
            (``cp``, ``micro_batch_size``, ``sac_ratio``, ``sac_placement``, ``sac_offload``,
            ``reshard_after_forward``) are then fixed.

    Returns:
        At least one plan.

    Raises:
        NoPlanError: If nothing fits; the message says what would.
        TypeError: For an option that ``estimate_memory`` does not have.
        ValueError: For an argument out of range.
    """
    _check_numbers(num_gpus, global_batch_size, gpu_memory_bytes)
    if "grad_accum_steps" in estimate_options:
        raise TypeError(
            "plan_run finds grad_accum_steps from the global batch; give micro_batch_size to fix it"
        )
    config = as_config(config)
    fixed = dict(estimate_options)
    first = check_options(
        num_gpus=num_gpus, seq_length=seq_length, micro_batch_size=fixed.pop("micro_batch_size", 1), **fixed
    )
    sizes = [1, *_divisors(config, first)] if "cp" not in estimate_options else [first.cp]
    dealt = [cp for cp in sizes if global_batch_size % (num_gpus // cp) == 0]
    if not dealt:
        raise ValueError(_no_multiple(first, global_batch_size))
    budget, plans = int(gpu_memory_bytes * USABLE), list[RunPlan]()
    for cp in dealt:
        if plans and cp > first.gpu.gpus_per_node:
            break
        why = _why_shared(sizes[: sizes.index(cp)], dealt, plans) if "cp" not in estimate_options else ""
        shared = replace(first, cp=cp)
        best = min((plan.time.total for plan in plans), default=math.inf)
        try:
            plans += _plans_of_groups(config, shared, estimate_options, global_batch_size, budget, why, best)
        except UnsupportedModelError:
            if cp == 1 or "cp" in estimate_options:
                raise
            break  # no ranks can share rows of this model
    if not plans:
        raise NoPlanError(
            _what_would_fit(config, first, estimate_options, gpu_memory_bytes, global_batch_size)
        )
    plans.sort(key=lambda plan: (plan.time.total, plan.cp, plan.peak_bytes, plan.sac_placement))
    fastest = plans[0].time.total
    return [replace(plan, relative_speed=fastest / plan.time.total) for plan in plans]


def smallest_num_gpus(
    config: "PreTrainedConfig | str | os.PathLike[str]",
    *,
    gpu_memory_bytes: int,
    seq_length: int,
    **estimate_options: Any,
) -> int | None:
    """Smallest power of two of GPUs on which one sequence per rank fits, every block checkpointed if need be.

    If it does not, ranks may share it (``cp``).

    Args:
        config: As for ``estimate_memory``.
        gpu_memory_bytes: Of one device; 90 % of it is used.
        seq_length: Tokens per sequence.
        **estimate_options: Further arguments of ``estimate_memory``.

    Returns:
        The number, or None if none up to 4096 is enough.
    """
    options = {name: value for name, value in estimate_options.items() if name not in _SEARCHED}
    options = {"sac_ratio": 1, "sac_placement": "prefix", **options}
    known = as_config(config)
    num_gpus = options.get("dp_replicate", 1) * options.get("cp", 1)
    while num_gpus <= _LARGEST_SEARCH:
        setup = check_options(num_gpus=num_gpus, micro_batch_size=1, seq_length=seq_length, **options)
        least = _least_by_group(known, setup, group_sizes(known, setup, options))
        if any(memory.peak_bytes <= gpu_memory_bytes * USABLE for memory in least):
            return int(num_gpus)
        num_gpus *= 2
    return None


def group_sizes(config: Any, setup: Setup, options: dict[str, Any]) -> list[int]:
    """How many ranks could share a row, ascending: as many as are asked for, or else all that can."""
    if "cp" in options:
        return [setup.cp]
    divisors = _divisors(config, setup)
    return [1, *divisors] if divisors and _can_share(config, replace(setup, cp=divisors[0])) else [1]


def _divisors(config: Any, setup: Setup) -> list[int]:
    """Numbers of ranks, from 2, that divide a replica's ranks and the model's query heads."""
    model, found = build_skeleton(config, setup).model, []
    for ranks in range(2, setup.num_shards + 1):
        if setup.num_shards % ranks == 0:
            with suppress(ValueError):
                check_shareable(model, ranks)
                found.append(ranks)
    return found


def _can_share(config: Any, setup: Setup) -> bool:
    try:
        trace(build_skeleton(config, setup), setup)
    except UnsupportedModelError:
        return False
    return True


def _check_numbers(num_gpus: int, global_batch_size: int, gpu_memory_bytes: int) -> None:
    for name, value in (("num_gpus", num_gpus), ("global_batch_size", global_batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    if isinstance(gpu_memory_bytes, bool) or not 0 < gpu_memory_bytes < math.inf:
        raise ValueError(f"gpu_memory_bytes must be positive and finite, got {gpu_memory_bytes!r}")


def _no_multiple(setup: Setup, global_batch_size: int) -> str:
    shares = setup.num_gpus // setup.cp
    near = max(1, round(global_batch_size / shares)) * shares
    whose = f"{shares} GPUs" if setup.cp == 1 else f"{shares} groups of {setup.cp} GPUs"
    return (
        f"global_batch_size {global_batch_size} is no multiple of {whose}, each of which takes at least one "
        f"sequence; {near} would be"
    )


def _why_shared(smaller: list[int], dealt: list[int], plans: list[RunPlan]) -> str:
    """Why more ranks share a row than the ``smaller`` numbers of them."""
    if not smaller:
        return ""
    if plans:
        return "parts of rows need less recomputation"
    if smaller[-1] not in dealt:
        return "there are too few sequences for smaller groups"
    return "nothing fits with fewer"


def _plans_of_groups(
    config: Any,
    setup: Setup,
    options: dict[str, Any],
    global_batch_size: int,
    budget: int,
    why: str,
    faster_than: float,
) -> list[RunPlan]:
    """The plans that fit with one number of ranks to a row, if they could take fewer seconds than that."""
    plans: list[RunPlan] = []
    share = global_batch_size * setup.cp // setup.num_gpus
    for micro in _micro_batch_sizes(share, options.get("micro_batch_size")):
        tried = replace(setup, micro_batch_size=micro, grad_accum_steps=share // micro)
        if "cp" not in options and not _worth_sharing(config, tried, options, faster_than):
            continue
        found = list(_fitting(config, tried, options, budget, why))
        if not found:
            break  # a larger micro-batch needs more
        plans += found
    return plans


def _micro_batch_sizes(share: int, fixed: int | None) -> list[int]:
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    if fixed is None:
        return sizes
    if fixed not in sizes:
        raise ValueError(f"micro_batch_size {fixed} does not divide the {share} sequences of each rank")
    return [fixed]


def _worth_sharing(config: Any, setup: Setup, options: dict[str, Any], faster_than: float) -> bool:
    """Whether a plan could be better than any in which fewer ranks share a row."""
    if setup.cp == 1:
        return True
    if math.gcd(setup.micro_batch_size, setup.cp) > 1 and "micro_batch_size" not in options:
        return False  # smaller groups have the same tokens for less memory, and exchange less
    fastest = replace(setup, sac_ratio=Fraction(0), sac_blocks=None, reshard_after_forward=False)
    seconds = step_time(config, build_skeleton(config, setup), fastest, exchanging=False).total
    return seconds < faster_than


def _fitting(config: Any, setup: Setup, options: dict[str, Any], budget: int, why: str) -> Iterator[RunPlan]:
    """For each placement and resharding, the plan with the smallest ratio that fits."""
    reshard = (setup.reshard_after_forward,) if "reshard_after_forward" in options else (True, False)
    for keeps in reshard:
        chosen = replace(setup, reshard_after_forward=keeps)
        plain = list(least_checkpointed(config, chosen, options, budget))
        ways = plain + list(_offloaded(config, chosen, options, budget, plain))
        for tried, memory in ways:
            yield _plan(config, tried, memory, why)


def _offloaded(
    config: Any, setup: Setup, options: dict[str, Any], budget: int, plain: list[tuple[Setup, MemoryEstimate]]
) -> Iterator[tuple[Setup, MemoryEstimate]]:
    """The ways that fit with fewer checkpointed blocks if what these keep waits on the host."""
    least = min((parse_ratio(way.sac_ratio) for way, _ in plain), default=Fraction(2))
    if least == 0 or "sac_offload" in options or setup.gpu.name == "cpu":
        return
    for way, memory in least_checkpointed(config, replace(setup, sac_offload=True), options, budget):
        if parse_ratio(way.sac_ratio) < least:
            yield way, memory


def least_checkpointed(
    config: Any, setup: Setup, options: dict[str, Any], budget: int
) -> Iterator[tuple[Setup, MemoryEstimate]]:
    """For each placement that could be chosen, the smallest ratio that fits, if any."""
    ratios = (parse_ratio(options["sac_ratio"]),) if "sac_ratio" in options else RATIOS
    if setup.sac_blocks is not None:
        ratios = (Fraction(0),)
    placements: tuple[Placement, ...] = ("even", "prefix")
    if "sac_placement" in options or setup.sac_blocks is not None:
        placements = (setup.sac_placement,)
    for placement in placements:
        chosen = replace(setup, sac_placement=placement)
        ratio, memory = _first_that_fits(config, chosen, ratios, budget)
        if memory is not None:
            yield replace(chosen, sac_ratio=ratio), memory
        if ratio in (0, 1):
            break  # no block, or every block: there is no placement to choose


def _first_that_fits(
    config: Any, setup: Setup, ratios: tuple[Fraction, ...], budget: int
) -> tuple[Fraction, MemoryEstimate | None]:
    """The first of ascending ratios that fits, by bisection, and else the last; None if that does not."""
    found: tuple[Fraction, MemoryEstimate | None] = (ratios[-1], None)
    low, high, looked_at = 0, len(ratios) - 1, 0  # a run often fits as it is, or not at all
    while low <= high:
        memory = estimate(config, replace(setup, sac_ratio=ratios[looked_at]))
        if memory.peak_bytes <= budget:
            found, high = (ratios[looked_at], memory), looked_at - 1
        elif looked_at == len(ratios) - 1:
            return found
        else:
            low = looked_at + 1
        looked_at = len(ratios) - 1 if low == 1 and high == len(ratios) - 1 else (low + high) // 2
    return found


def _plan(config: Any, setup: Setup, memory: MemoryEstimate, why: str) -> RunPlan:
    time = step_time(config, build_skeleton(config, setup), setup)
    ratio = parse_ratio(setup.sac_ratio)
    return RunPlan(
        num_gpus=setup.num_gpus,
        cp=setup.cp,
        micro_batch_size=setup.micro_batch_size,
        grad_accum_steps=setup.grad_accum_steps,
        sac_ratio=ratio,
        sac_placement=setup.sac_placement,
        sac_offload=setup.sac_offload,
        reshard_after_forward=setup.reshard_after_forward,
        estimate=memory,
        time=time,
        relative_speed=1.0,
        reasons=tuple(_reasons(setup, ratio, time, why, memory.host_bytes)),
    )


def _reasons(setup: Setup, ratio: Fraction, time: StepTime, why: str, host_bytes: int) -> Iterator[str]:
    compute, communication = f"compute {time.compute:.2f} s", f"communication {time.communication:.2f} s"
    if time.compute >= time.communication:
        yield f"bound by compute (a micro-step: {compute}, which hides {communication})"
    else:
        yield f"bound by communication (a micro-step: {communication}, which hides {compute})"
    if ratio:
        hidden = time.compute <= time.communication
        cost = (
            "hidden behind communication" if hidden else f"{time.recompute / time.compute:.0%} of the compute"
        )
        yield f"recomputation is {cost}"
    if host_bytes:
        yield (
            f"what checkpointed blocks keep waits in {host_bytes / _GIB:.1f} GiB of host memory per GPU: "
            f"copies take {time.offload:.2f} s of a micro-step, beside the compute"
        )
    if setup.cp > 1:
        because = f", since {why}" if why else ""
        yield f"{setup.cp} GPUs share each row{because}: exchanges take {time.exchange:.2f} s of a micro-step"
    if not setup.reshard_after_forward:
        yield "blocks stay gathered: one all-gather less"


def _least_by_group(config: Any, setup: Setup, sizes: list[int]) -> Iterator[MemoryEstimate]:
    return (estimate(config, replace(setup, cp=cp)) for cp in sizes)


def _what_would_fit(
    config: Any, setup: Setup, options: dict[str, Any], gpu_memory_bytes: int, global_batch_size: int
) -> str:
    smallest = replace(
        setup,
        micro_batch_size=1,
        sac_ratio=Fraction(1),
        sac_placement="prefix",
        sac_blocks=None,
        reshard_after_forward=True,
        grad_accum_steps=max(1, global_batch_size * setup.cp // setup.num_gpus),
    )
    least, cp = min(
        (
            (estimate(config, replace(smallest, sac_ratio=ratio, cp=cp)), cp)
            for cp in group_sizes(config, setup, options)
            for ratio in (Fraction(0), Fraction(1))
        ),
        key=lambda found: found[0].peak_bytes,
    )
    largest = max(least.breakdown, key=lambda part: least.breakdown[part])
    have, need = f"{gpu_memory_bytes / _GIB:.1f} GiB", f"{least.peak_bytes / _GIB:.1f} GiB"
    shared = f", {cp} GPUs to a row" if cp > 1 else ""
    lines = [
        f"nothing fits on {setup.num_gpus} x {have}, of which {USABLE:.0%} is usable: the leanest way "
        f"(micro-batch 1, every block checkpointed{shared}) needs {need} in its {least.peak_phase} phase, "
        f"most of it {largest}.",
        "What would fit:",
    ]
    ways = list(_ways_out(config, smallest, options, gpu_memory_bytes))
    ways.append(f"GPUs of {least.peak_bytes / USABLE / _GIB:.1f} GiB")
    return "\n".join([*lines, *(f"- {way}" for way in ways)])


def _ways_out(config: Any, setup: Setup, options: dict[str, Any], gpu_memory_bytes: int) -> Iterator[str]:
    budget = gpu_memory_bytes * USABLE

    def fits(**changes: Any) -> bool:
        tried = replace(setup, **changes)
        sizes = group_sizes(config, tried, options)
        return any(memory.peak_bytes <= budget for memory in _least_by_group(config, tried, sizes))

    num_gpus = setup.num_gpus
    while num_gpus < _LARGEST_SEARCH:
        num_gpus *= 2
        if fits(num_gpus=num_gpus):
            yield f"{num_gpus} GPUs of this kind"
            break
    if setup.loss_impl != "chunked" and fits(loss_impl="chunked"):
        yield "loss_impl='chunked'"
    if setup.optimizer != "adamw8bit" and fits(optimizer="adamw8bit"):
        yield "optimizer='adamw8bit'"
    if not setup.sac_offload and fits(sac_offload=True):
        yield "sac_offload=True"
    if not setup.cpu_offload and fits(cpu_offload=True):
        yield "cpu_offload=True (slow)"
    length = setup.seq_length // 2
    while length >= 128:
        if fits(seq_length=length):
            yield f"sequences of {length} tokens"
            break
        length //= 2
