"""Search for the ways to train that fit into memory, and for the fastest of them."""

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

import torch

from fsdp_sft._compat.attention import attention_of
from fsdp_sft._process.gpus import GIB
from fsdp_sft.errors import NoPlanError, UnsupportedModelError
from fsdp_sft.planner.estimate import MemoryEstimate, budget_of, estimate, fits
from fsdp_sft.planner.model import Skeleton, build_skeleton
from fsdp_sft.planner.plan import TIGHT, RunPlan
from fsdp_sft.planner.run import Run, check_integer
from fsdp_sft.planner.speed import step_time

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

RATIOS = tuple(Fraction(n, 24) for n in (0, 3, 4, 6, 8, 9, 12, 15, 16, 18, 20, 21, 24))
_WORTH_A_LOOK = 0.01  # share of a step: what could save less is not tried
# What takes less memory, by its options on the command line, the cheapest first.
_LEANER: dict[str, dict[str, Any]] = {
    "--sac 1": {"sac_ratio": 1},
    "--micro-batch 1": {"micro_batch_size": 1},
    "--loss chunked": {"loss_impl": "chunked"},
    "--no-padding": {"attention_mask": False},
    "--cp 8": {"cp": 8},
    "--lora 16": {"lora_rank": 16},
    "--lora 16 --frozen-dtype stored": {"lora_rank": 16, "frozen_dtype": "stored"},
    "--lora 16 --frozen-dtype nf4": {"lora_rank": 16, "frozen_dtype": "nf4"},
}


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
      smallest checkpointing ratio that fits;
    - blocks that stay gathered after the forward, where that saves communication which computation does not
      hide;
    - fused AdamW, where the update decides what fits and no ``optimizer`` is given.

    All else is as it is given: compare the first plans of a few.

    A plan that is neither faster nor leaner than another one is left out.

    Args:
        config: The config, as for ``estimate_memory``.
        num_gpus: Number of ranks.
        gpu_memory_bytes: Memory of one device as ``nvidia-smi`` reports it; None takes that of the usual
            model. What the driver, the CUDA context, NCCL and fragmentation take is subtracted.
        seq_length: Tokens per sequence.
        global_batch_size: Sequences per optimizer step over all ranks; a multiple of ``num_gpus // cp``.
        **estimate_options: Further fields of ``Run``. Those that would be searched (``micro_batch_size``,
            ``sac_ratio``, ``reshard_after_forward``) are then fixed.

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
    given = {"micro_batch_size": 1, "compile": True, **estimate_options}
    if given.get("loss_impl") == "logits":
        given = {"logits_dtype": torch.float32, **given}  # as prepare_loss(impl="logits") of a plan's code
    first = Run(num_gpus=num_gpus, seq_length=seq_length, **given)
    shares = first.data_ranks
    if global_batch_size % shares:
        near = max(1, round(global_batch_size / shares)) * shares
        whose = f"groups of {num_gpus // shares} GPUs" if first.shares_rows else "GPUs"
        raise ValueError(
            f"global_batch_size {global_batch_size} is no multiple of {shares} {whose}, each of which takes "
            f"at least one sequence; {near} would be"
        )
    share = global_batch_size // shares
    if "micro_batch_size" in estimate_options and share % first.micro_batch_size:
        raise ValueError(
            f"micro_batch_size {first.micro_batch_size} does not divide the {share} sequences of each rank"
        )
    usable = budget_of(first.device, num_gpus, gpu_memory_bytes).usable_bytes
    skeleton = build_skeleton(config, first)
    first = skeleton.run_of_code(first)
    found = _fitting(skeleton, first, estimate_options, share, usable)
    fused = _fused(first, estimate_options)
    if fused != first and (not found or min(found, key=_seconds).estimate.peak_phase == "optimizer"):
        found += _fitting(skeleton, fused, estimate_options, share, usable)
    roomy = _undominated([plan for plan in found if not plan.is_tight])
    fastest = min(map(_seconds, roomy), default=math.inf) * (1 - _WORTH_A_LOOK)
    plans = roomy + _undominated([plan for plan in found if plan.is_tight and _seconds(plan) < fastest])
    if not plans:
        raise NoPlanError(_what_would_fit(skeleton, first, estimate_options, share, gpu_memory_bytes))
    return [replace(plan, relative_speed=_seconds(plans[0]) / _seconds(plan)) for plan in plans]


def _seconds(plan: RunPlan) -> float:
    """Predicted seconds of a step."""
    return plan.time.total


def _undominated(plans: list[RunPlan]) -> list[RunPlan]:
    """The plans by speed, without those that need no less memory than a faster one."""
    least, kept = math.inf, []
    for plan in sorted(plans, key=lambda one: (one.time.total, one.peak_bytes)):
        if plan.peak_bytes < least:
            least = plan.peak_bytes
            kept.append(plan)
    return kept


