"""Which of the ways to run a training fit, and which of them is fastest."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from fsdp_sft.errors import NoPlanError
from fsdp_sft.planner.estimate import MemoryEstimate, check_options, estimate
from fsdp_sft.planner.model import as_config, build_skeleton
from fsdp_sft.planner.setup import Setup
from fsdp_sft.planner.speed import StepTime, step_time
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
        micro_batch_size: Sequences per rank and forward.
        grad_accum_steps: Micro-batches per optimizer step.
        sac_ratio: Fraction of checkpointed blocks, the smallest of a fixed list that fits.
        sac_placement: Which blocks those are.
        reshard_after_forward: Whether blocks are freed between forward and backward.
        estimate: Memory per GPU.
        time: Predicted seconds of an optimizer step, by part: good for ranking.
        relative_speed: 1.0 for the fastest plan of a list.
        reasons: Why it is as fast as it is.
    """

    num_gpus: int
    micro_batch_size: int
    grad_accum_steps: int
    sac_ratio: Fraction
    sac_placement: Placement
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
    listed.

    Args:
        config: As for ``estimate_memory``.
        num_gpus: Ranks.
        gpu_memory_bytes: Of one device; a plan may use 90 % of it.
        seq_length: Tokens per sequence.
        global_batch_size: Sequences per optimizer step over all ranks; a multiple of ``num_gpus``.
        **estimate_options: Further arguments of ``estimate_memory``. Those that would be searched
            (``micro_batch_size``, ``sac_ratio``, ``sac_placement``, ``reshard_after_forward``) are then
            fixed.

    Returns:
        At least one plan.

    Raises:
        NoPlanError: If nothing fits; the message says what would.
        TypeError: For an option that ``estimate_memory`` does not have.
        ValueError: For an argument out of range.
    """
    _check_batch(num_gpus, global_batch_size, gpu_memory_bytes)
    if "grad_accum_steps" in estimate_options:
        raise TypeError(
            "plan_run finds grad_accum_steps from the global batch; give micro_batch_size to fix it"
        )
    config = as_config(config)
    fixed = dict(estimate_options)
    first = check_options(
        num_gpus=num_gpus, seq_length=seq_length, micro_batch_size=fixed.pop("micro_batch_size", 1), **fixed
    )
    budget = int(gpu_memory_bytes * USABLE)
    plans = []
    for micro in _micro_batch_sizes(global_batch_size // num_gpus, estimate_options.get("micro_batch_size")):
        steps = global_batch_size // num_gpus // micro
        setup = replace(first, micro_batch_size=micro, grad_accum_steps=steps)
        found = list(_fitting(config, setup, estimate_options, budget))
        if not found:
            break  # a larger micro-batch needs more
        plans += found
    if not plans:
        raise NoPlanError(_what_would_fit(config, first, gpu_memory_bytes, global_batch_size))
    plans.sort(key=lambda plan: (plan.time.total, plan.peak_bytes, plan.sac_placement))
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
    num_gpus = options.get("dp_replicate", 1)
    while num_gpus <= _LARGEST_SEARCH:
        setup = check_options(num_gpus=num_gpus, micro_batch_size=1, seq_length=seq_length, **options)
        if estimate(known, setup).peak_bytes <= gpu_memory_bytes * USABLE:
            return int(num_gpus)
        num_gpus *= 2
    return None


def _check_batch(num_gpus: int, global_batch_size: int, gpu_memory_bytes: int) -> None:
    for name, value in (("num_gpus", num_gpus), ("global_batch_size", global_batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    if isinstance(gpu_memory_bytes, bool) or not 0 < gpu_memory_bytes < math.inf:
        raise ValueError(f"gpu_memory_bytes must be positive and finite, got {gpu_memory_bytes!r}")
    if global_batch_size % num_gpus:
        near = max(1, round(global_batch_size / num_gpus)) * num_gpus
        raise ValueError(
            f"global_batch_size {global_batch_size} is no multiple of {num_gpus} GPUs, each of which takes "
            f"at least one sequence; {near} would be"
        )


def _micro_batch_sizes(share: int, fixed: int | None) -> list[int]:
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    if fixed is None:
        return sizes
    if fixed not in sizes:
        raise ValueError(f"micro_batch_size {fixed} does not divide the {share} sequences of each rank")
    return [fixed]


def _fitting(config: Any, setup: Setup, options: dict[str, Any], budget: int) -> Iterator[RunPlan]:
    """For each placement and resharding, the plan with the smallest ratio that fits."""
    ratios = (parse_ratio(options["sac_ratio"]),) if "sac_ratio" in options else RATIOS
    if setup.sac_blocks is not None:
        ratios = (Fraction(0),)
    placements: tuple[Placement, ...] = ("even", "prefix")
    if "sac_placement" in options or setup.sac_blocks is not None:
        placements = (setup.sac_placement,)
    reshard = (setup.reshard_after_forward,) if "reshard_after_forward" in options else (True, False)
    for keeps in reshard:
        for placement in placements:
            for ratio in ratios:
                tried = replace(setup, sac_ratio=ratio, sac_placement=placement, reshard_after_forward=keeps)
                memory = estimate(config, tried)
                if memory.peak_bytes <= budget:
                    yield _plan(config, tried, ratio, memory)
                    break
            if ratio in (0, 1):
                break  # no block, or every block: there is no placement to choose


def _plan(config: Any, setup: Setup, ratio: Fraction, memory: MemoryEstimate) -> RunPlan:
    time = step_time(config, build_skeleton(config, setup), setup)
    return RunPlan(
        num_gpus=setup.num_gpus,
        micro_batch_size=setup.micro_batch_size,
        grad_accum_steps=setup.grad_accum_steps,
        sac_ratio=ratio,
        sac_placement=setup.sac_placement,
        reshard_after_forward=setup.reshard_after_forward,
        estimate=memory,
        time=time,
        relative_speed=1.0,
        reasons=tuple(_reasons(setup, ratio, time)),
    )


def _reasons(setup: Setup, ratio: Fraction, time: StepTime) -> Iterator[str]:
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
    if not setup.reshard_after_forward:
        yield "blocks stay gathered: one all-gather less"


def _what_would_fit(config: Any, setup: Setup, gpu_memory_bytes: int, global_batch_size: int) -> str:
    smallest = replace(
        setup,
        micro_batch_size=1,
        sac_ratio=Fraction(1),
        sac_placement="prefix",
        sac_blocks=None,
        reshard_after_forward=True,
        grad_accum_steps=global_batch_size // setup.num_gpus,
    )
    least = min(
        (estimate(config, replace(smallest, sac_ratio=ratio)) for ratio in (Fraction(0), Fraction(1))),
        key=lambda found: found.peak_bytes,
    )
    largest = max(least.breakdown, key=lambda part: least.breakdown[part])
    have, need = f"{gpu_memory_bytes / _GIB:.1f} GiB", f"{least.peak_bytes / _GIB:.1f} GiB"
    lines = [
        f"nothing fits on {setup.num_gpus} x {have}, of which {USABLE:.0%} is usable: the leanest way "
        f"(micro-batch 1, every block checkpointed) needs {need} in its {least.peak_phase} phase, most of it "
        f"{largest}.",
        "What would fit:",
    ]
    ways = list(_ways_out(config, smallest, gpu_memory_bytes))
    ways.append(f"GPUs of {least.peak_bytes / USABLE / _GIB:.1f} GiB")
    return "\n".join([*lines, *(f"- {way}" for way in ways)])


def _ways_out(config: Any, setup: Setup, gpu_memory_bytes: int) -> Iterator[str]:
    budget = gpu_memory_bytes * USABLE

    def fits(**changes: Any) -> bool:
        return estimate(config, replace(setup, **changes)).peak_bytes <= budget

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
    if not setup.cpu_offload and fits(cpu_offload=True):
        yield "cpu_offload=True (slow)"
    length = setup.seq_length // 2
    while length >= 128:
        if fits(seq_length=length):
            yield f"sequences of {length} tokens"
            break
        length //= 2
