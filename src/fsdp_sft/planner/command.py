"""``fsdp-sft plan``: what fits on the GPUs at hand, how fast it is, and where its memory goes."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from fsdp_sft._model.configs import config_of
from fsdp_sft._process.gpus import GB, GIB
from fsdp_sft.errors import NoPlanError
from fsdp_sft.planner.estimate import budget_of
from fsdp_sft.planner.plan import RunPlan
from fsdp_sft.planner.program import write_program
from fsdp_sft.planner.run import Run
from fsdp_sft.planner.search import plan_run


def run(args: argparse.Namespace) -> int:
    """Print plans.

    Returns:
        The exit code: 0 if something fits, 1 if nothing does, 2 for bad input.

    Raises:
        ValueError: For bad input, with the options of the command line in place of the fields of ``Run``.
    """
    try:
        _report(args)
    except NoPlanError as error:
        if not args.json:
            raise
        print(json.dumps({"plans": [], "error": str(error)}, indent=1))
        return 1
    except ValueError as error:
        raise ValueError(
            re.sub(rf"\b({'|'.join(args.flags)})\b", lambda found: args.flags[found[0]], str(error))
        ) from error
    return 0


def _report(args: argparse.Namespace) -> None:
    """Print the plans, the memory and the code of the fastest one; write it as a program."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    options = {name: value for name, value in vars(args).items() if value is not None}
    given: dict[str, Any] = {
        field.name: dtypes.get(options[field.name], options[field.name])
        for field in fields(Run)
        if field.name in options
    }
    config = config_of(args.model)
    plans = plan_run(config, global_batch_size=args.global_batch_size, **given)
    best, shown = plans[0], plans[: args.plans]
    gpu, total, active = best.run.device, best.estimate.parameters, best.estimate.active_parameters
    budget = budget_of(gpu, args.num_gpus)
    headline = (
        f"{config.model_type}, {total / 1e9:.2f}B parameters"
        + (f" ({active / 1e9:.2f}B active)" if active != total else "")
        + f", on {args.num_gpus} x {args.gpu} ({budget.memory_bytes / GIB:.1f} GiB each), "
        f"{args.global_batch_size} sequences of {args.seq_length} tokens a step"
    )
    if args.write:
        print(f"Program: {write_program(args.write, best, args.model, gpu)}", file=sys.stderr)
    if args.json:
        job = {
            "model": args.model,
            "gpu": gpu.name,
            "num_gpus": args.num_gpus,
            "seq_length": args.seq_length,
            "global_batch_size": args.global_batch_size,
            "memory_bytes": budget.memory_bytes,
            "usable_bytes": budget.usable_bytes,
            "taken_bytes": dict(budget.taken),
            "parameters": total,
            "active_parameters": active,
            "plans": [plan.to_dict() for plan in shown],
            "code": best.code(args.model),
        }
        print(json.dumps(job, indent=1))
        return
    print(f"{headline}\n\n{plan_table(shown)}\n{len(shown)} of {len(plans)} plans (--plans N)")
    print(f"\nPlan 1: {'; '.join(best.reasons)}.")
    print(
        f"A billion tokens take {1e9 / best.tokens_per_second / 3600:,.0f} GPU-hours, if {gpu.name} has "
        f"{gpu.node_bytes_per_second / GB:g} GB/s each way in a node of {gpu.gpus_per_node}, "
        f"{gpu.bytes_per_second / GB:g} between nodes."
    )
    for note in best.estimate.notes:
        print(f"Note: {note}.")
    print(f"\nMemory of plan 1 on each GPU at the peak, in the {best.estimate.peak_phase} phase:\n")
    print(f"{best.estimate}  of {budget}")
    print(f"\nPlan 1 as code:\n\n{best.code(args.model)}")


def plan_table(plans: Sequence[RunPlan]) -> str:
    """The plans as a table, one line each."""
    rows = [_row(index, plan) for index, plan in enumerate(plans, start=1)]
    alike = {name for name in ("resharded", "optimizer") if len({row[name] for row in rows}) == 1}
    names = [name for name in rows[0] if name not in alike]
    lines = [names, *([row[name] for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ([cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(map("  ".join, padded))


def _row(index: int, plan: RunPlan) -> dict[str, str]:
    """A plan's cells, by column."""
    run = plan.run
    return {
        "": f"{index}.",
        "micro batch": str(run.micro_batch_size),
        "x accum.": str(run.grad_accum_steps),
        "checkpointed": {"0": "none", "1": "all"}.get(str(run.sac_ratio), str(run.sac_ratio)),
        "resharded": "yes" if run.reshard_after_forward else "no",
        "optimizer": run.optimizer,
        "GiB per GPU": f"{plan.peak_bytes / GIB:.1f}",
        "left": f"{plan.left_bytes / GIB:.1f}{' (tight)' if plan.is_tight else ''}",
        "peak in": plan.estimate.peak_phase,
        "step": f"{plan.time.total:.3g} s",
        "tokens/s per GPU": f"{plan.tokens_per_second:,.0f}",
        "bound by": plan.time.bound,
    }
