"""Search for the ways to train that fit into memory, and for the fastest of them."""

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from fsdp_sft._process.words import answered
from fsdp_sft.errors import NoPlanError
from fsdp_sft.planner.advice import what_would_fit
from fsdp_sft.planner.budget import Budget, budget_of
from fsdp_sft.planner.estimate import MemoryEstimate, check_options, estimate
from fsdp_sft.planner.model import as_config, build_skeleton
from fsdp_sft.planner.plan import TIGHT, RunPlan, make_plan
from fsdp_sft.planner.run import RunKeywords
from fsdp_sft.planner.setup import GradSync, Setup, check_integer, with_leanest_update
from fsdp_sft.planner.speed import step_time
from fsdp_sft.sac import Placement

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RATIOS = tuple(Fraction(n, 24) for n in (0, 3, 4, 6, 8, 9, 12, 15, 16, 18, 20, 21, 24))

# Options that smallest_num_gpus sets itself and therefore drops from those it is given.
_FOUND_HERE = ("num_gpus", "seq_length", "micro_batch_size", "grad_accum_steps")
_LARGEST_SEARCH = 4096  # GPUs
_WORTH_A_LOOK = 0.01  # share of a step: what could save less is not tried


@answered
def plan_run(
    config: "PreTrainedConfig | str | os.PathLike[str]",
    *,
    num_gpus: int,
    gpu_memory_bytes: int | None = None,
    seq_length: int,
    global_batch_size: int,
    **estimate_options: Unpack[RunKeywords],
) -> list[RunPlan]:
    """Find the ways to train that fit into memory: those that leave 5 % of it, fastest first, then others.

    A plan that leaves less is ``is_tight``: an estimate is right to a few percent, so whether it fits is not
    sure. It is listed if it is faster than all that leave more, or if none does.

    What is tried:

    - every micro-batch size that divides a rank's share of the batch, with compiled blocks, each with the
      smallest checkpointing ratio that fits, in both placements;
    - where computation does not hide the network: blocks that stay gathered after the forward, and gradients
      that are reduced after the last micro-batch only;
    - fused AdamW, where the update decides what fits and no ``optimizer`` is given.

    Context parallelism (``cp``), expert parallelism (``ep_size``), replicas (``dp_replicate``) and offloading
    (``sac_offload``, ``cpu_offload``) are as they are given: compare the first plans of a few.

    A plan that is neither faster nor leaner than another one is left out.

    Args:
        config: The config, as for ``estimate_memory``.
        num_gpus: Number of ranks.
        gpu_memory_bytes: Memory of one device as ``nvidia-smi`` reports it; None takes that of the usual
            model. What the driver, the CUDA context, NCCL and fragmentation take is subtracted.
        seq_length: Tokens per sequence.
        global_batch_size: Sequences per optimizer step over all ranks; a multiple of ``num_gpus // cp``.
        **estimate_options: Further fields of ``Run``. Those that would be searched (``micro_batch_size``,
            ``sac_ratio``, ``sac_placement``, ``grad_sync``, ``reshard_after_forward``) are then fixed.

    Returns:
        At least one plan.

    Raises:
        NoPlanError: If nothing fits; the message says what would.
        TypeError: For an option that ``Run`` does not have.
        ValueError: For an argument out of range.

    Example:
        >>> plans = fs.plan_run(
        ...     config, num_gpus=2, gpu="4090", seq_length=2048, global_batch_size=8
        ... )
        >>> print(plans[0].code("my-model"))
        fs.init_distributed()
        mesh = fs.build_mesh()
        model = fs.load_pretrained('my-model', mesh=mesh, compile=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=...)
        loader = DataLoader(rows, 4, sampler=fs.ResumableSampler(rows), collate_fn=...)
        for window in fs.windows(loader, grad_accum_steps=1):
            fs.train_step(model, window, optimizer)
    """
    check_integer("global_batch_size", global_batch_size, 1)
    given: dict[str, Any] = dict(estimate_options)
    if "grad_accum_steps" in given:
        raise TypeError(
            "plan_run finds grad_accum_steps from the global batch; give micro_batch_size to fix it"
        )
    config = as_config(config)
    options = {"micro_batch_size": 1, "compile": True, **given}
    first = check_options(num_gpus=num_gpus, seq_length=seq_length, **options)
    if global_batch_size % (num_gpus // first.cp):
        raise ValueError(_no_multiple(first, global_batch_size))
    budget = budget_of(first.device, num_gpus, gpu_memory_bytes)
    search = _PlanSearch(config, given, global_batch_size, budget)
    roomy, tight = (_undominated(search.plans(first, share)) for share in (1 - TIGHT, Fraction(1)))
    plans = roomy + [plan for plan in tight if plan.is_tight and _is_faster(plan, roomy)]
    if not plans:
        raise NoPlanError(what_would_fit(config, first, given, budget, global_batch_size))
    return [replace(plan, relative_speed=plans[0].time.total / plan.time.total) for plan in plans]


def _is_faster(plan: RunPlan, others: list[RunPlan]) -> bool:
    """Whether a plan is faster than all others, so that it is worth its risk."""
    return all(plan.time.total < other.time.total * (1 - _WORTH_A_LOOK) for other in others)


def _undominated(plans: list[RunPlan]) -> list[RunPlan]:
    """The plans by speed, without those that need no less memory than a faster one."""
    least, kept = math.inf, []
    for plan in sorted(plans, key=lambda one: (one.time.total, one.peak_bytes, one.sac_placement)):
        if plan.peak_bytes < least:
            least = plan.peak_bytes
            kept.append(plan)
    return kept


def smallest_num_gpus(
    config: "PreTrainedConfig | str | os.PathLike[str]",
    *,
    gpu_memory_bytes: int | None = None,
    seq_length: int,
    **estimate_options: Unpack[RunKeywords],
) -> int | None:
    """Find the smallest power of two of GPUs on which a training fits at all.

    A micro-batch is one sequence, every block is checkpointed, and AdamW is fused unless ``optimizer`` is
    given.

    Args:
        config: The config, as for ``estimate_memory``.
        gpu_memory_bytes: Memory of one device, as for ``plan_run``.
        seq_length: Tokens per sequence.
        **estimate_options: Further fields of ``Run``.

    Returns:
        The number (a power of two times any ``dp_replicate``, ``cp`` and ``ep_size`` given), or None if none
        up to 4096 is enough.

    Example:
        >>> from transformers import Qwen2Config
        >>> config = Qwen2Config(
        ...     hidden_size=3584,
        ...     intermediate_size=18944,
        ...     num_hidden_layers=28,
        ...     num_attention_heads=28,
        ...     num_key_value_heads=4,
        ...     vocab_size=152064,
        ... )
        >>> fs.smallest_num_gpus(config, gpu="h100", seq_length=4096)
        2
    """
    options: dict[str, Any] = {
        name: value for name, value in estimate_options.items() if name not in _FOUND_HERE
    }
    if options.get("sac_blocks") is None:
        options = {"sac_ratio": 1, "sac_placement": "prefix", **options}
    known = as_config(config)
    num_gpus = options.get("dp_replicate", 1) * options.get("cp", 1) * options.get("ep_size", 1)
    while num_gpus <= _LARGEST_SEARCH:
        setup = check_options(num_gpus=num_gpus, micro_batch_size=1, seq_length=seq_length, **options)
        usable = budget_of(setup.device, num_gpus, gpu_memory_bytes).usable_bytes
        if estimate(known, with_leanest_update(setup, options)).peak_bytes <= usable:
            return int(num_gpus)
        num_gpus *= 2
    return None


def _no_multiple(setup: Setup, global_batch_size: int) -> str:
    """The message for a batch that cannot be dealt evenly."""
    shares = setup.num_gpus // setup.cp
    near = max(1, round(global_batch_size / shares)) * shares
    whose = f"{shares} GPUs" if setup.cp == 1 else f"{shares} groups of {setup.cp} GPUs"
    return (
        f"global_batch_size {global_batch_size} is no multiple of {whose}, each of which takes at least one "
        f"sequence; {near} would be"
    )


class _PlanSearch:
    """Finds the plans of one training."""

    def __init__(self, config: Any, options: dict[str, Any], global_batch_size: int, budget: Budget) -> None:
        self.config = config
        self.options = options
        self.global_batch_size = global_batch_size
        self.budget = budget
        self.usable = budget.usable_bytes  # what a plan may need
        self.fastest = math.inf  # seconds of the fastest plan so far

    def plans(self, first: Setup, share: Fraction) -> list[RunPlan]:
        """The plans that fit into a share of the usable memory.

        If the update alone decides what fits, and no optimizer was asked for, the fused one is tried as well.
        """
        self.usable, self.fastest = int(self.budget.usable_bytes * share), math.inf
        found = self._plans_of(first)
        could_help = (
            not found or min(found, key=lambda plan: plan.time.total).estimate.peak_phase == "optimizer"
        )
        leanest = with_leanest_update(first, self.options)
        if could_help and leanest != first:
            found += self._plans_of(leanest)
        return found

    def _plans_of(self, setup: Setup) -> list[RunPlan]:
        """The plans that fit, from the smallest micro-batch up."""
        plans: list[RunPlan] = []
        share = self.global_batch_size * setup.cp // setup.num_gpus
        for micro in _micro_batch_sizes(share, self.options.get("micro_batch_size")):
            found = list(
                self._fitting(replace(setup, micro_batch_size=micro, grad_accum_steps=share // micro))
            )
            if not found:
                break  # a larger micro-batch needs more
            plans += found
        return plans

    def _fitting(self, setup: Setup) -> Iterator[RunPlan]:
        """For each placement and each promising layout, the plan with the smallest ratio that fits."""
        plain = list(_least_checkpointed(self.config, setup, self.options, self.usable))
        for way, memory in plain:
            yield self._plan(way, memory)
        for layout in self._layouts(setup) if plain else ():
            least = min((way for way, _ in plain), key=lambda way: way.sac_ratio)
            # A layout that communicates less takes more memory, so it recomputes no less than the plain one.
            # If it is not faster even with that little recomputation, it is not worth a search.
            hoped = replace(layout, sac_ratio=least.sac_ratio, sac_placement=least.sac_placement)
            if self._seconds(hoped) < self.fastest * (1 - _WORTH_A_LOOK):
                for way, memory in _least_checkpointed(self.config, layout, self.options, self.usable):
                    yield self._plan(way, memory)

    def _seconds(self, setup: Setup) -> float:
        """Predicted seconds of an optimizer step."""
        return step_time(build_skeleton(self.config, setup), setup).total

    def _plan(self, setup: Setup, memory: MemoryEstimate) -> RunPlan:
        """The plan of a setup; the fastest one is remembered."""
        plan = make_plan(
            setup, memory, step_time(build_skeleton(self.config, setup), setup), self.budget.usable_bytes
        )
        self.fastest = min(self.fastest, plan.time.total)
        return plan

    def _layouts(self, setup: Setup) -> Iterator[Setup]:
        """Layouts of parameters and gradients that communicate less."""
        reshard = (setup.reshard_after_forward,) if "reshard_after_forward" in self.options else (True, False)
        syncs: tuple[GradSync, ...] = ("each", "last")
        if "grad_sync" in self.options or setup.grad_accum_steps == 1:
            syncs = (setup.grad_sync,)
        for frees, sync in itertools.product(reshard, syncs):
            layout = replace(setup, reshard_after_forward=frees, grad_sync=sync)
            if layout != setup:
                yield layout


def _micro_batch_sizes(share: int, fixed: int | None) -> list[int]:
    """The sizes that divide a rank's ``share`` of the batch, ascending; only ``fixed`` if it is given."""
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    if fixed is None:
        return sizes
    if fixed not in sizes:
        raise ValueError(f"micro_batch_size {fixed} does not divide the {share} sequences of each rank")
    return [fixed]


def _least_checkpointed(
    config: Any, setup: Setup, options: dict[str, Any], budget: int
) -> Iterator[tuple[Setup, MemoryEstimate]]:
    """For each placement that may be chosen, the setup with the smallest ratio that fits, if one does."""
    given = "sac_ratio" in options or setup.sac_blocks is not None
    ratios = (setup.sac_ratio,) if given else RATIOS
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
    """The first of ascending ratios that fits, with its estimate; (the last, None) if none does."""
    found: tuple[Fraction, MemoryEstimate | None] = (ratios[-1], None)
    # Bisection follows after the first and the last ratio: a run often fits as it is, or not at all.
    low, high, looked_at = 0, len(ratios) - 1, 0
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
