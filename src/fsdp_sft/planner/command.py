"""``fsdp-sft plan``: what fits on the GPUs at hand, how fast it is, and where its memory goes."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from fsdp_sft._process.gpus import GB, GIB, GPUS, Gpu
from fsdp_sft.errors import NoPlanError
from fsdp_sft.metrics.plot import new_figure, save_figure
from fsdp_sft.planner.estimate import Budget, MemoryEstimate, budget_of
from fsdp_sft.planner.model import as_config
from fsdp_sft.planner.plan import RunPlan
from fsdp_sft.planner.program import write_program
from fsdp_sft.planner.run import Run
from fsdp_sft.planner.search import plan_run, smallest_num_gpus


def run(args: argparse.Namespace) -> int:
    """Print plans.

    Returns:
        The exit code: 0 if something fits, 1 if nothing does, 2 for bad input.
    """
    if args.list_gpus:
        print(_gpu_table())
        return 0
    needed = {"model": "model", "num_gpus": "gpus", "gpu": "gpu", "seq_length": "seq"}
    needed["global_batch_size"] = "global-batch"
    missing = [f"--{option}" for name, option in needed.items() if getattr(args, name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given, or --list-gpus")
    try:
        _report(args)
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


def _links(gpu: Gpu, num_gpus: int) -> str:
    """The bandwidths that the seconds assume."""
    within = f"{gpu.node_bytes_per_second / GB:g} GB/s within a node of {gpu.gpus_per_node}"
    between = f", {gpu.bytes_per_second / GB:g} between nodes" if num_gpus > gpu.gpus_per_node else ""
    host = f"{gpu.host_bytes_per_second / GB:g} to the host"
    return f"Assumed links, each way and per GPU: {within}{between}, {host}."


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``Run`` that the command line gives; what it leaves open is searched, or as usual."""
    given = {field.name: getattr(args, field.name, None) for field in fields(Run)}
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return {name: dtypes.get(value, value) for name, value in given.items() if value is not None}


def _report(args: argparse.Namespace) -> None:
    """Print the plans, the memory and the code of the fastest one; draw them, and write it as a program."""
    config, given = as_config(args.model), _given(args)
    plans = plan_run(config, global_batch_size=args.global_batch_size, **given)
    best, shown = plans[0], plans[: args.plans]
    gpu = best.run.device
    budget = budget_of(gpu, args.num_gpus)
    headline = _headline(args, config, best.estimate, budget)
    hours = {}
    if args.tokens is not None:
        gpu_hours = args.tokens / best.tokens_per_second / 3600
        hours = {"tokens": args.tokens, "hours": gpu_hours / args.num_gpus, "gpu_hours": gpu_hours}
    if args.png:
        draw(args.png, shown, budget, f"{args.model}\n{headline}")
        print(f"Picture: {args.png}", file=sys.stderr)
    if args.write:
        print(f"Program: {write_program(args.write, best, args.model, gpu)}", file=sys.stderr)
    if args.json:
        found = {**_job(args, gpu, budget, best.estimate), "plans": [plan.to_dict() for plan in shown]}
        print(json.dumps(found | {"code": best.code(args.model), **hours}, indent=1))
        return
    print(headline)
    print(f"\n{plan_table(shown)}")
    if len(plans) > len(shown):
        print(f"... and {len(plans) - len(shown)} more (--plans {len(plans)})")
    print(f"\nPlan 1: {'; '.join(best.reasons)}.")
    print(_links(gpu, args.num_gpus))
    if hours:
        print(
            f"{hours['tokens']:,} tokens take {hours['hours']:.3g} hours, {hours['gpu_hours']:.3g} GPU-hours."
        )
    for note in _notes(config, best):
        print(f"Note: {note}.")
    print(f"\nMemory of plan 1 on each GPU at the peak, in the {best.estimate.peak_phase} phase:\n")
    print(f"{best.estimate}  of {budget}")
    print(f"\nPlan 1 as code:\n\n{best.code(args.model)}")
    del given["num_gpus"]
    fewest = smallest_num_gpus(config, **given)
    if fewest is not None:
        print(f"\nFewest such GPUs (in powers of two) that hold this training at all: {fewest}.")