def _fitting(skeleton: Skeleton, run: Run, given: dict[str, Any], share: int, usable: int) -> list[RunPlan]:
    """The plans with the least recomputation that fit, from the smallest micro-batch up.

    Args:
        skeleton: The model.
        run: The run, of whose fields those that are not given are searched.
        given: Fields of ``Run`` that are not searched.
        share: Sequences of a rank (or of a group that shares rows) in each step.
        usable: Bytes that tensors can have.
    """
    found = list[RunPlan]()
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    for micro in sizes if "micro_batch_size" not in given else [run.micro_batch_size]:
        sized = replace(run, micro_batch_size=micro, grad_accum_steps=share // micro)
        plans = list(_least_checkpointed(skeleton, sized, given, usable))
        if not plans:
            break  # a larger micro-batch needs more
        found += plans
        # Blocks that stay gathered take more memory, so they recompute no less. If they are not faster even
        # with that little recomputation, they are not worth a search.
        gathered = replace(plans[-1].run, reshard_after_forward=False)
        roomy = (_seconds(plan) for plan in found if not plan.is_tight)
        fastest = min(roomy, default=math.inf) * (1 - _WORTH_A_LOOK)
        if "reshard_after_forward" not in given and step_time(skeleton, gathered).total < fastest:
            found += _least_checkpointed(skeleton, gathered, given, usable)
    return found


def _least_checkpointed(
    skeleton: Skeleton, run: Run, given: dict[str, Any], usable: int
) -> Iterator[RunPlan]:
    """The plan with the smallest ratio that fits with a margin, and the one that fits without."""
    ratios = RATIOS if "sac_ratio" not in given else (cast("Fraction", run.sac_ratio),)

    def memory(ratio: Fraction) -> MemoryEstimate:
        return estimate(skeleton, replace(run, sac_ratio=ratio))

    for limit in (usable * (1 - TIGHT), usable):
        if memory(ratios[-1]).peak_bytes <= limit:
            ratio = next(ratio for ratio in ratios if memory(ratio).peak_bytes <= limit)
            chosen = replace(run, sac_ratio=ratio)
            yield RunPlan(
                chosen,
                memory(ratio),
                step_time(skeleton, chosen),
                usable,
                attention=attention_of(skeleton.model),
            )


# --- what fits at all -------------------------------------------------------------------------------------


def _fused(run: Run, given: dict[str, Any]) -> Run:
    """The run with fused AdamW, which makes no copies, unless an optimizer was asked for."""
    return run if "optimizer" in given or run.device.name == "cpu" else replace(run, optimizer="adamw_fused")


def _what_would_fit(
    skeleton: Skeleton, run: Run, given: dict[str, Any], share: int, memory_bytes: int | None
) -> str:
    """Say what the leanest run needs, the fewest GPUs that hold it, and what takes less."""
    lean = replace(
        _fused(run, given),
        sac_ratio=given.get("sac_ratio", 1),
        grad_accum_steps=share // run.micro_batch_size,
    )
    least = estimate(skeleton, lean)
    budget = budget_of(run.device, run.num_gpus, memory_bytes)
    largest = max(least.breakdown, key=lambda part: least.breakdown[part])
    counts = (run.dp_replicate * run.exchange_ranks << doublings for doublings in range(13))
    fewest = next((n for n in counts if fits(skeleton, replace(lean, num_gpus=n), memory_bytes)), None)
    leaner: list[str] = []
    for option, changes in _LEANER.items():
        with contextlib.suppress(UnsupportedModelError, ValueError):  # the model may not allow it
            other = replace(lean, **changes)
            of_group = share * run.data_ranks // other.data_ranks
            other = replace(other, grad_accum_steps=of_group // other.micro_batch_size)
            # A base is not rounded where adapters on another fit.
            if "--lora 16" not in " ".join(leaner) and fits(
                build_skeleton(skeleton.config, other), other, memory_bytes
            ):
                leaner.append(
                    ", ".join(f"{name}={value!r}" for name, value in changes.items()) + f" ({option})"
                )
    if fewest is not None:
        leaner.append(
            f"num_gpus={fewest} (--gpus {fewest})"
            + f", with a global batch that {fewest} divides" * bool(share * run.num_gpus % fewest)
        )
    checkpointed = "every block" if lean.sac_ratio == 1 else f"{lean.sac_ratio} of the blocks"
    leaner.append(f"GPUs with {least.peak_bytes / GIB:.1f} GiB for tensors")
    return (
        f"nothing fits on {run.num_gpus} x {budget.memory_bytes / GIB:.1f} GiB, {budget}: the leanest way "
        f"(micro-batch {lean.micro_batch_size}, {checkpointed} checkpointed, {lean.optimizer}) needs "
        f"{least.peak_bytes / GIB:.1f} GiB in its {least.peak_phase} phase, most of it {largest}.\n"
        f"What would fit: {'; '.join(leaner)}."
    )
