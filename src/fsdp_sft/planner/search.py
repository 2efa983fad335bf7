"""Search for the ways to train that fit into memory, and for the fastest of them."""

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

from fsdp_sft._process.gpus import GIB
from fsdp_sft._process.words import answered
from fsdp_sft.errors import NoPlanError, UnsupportedModelError
from fsdp_sft.planner.estimate import MemoryEstimate, budget_of, estimate
from fsdp_sft.planner.model import Skeleton, as_config, build_skeleton
from fsdp_sft.planner.plan import TIGHT, RunPlan
from fsdp_sft.planner.run import GradSync, Run, check_integer
from fsdp_sft.planner.speed import step_time
from fsdp_sft.sac import Placement

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RATIOS = tuple(Fraction(n, 24) for n in (0, 3, 4, 6, 8, 9, 12, 15, 16, 18, 20, 21, 24))
_LARGEST_SEARCH = 4096  # GPUs
_WORTH_A_LOOK = 0.01  # share of a step: what could save less is not tried
# What takes less memory, by its options on the command line, the cheapest first.
_LEANER: dict[str, dict[str, Any]] = {
    "--loss chunked": {"loss_impl": "chunked"},
    "--no-padding": {"attention_mask": False},
    "--cp 8": {"cp": 8},
    "--cpu-offload": {"cpu_offload": True},
    "--lora 16": {"lora_rank": 16},
    "--lora 16 --frozen-dtype stored": {"lora_rank": 16, "frozen_dtype": "stored"},
    "--lora 16 --frozen-dtype nf4": {"lora_rank": 16, "frozen_dtype": "nf4"},
}