def _notes(config: Any, plan: RunPlan) -> Iterator[str]:
    """Caveats of a plan."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(positions, int) and positions < plan.run.seq_length:
        yield f"the config gives the model {positions} positions"
    yield from plan.estimate.notes


def _job(args: argparse.Namespace, gpu: Gpu, budget: Budget, estimate: MemoryEstimate) -> dict[str, Any]:
    """What was asked, for the JSON output."""
    return {
        "model": args.model,
        "gpu": gpu.name,
        "num_gpus": args.num_gpus,
        "seq_length": args.seq_length,
        "global_batch_size": args.global_batch_size,
        "memory_bytes": budget.memory_bytes,
        "usable_bytes": budget.usable_bytes,
        "taken_bytes": dict(budget.taken),
        "parameters": estimate.parameters,
        "active_parameters": estimate.active_parameters,
    }


def _headline(args: argparse.Namespace, config: Any, estimate: MemoryEstimate, budget: Budget) -> str:
    """The model, its size and the job, in one line."""
    total, active = estimate.parameters, estimate.active_parameters
    size = f"{total / 1e9:.2f}B parameters" + (f" ({active / 1e9:.2f}B active)" if active != total else "")
    where = f"{args.num_gpus} x {args.gpu} ({budget.memory_bytes / GIB:.1f} GiB each)"
    batch = f"{args.global_batch_size} sequences of {args.seq_length} tokens a step"
    return f"{config.model_type}, {size}, on {where}, {batch}"


# --- the table and the picture ----------------------------------------------------------------------------


def plan_table(plans: Sequence[RunPlan]) -> str:
    """The plans as a table, one line each, without columns in which all have the usual value."""
    rows = [_row(index, plan) for index, plan in enumerate(plans, start=1)]
    usual = {"cp": "1", "ep": "1", "replicas": "1", "reduced": "each", "resharded": "yes"}
    usual["optimizer"] = rows[0]["optimizer"]
    names = [name for name in rows[0] if {row[name] for row in rows} != {usual.get(name)}]
    return aligned([tuple(names), *(tuple(row[name] for name in names) for row in rows)])


def _row(index: int, plan: RunPlan) -> dict[str, str]:
    """A plan's cells, by column."""
    run = plan.run
    share = {"0": "none", "1": "all"}.get(str(run.sac_ratio), f"{run.sac_ratio} {run.sac_placement}")
    return {
        "": f"{index}.",
        "cp": str(run.cp),
        "ep": str(run.ep_size),
        "replicas": str(run.dp_replicate),
        "micro batch": str(run.micro_batch_size),
        "x accum.": str(run.grad_accum_steps),
        "reduced": "once" if run.grad_sync == "last" and run.grad_accum_steps > 1 else "each",
        "checkpointed": share + (", offloaded" if run.sac_offload and run.sac_ratio else ""),
        "resharded": "yes" if run.reshard_after_forward else "no",
        "optimizer": run.optimizer,
        "GiB per GPU": f"{plan.peak_bytes / GIB:.1f}",
        "left": f"{plan.left_bytes / GIB:.1f}{' (tight)' if plan.is_tight else ''}",
        "peak in": plan.estimate.peak_phase,
        "step": f"{plan.time.total:.3g} s",
        "tokens/s per GPU": f"{plan.tokens_per_second:,.0f}",
        "bound by": plan.time.bound,
    }


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Rows of cells as lines with columns aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def draw(path: str, plans: Sequence[RunPlan], budget: Budget, title: str) -> None:
    """Draw each plan's memory as a stacked bar, to a PNG or what the suffix names.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    figure: Any = new_figure(9, 3 + 0.4 * len(plans))
    axes = figure.subplots()
    kinds = dict.fromkeys(kind for plan in plans for kind in plan.estimate.breakdown)
    left = [0.0] * len(plans)
    for index, kind in enumerate(kinds):
        sizes = [plan.estimate.breakdown.get(kind, 0) / GIB for plan in plans]
        axes.barh(
            range(len(plans)), sizes, left=left, label=kind, color=f"C{index % 10}", alpha=1 - index / 30
        )
        left = [so_far + size for so_far, size in zip(left, sizes, strict=True)]
    axes.axvline(budget.usable_bytes / GIB, color="black", linestyle="--", label="usable")
    axes.set_yticks(range(len(plans)), [_label(index, plan) for index, plan in enumerate(plans, start=1)])
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, Path(path))


def _label(index: int, plan: RunPlan) -> str:
    """A plan in a few words."""
    row = _row(index, plan)
    return f"{index}. {row['micro batch']} x {row['x accum.']}, {row['checkpointed']} checkpointed"
