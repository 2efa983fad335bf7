"""``fsdp-sft plan``: what fits on the GPUs at hand, how fast it is, and where its memory goes."""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fsdp_sft._process.gpus import GB, GIB, GPUS, Gpu, gpu_named
from fsdp_sft.errors import NoPlanError, UnsupportedModelError
from fsdp_sft.planner.budget import Budget, budget_of
from fsdp_sft.planner.estimate import MemoryEstimate
from fsdp_sft.planner.model import as_config
from fsdp_sft.planner.picture import aligned, bars, draw, plan_table
from fsdp_sft.planner.plan import RunPlan
from fsdp_sft.planner.program import write_program
from fsdp_sft.planner.search import plan_run, smallest_num_gpus

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run(args: argparse.Namespace) -> int:
    """Print plans.

    Returns:
        The exit code: 0 if something fits, 1 if nothing does, 2 for bad input.
    """
    if args.list_gpus:
        print(_gpu_table())
        return 0
    needed = ("model", "gpus", "gpu", "seq", "global_batch")
    missing = [f"--{name.replace('_', '-')}" for name in needed if getattr(args, name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given, or --list-gpus")
    gpu = gpu_named(args.gpu)
    try:
        _report_plans(args, gpu, budget_of(gpu, args.gpus))
    except NoPlanError as error:
        if not args.json:
            raise
        print(json.dumps({"plans": [], "error": str(error)}, indent=1))
        return 1
    return 0


def _gpu_table() -> str:
    """The known GPUs, one line each."""
    head = ("name", "GiB", "bf16 TFLOPs", "memory GB/s", "node GB/s", "network GB/s", "per node", "compared")
    rows = [
        (
            gpu.name,
            f"{gpu.memory_bytes / GIB:.1f}",
            f"{gpu.flops_per_second / 1e12:g}",
            *(f"{rate / GB:g}" for rate in (gpu.memory_bytes_per_second, gpu.node_bytes_per_second)),
            f"{gpu.bytes_per_second / GB:g}",
            str(gpu.gpus_per_node),
            "yes" if gpu.checked else "no",
        )
        for gpu in GPUS.values()
    ]
    return f"{aligned([head, *rows])}\ncompared: estimates were compared with measurements on it"


def _tokens(text: str | None) -> int | None:
    """A number of tokens, such as 300M or 1.5B; None if none is given."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise ValueError(f"--tokens takes a number such as 300M or 1.5B, got {text!r}")
    return int(float(found[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[found[2].upper()])


def _duration(tokens: int | None, plan: RunPlan) -> dict[str, float]:
    """Hours of a training of that many tokens, for the JSON output."""
    if tokens is None:
        return {}
    hours = tokens / (plan.tokens_per_second * plan.num_gpus) / 3600
    return {"tokens": tokens, "hours": hours, "gpu_hours": hours * plan.num_gpus}


_NAMES = {
    "global_batch_size": "--global-batch",
    "micro_batch_size": "--micro-batch",
    "seq_length": "--seq",
    "num_gpus": "--gpus",
    "dp_replicate": "--replicas",
    "sac_ratio": "--sac",
    "sac_placement": "--sac-placement",
    "sac_offload": "--offload",
    "reshard_after_forward": "--reshard",
    "grad_sync": "--grad-sync",
    "ep_size": "--ep",
    "lora_rank": "--lora",
    "frozen_dtype": "--frozen-dtype",
    "loss_impl": "--loss",
    "experts_impl": "--experts",
    "cp": "--cp",
}


@contextmanager
def in_options() -> Iterator[None]:
    """Errors name the command's own options in place of the arguments of Python."""
    try:
        yield
    except NoPlanError:
        raise
    except (ValueError, UnsupportedModelError) as error:
        message = re.sub(r"\b(" + "|".join(_NAMES) + r")\b", lambda found: _NAMES[found[1]], str(error))
        kind = UnsupportedModelError if isinstance(error, UnsupportedModelError) else ValueError
        raise kind(message) from error


def _links(gpu: Gpu, num_gpus: int) -> str:
    """The bandwidths that the seconds assume."""
    within = f"{gpu.node_bytes_per_second / GB:g} GB/s within a node of {gpu.gpus_per_node}"
    between = f", {gpu.bytes_per_second / GB:g} between nodes" if num_gpus > gpu.gpus_per_node else ""
    host = f"{gpu.host_bytes_per_second / GB:g} to the host"
    return f"Assumed links, each way and per GPU: {within}{between}, {host}."


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``Run`` that the command line gives; what it leaves open is searched."""
    options: dict[str, Any] = {
        "gpu": args.gpu,
        "attention_mask": not args.no_padding,
        "loss_impl": args.loss,
        "experts_impl": args.experts,
        "master_dtype": _DTYPES[args.masters],
        "cp": args.cp,
        "ep_size": args.ep,
        "dp_replicate": args.replicas,
        "sac_offload": args.offload,
        "cpu_offload": args.cpu_offload,
        "lora_rank": args.lora,
    }
    searched = {
        "frozen_dtype": _DTYPES.get(args.frozen_dtype, args.frozen_dtype),
        "optimizer": args.optimizer,
        "micro_batch_size": args.micro_batch,
        "grad_sync": args.grad_sync,
        "sac_ratio": args.sac,
        "sac_placement": args.sac_placement,
        "reshard_after_forward": args.reshard,
        "compile": args.compile,
    }
    return options | {name: value for name, value in searched.items() if value is not None}


def _report_plans(args: argparse.Namespace, gpu: Gpu, budget: Budget) -> None:
    """Print the plans, the memory and the code of the fastest one."""
    config, options, tokens = as_config(args.model), _options(args), _tokens(args.tokens)
    job = {"num_gpus": args.gpus, "seq_length": args.seq, "global_batch_size": args.global_batch}
    with in_options():
        plans = plan_run(config, **job, **options)
    best, shown = plans[0], plans[: args.plans]
    estimate = best.estimate
    if args.json:
        found = {**_job(args, gpu, budget, estimate), "plans": [plan.to_dict() for plan in shown]}
        found |= {"code": best.code(args.model), **_duration(tokens, best)}
        print(json.dumps(found, indent=1))
    else:
        print(_headline(args, config, estimate, budget))
        print(f"\n{plan_table(shown)}")
        if len(plans) > len(shown):
            print(f"... and {len(plans) - len(shown)} more (--plans {len(plans)})")
        print(f"\nPlan 1: {'; '.join(best.reasons)}.")
        print(f"Sharding: {estimate.sharding}.")
        print(_links(gpu, args.gpus))
        if tokens is not None:
            needed = _duration(tokens, best)
            print(
                f"{args.tokens} tokens take {needed['hours']:.3g} hours, {needed['gpu_hours']:.3g} GPU-hours."
            )
        for note in (*estimate.notes, *_notes_on_config(args, config)):
            print(f"Note: {note}.")
        print(f"\nMemory of plan 1 on each GPU at the peak, in the {estimate.peak_phase} phase:\n")
        print(bars(estimate, budget=budget))
        print(f"\nPlan 1 as code:\n\n{best.code(args.model)}")
        fewest = smallest_num_gpus(config, seq_length=args.seq, **options)
        if fewest is not None:
            print(f"\nFewest such GPUs (in powers of two) that hold this training at all: {fewest}.")
    if args.write:
        program = write_program(args.write, best, args.model, gpu)
        print(f"Program: {program}", file=sys.stderr if args.json else sys.stdout)
    if args.png:
        labelled = [(f"plan {i}: {_label(plan)}", plan.estimate) for i, plan in enumerate(shown, start=1)]
        target = draw(args.png, labelled, budget=budget, title=_title(args, config, estimate, budget))
        print(f"Picture: {target}", file=sys.stderr if args.json else sys.stdout)


def _job(args: argparse.Namespace, gpu: Gpu, budget: Budget, estimate: MemoryEstimate) -> dict[str, Any]:
    """What was asked, for the JSON output."""
    return {
        "model": args.model,
        "gpu": gpu.name,
        "num_gpus": args.gpus,
        "seq_length": args.seq,
        "global_batch_size": args.global_batch,
        "memory_bytes": budget.memory_bytes,
        "usable_bytes": budget.usable_bytes,
        "taken_bytes": dict(budget.taken),
        "parameters": estimate.parameters,
        "active_parameters": estimate.active_parameters,
        "sharding": str(estimate.sharding),
    }


def _notes_on_config(args: argparse.Namespace, config: Any) -> Iterator[str]:
    """Remarks on a config, and on rows as long as these."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(positions, int) and positions < args.seq:
        yield f"the config gives the model {positions} positions"


def _headline(args: argparse.Namespace, config: Any, estimate: MemoryEstimate, budget: Budget) -> str:
    """The model, its size and the job, in one line."""
    total, active = estimate.parameters, estimate.active_parameters
    size = f"{total / 1e9:.2f}B parameters" + (f" ({active / 1e9:.2f}B active)" if active != total else "")
    where = f"{args.gpus} x {args.gpu} ({budget.memory_bytes / GIB:.1f} GiB each)"
    batch = f"{args.global_batch} sequences of {args.seq} tokens a step"
    return f"{config.model_type}, {size}, on {where}, {batch}"


def _title(args: argparse.Namespace, config: Any, estimate: MemoryEstimate, budget: Budget) -> str:
    """What a picture shows, and of which model and job."""
    lora = f", LoRA of rank {args.lora}" if args.lora else ""
    name = Path(args.model).name
    return f"{name}{lora}: memory per GPU at the peak\n{_headline(args, config, estimate, budget)}"


def _label(plan: RunPlan) -> str:
    """A plan in a few words."""
    share = "all" if plan.sac_ratio == 1 else f"{plan.sac_ratio} ({plan.sac_placement})"
    offloaded = ", offloaded" if plan.sac_offload else ""
    parts = {
        f"micro batch {plan.micro_batch_size} x {plan.grad_accum_steps}": True,
        f"cp {plan.cp}": plan.cp > 1,
        f"ep {plan.ep_size}": plan.ep_size > 1,
        f"{plan.dp_replicate} replicas": plan.dp_replicate > 1,
        f"{share} checkpointed{offloaded}": plan.sac_ratio > 0,
        "reduced once": plan.grad_sync == "last" and plan.grad_accum_steps > 1,
        "kept gathered": not plan.reshard_after_forward,
    }
    return ", ".join(part for part, is_so in parts.items() if is_so)