@answered
def plan_run(
    config: "PreTrainedConfig | str | os.PathLike[str]",
    *,
    num_gpus: int,
    gpu_memory_bytes: int | None = None,
    seq_length: int,
    global_batch_size: int,
    **estimate_options: Any,
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
    if "grad_accum_steps" in estimate_options:
        raise TypeError(
            "plan_run finds grad_accum_steps from the global batch; give micro_batch_size to fix it"
        )
    config = as_config(config)
    given = {"micro_batch_size": 1, "compile": True, **estimate_options}
    first = Run(num_gpus=num_gpus, seq_length=seq_length, **given)
    shares = num_gpus // first.cp
    if global_batch_size % shares:
        near = max(1, round(global_batch_size / shares)) * shares
        whose = f"{shares} GPUs" if first.cp == 1 else f"{shares} groups of {first.cp} GPUs"
        raise ValueError(
            f"global_batch_size {global_batch_size} is no multiple of {whose}, each of which takes at least "
            f"one sequence; {near} would be"
        )
    usable = budget_of(first.device, num_gpus, gpu_memory_bytes).usable_bytes
    search = _PlanSearch(build_skeleton(config, first), estimate_options, global_batch_size // shares, usable)
    roomy, tight = (_undominated(search.plans(first, share)) for share in (1 - TIGHT, Fraction(1)))
    plans = roomy + [plan for plan in tight if plan.is_tight and _is_faster(plan, roomy)]
    if not plans:
        raise NoPlanError(
            _what_would_fit(
                config, replace(first, grad_accum_steps=search.share), estimate_options, gpu_memory_bytes
            )
        )
    return [replace(plan, relative_speed=plans[0].time.total / plan.time.total) for plan in plans]


def _is_faster(plan: RunPlan, others: list[RunPlan]) -> bool:
    """Whether a plan is faster than all others, so that it is worth its risk."""
    return all(plan.time.total < other.time.total * (1 - _WORTH_A_LOOK) for other in others)


def _undominated(plans: list[RunPlan]) -> list[RunPlan]:
    """The plans by speed, without those that need no less memory than a faster one."""
    least, kept = math.inf, []
    for plan in sorted(plans, key=lambda one: (one.time.total, one.peak_bytes, one.run.sac_placement)):
        if plan.peak_bytes < least:
            least = plan.peak_bytes
            kept.append(plan)
    return kept


# --- what fits at all -------------------------------------------------------------------------------------


@answered
def smallest_num_gpus(
    config: "PreTrainedConfig | str | os.PathLike[str]",
    *,
    gpu_memory_bytes: int | None = None,
    seq_length: int,
    **estimate_options: Any,
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
    config = as_config(config)
    least = math.prod(estimate_options.get(name, 1) for name in ("dp_replicate", "cp", "ep_size"))
    given = {"micro_batch_size": 1, **estimate_options}
    run = _leanest(Run(num_gpus=least, seq_length=seq_length, **given), estimate_options)
    while run.num_gpus <= _LARGEST_SEARCH:
        if _fits(config, run, gpu_memory_bytes):
            return run.num_gpus
        run = replace(run, num_gpus=2 * run.num_gpus)
    return None


def _leanest(run: Run, given: dict[str, Any]) -> Run:
    """The way to train that takes the least memory: what is given stays."""
    found = replace(_lean_update(run, given), micro_batch_size=1)
    if "sac_ratio" in given or run.sac_blocks is not None:
        return found
    return replace(found, sac_ratio=1, sac_placement="prefix")


def _lean_update(run: Run, given: dict[str, Any]) -> Run:
    """The run with fused AdamW, which makes no copies, unless an optimizer was asked for."""
    if "optimizer" in given or run.device.name == "cpu":
        return run
    return replace(run, optimizer="adamw_fused")


def _fits(config: Any, run: Run, memory_bytes: int | None) -> bool:
    usable = budget_of(run.device, run.num_gpus, memory_bytes).usable_bytes
    return estimate(build_skeleton(config, run), run).peak_bytes <= usable


def _what_would_fit(config: Any, run: Run, given: dict[str, Any], memory_bytes: int | None) -> str:
    """Say what the leanest run needs, the fewest GPUs that hold it, and what takes less."""
    lean = _leanest(run, given)
    least = estimate(build_skeleton(config, lean), lean)
    budget = budget_of(run.device, run.num_gpus, memory_bytes)
    largest = max(least.breakdown, key=lambda part: least.breakdown[part])
    fewest = smallest_num_gpus(config, gpu_memory_bytes=memory_bytes, seq_length=run.seq_length, **given)
    fused = ", fused AdamW" if lean.optimizer != run.optimizer else ""
    leaner: list[str] = []
    for option, changes in _LEANER.items():
        if leaner and "--lora 16" in leaner[-1]:
            break  # a base is not rounded where adapters on another fit
        try:
            if _fits(config, replace(lean, **changes), memory_bytes):
                leaner.append(option)
        except (UnsupportedModelError, ValueError):
            continue  # the model, or this number of GPUs, does not allow it
    if fewest is not None:
        leaner.append(f"{fewest} such GPUs (--gpus {fewest})")
    leaner.append(f"GPUs of {budget.needed_for(least.peak_bytes) / GIB:.1f} GiB")
    return (
        f"nothing fits on {run.num_gpus} x {budget.memory_bytes / GIB:.1f} GiB, {budget}: the leanest way "
        f"(micro-batch 1, every block checkpointed{fused}) needs {least.peak_bytes / GIB:.1f} GiB in its "
        f"{least.peak_phase} phase, most of it {largest}.\nWhat would fit: {'; '.join(leaner)}."
    )


# --- the search -------------------------------------------------------------------------------------------


class _PlanSearch:
    """Finds the plans of one training.

    Attributes:
        given: Fields of ``Run`` that are not searched.
        share: Sequences of a rank (or of a group that shares rows) in each step.
        usable_bytes: What tensors can have.
        budget: What a plan may need: a share of it.
        fastest: Seconds of the fastest plan so far.
    """

    def __init__(self, skeleton: Skeleton, given: dict[str, Any], share: int, usable_bytes: int) -> None:
        self.skeleton = skeleton
        self.given = given
        self.share = share
        self.usable_bytes = self.budget = usable_bytes
        self.fastest = math.inf

    def plans(self, first: Run, share: Fraction) -> list[RunPlan]:
        """The plans that fit into a share of the usable memory.

        If the update alone decides what fits, and no optimizer was asked for, the fused one is tried as well.
        """
        self.budget, self.fastest = int(self.usable_bytes * share), math.inf
        found = self._plans_of(first)
        could_help = (
            not found or min(found, key=lambda plan: plan.time.total).estimate.peak_phase == "optimizer"
        )
        lean = _lean_update(first, self.given)
        if could_help and lean != first:
            found += self._plans_of(lean)
        return found

    def _plans_of(self, run: Run) -> list[RunPlan]:
        """The plans that fit, from the smallest micro-batch up."""
        plans: list[RunPlan] = []
        for micro in self._micro_batch_sizes():
            sized = replace(run, micro_batch_size=micro, grad_accum_steps=self.share // micro)
            found = list(self._fitting(sized))
            if not found:
                break  # a larger micro-batch needs more
            plans += found
        return plans

    def _micro_batch_sizes(self) -> list[int]:
        """The sizes that divide a rank's share of the batch, ascending; if one is given, only that."""
        sizes = [size for size in range(1, self.share + 1) if self.share % size == 0]
        fixed = self.given.get("micro_batch_size")
        if fixed is None:
            return sizes
        if fixed not in sizes:
            raise ValueError(
                f"micro_batch_size {fixed} does not divide the {self.share} sequences of each rank"
            )
        return [fixed]

    def _fitting(self, run: Run) -> Iterator[RunPlan]:
        """For each placement and each promising layout, the plan with the smallest ratio that fits."""
        plain = list(self._least_checkpointed(run))
        yield from plain
        for layout in self._layouts(run) if plain else ():
            least = min((plan.run for plan in plain), key=lambda one: cast("Fraction", one.sac_ratio))
            # A layout that communicates less takes more memory, so it recomputes no less than the plain one.
            # If it is not faster even with that little recomputation, it is not worth a search.
            hoped = replace(layout, sac_ratio=least.sac_ratio, sac_placement=least.sac_placement)
            if step_time(self.skeleton, hoped).total < self.fastest * (1 - _WORTH_A_LOOK):
                yield from self._least_checkpointed(layout)

    def _layouts(self, run: Run) -> Iterator[Run]:
        """Layouts of parameters and gradients that communicate less."""
        reshard = (run.reshard_after_forward,) if "reshard_after_forward" in self.given else (True, False)
        is_fixed = "grad_sync" in self.given or run.grad_accum_steps == 1
        syncs: tuple[GradSync, ...] = (run.grad_sync,) if is_fixed else ("each", "last")
        for frees, sync in itertools.product(reshard, syncs):
            layout = replace(run, reshard_after_forward=frees, grad_sync=sync)
            if layout != run:
                yield layout

    def _least_checkpointed(self, run: Run) -> Iterator[RunPlan]:
        """For each placement that may be chosen, the plan with the smallest ratio that fits, if one does."""
        is_given = "sac_ratio" in self.given or run.sac_blocks is not None
        ratios = (cast("Fraction", run.sac_ratio),) if is_given else RATIOS
        keeps_placement = "sac_placement" in self.given or run.sac_blocks is not None
        placements: tuple[Placement, ...] = (run.sac_placement,) if keeps_placement else ("even", "prefix")
        for placement in placements:
            chosen = replace(run, sac_placement=placement)
            ratio, memory = self._first_that_fits(chosen, ratios)
            if memory is not None:
                chosen = replace(chosen, sac_ratio=ratio)
                plan = RunPlan(chosen, memory, step_time(self.skeleton, chosen), self.usable_bytes)
                self.fastest = min(self.fastest, plan.time.total)
                yield plan
            if ratio in (0, 1):
                break  # no block, or every block: there is no placement to choose

    def _first_that_fits(
        self, run: Run, ratios: tuple[Fraction, ...]
    ) -> tuple[Fraction, MemoryEstimate | None]:
        """The first of ascending ratios that fits, with its estimate; (the last, None) if none does."""
        for ratio in ratios if self._memory(run, ratios[-1]).peak_bytes <= self.budget else ():
            memory = self._memory(run, ratio)
            if memory.peak_bytes <= self.budget:
                return ratio, memory
        return ratios[-1], None

    def _memory(self, run: Run, ratio: Fraction) -> MemoryEstimate:
        return estimate(self.skeleton, replace(run, sac_ratio=ratio))
