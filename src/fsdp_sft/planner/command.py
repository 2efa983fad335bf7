"""``fsdp-sft plan``: what fits on the GPUs at hand, how fast it is, and where its memory goes."""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any, get_args

import torch

from fsdp_sft._process.gpus import GIB, GPUS, Gpu, gpu_named
from fsdp_sft.errors import NoPlanError, printable
from fsdp_sft.planner.budget import Budget, budget_of
from fsdp_sft.planner.calibrate import calibrate
from fsdp_sft.planner.estimate import MemoryEstimate
from fsdp_sft.planner.experts import ExpertsImpl
from fsdp_sft.planner.longest import LongestRow, longest_rows, peaks_by_length
from fsdp_sft.planner.model import as_config
from fsdp_sft.planner.picture import bars, draw, draw_lengths, lengths_to_draw, plan_table, row_table
from fsdp_sft.planner.plan import RunPlan
from fsdp_sft.planner.search import plan_run, smallest_num_gpus
from fsdp_sft.planner.setup import Optimizer

_DESCRIPTION = (
    "What fits on the GPUs at hand, how fast it is, and where its memory goes; from a model's config alone."
)
_EXAMPLES = """examples:
  %(prog)s --model Qwen/Qwen2.5-14B --gpus 8 --gpu h100 --seq 4096 --global-batch 64
  %(prog)s --model ./my-model --gpus 2 --gpu 4090 --seq 2048 --global-batch 16 --lora 16 --json
  %(prog)s --model meta-llama/Llama-3.1-8B --gpus 8 --gpu a100-40gb --longest --no-padding --png rows.png
  %(prog)s --model ./my-model --gpus 4 --gpu mine=48,362,864,per_node=4 --seq 4096 --global-batch 32"""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan to a parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(run=run)
    add, either = parser.add_argument, argparse.BooleanOptionalAction
    add("--model", required=True, help="folder with a config.json, or a Hub id; no weights are read")
    add("--gpus", type=int, required=True, help="number of GPUs")
    add(
        "--gpu",
        required=True,
        help=f"{', '.join(GPUS)}, with a size if unusual (a100-40gb, h100-79.1gib), or NAME=GiB,TFLOPs,GB/s "
        "of its memory, after which link=GB/s, network=GB/s, per_node=N may follow; cpu is for memory only",
    )
    add("--seq", type=int, help="tokens per sequence")
    add("--global-batch", type=int, help="sequences per optimizer step, over all GPUs")
    add(
        "--longest",
        action="store_true",
        help="the longest row that fits, by the number of GPUs that share it; without --seq, --global-batch",
    )
    searched = parser.add_argument_group("searched if not given")
    add = searched.add_argument
    add("--micro-batch", type=int, help="sequences per GPU and forward")
    add("--cp", type=int, help="GPUs that share each row")
    add("--replicas", type=int, help="replicas of the sharded model (HSDP)")
    add("--grad-sync", choices=("each", "last"), help="reduce gradients after each micro-batch, or the last")
    add("--sac", metavar="RATIO", help="checkpointed share of the blocks, such as 1/3")
    add("--sac-placement", choices=("even", "prefix"), help="which blocks those are")
    add("--ep", type=int, metavar="N", help="ranks that share out the experts of each layer")
    add("--offload", action=either, help="what checkpointed blocks keep waits on the host (--longest: no)")
    add("--reshard", action=either, help="blocks are freed between forward and backward")
    add("--compile", action=either, help="the blocks are compiled (--longest: no)")
    add = parser.add_argument_group("as given").add_argument
    add("--no-padding", action="store_true", help="batches have no attention mask (packed sequences)")
    add("--loss", choices=("chunked", "logits"), default="chunked", help="default: chunked")
    add("--experts", choices=get_args(ExpertsImpl), default="grouped_mm", help="default: grouped_mm")
    add("--masters", choices=_DTYPES, default="float32", help="dtype of the stored parameters")
    add("--optimizer", choices=get_args(Optimizer), default="adamw", help="default: adamw")
    add("--cpu-offload", action="store_true", help="shards and optimizer live on the host")
    add("--lora", type=int, default=0, metavar="RANK", help="train adapters of that rank only")
    add = parser.add_argument_group("output").add_argument
    add("--plans", type=int, default=8, help="how many plans to print")
    add("--json", action="store_true", help="print plans (or rows) as JSON, and nothing else")
    add("--png", metavar="FILE", help="draw the plans' memory, or that of rows by length")
    add(
        "--calibrate",
        action="store_true",
        help="correct the memory (not the seconds) by running two real blocks",
    )


def run(args: argparse.Namespace) -> int:
    """Print plans, or the longest rows that fit.

    Returns:
        The exit code: 0 if something fits, 1 if nothing does, 2 for bad input.
    """
    try:
        gpu = gpu_named(args.gpu)
        report = _report_longest if args.longest else _report_plans
        report(args, gpu, budget_of(gpu, args.gpus))
    except NoPlanError as error:
        print(json.dumps({"plans": [], "error": str(error)}, indent=1) if args.json else error)
        return 1
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``Run`` that the command line gives; what it leaves open is searched."""
    options: dict[str, Any] = {
        "gpu": args.gpu,
        "attention_mask": not args.no_padding,
        "loss_impl": args.loss,
        "experts_impl": args.experts,
        "master_dtype": _DTYPES[args.masters],
        "optimizer": args.optimizer,
        "cpu_offload": args.cpu_offload,
        "lora_rank": args.lora,
    }
    searched = {
        "cp": args.cp,
        "ep_size": args.ep,
        "micro_batch_size": args.micro_batch,
        "dp_replicate": args.replicas,
        "grad_sync": args.grad_sync,
        "sac_ratio": args.sac,
        "sac_placement": args.sac_placement,
        "sac_offload": args.offload,
        "reshard_after_forward": args.reshard,
        "compile": args.compile,
    }
    return options | {name: value for name, value in searched.items() if value is not None}


def _report_plans(args: argparse.Namespace, gpu: Gpu, budget: Budget) -> None:
    """Print the plans, the memory and the code of the fastest one."""
    if args.seq is None or args.global_batch is None:
        raise ValueError("--seq and --global-batch are needed, or --longest")
    config, options = as_config(args.model), _options(args)
    plans = plan_run(
        config,
        num_gpus=args.gpus,
        seq_length=args.seq,
        global_batch_size=args.global_batch,
        **options,
    )
    best, shown = plans[0], plans[: args.plans]
    estimate = best.estimate
    if args.calibrate:
        estimate, measured = _calibrated(config, best)
    if args.json:
        found = {**_job(args, gpu, budget, estimate), "plans": [plan.to_dict() for plan in shown]}
        found["code"] = best.code(args.model)
        print(json.dumps(found, indent=1))
    else:
        print(_headline(args, config, estimate, budget))
        print(f"\n{plan_table(shown)}")
        if len(plans) > len(shown):
            print(f"... and {len(plans) - len(shown)} more (--plans {len(plans)})")
        print(f"\nPlan 1: {'; '.join(best.reasons)}.")
        print(f"Sharding: {estimate.sharding}.")
        for note in estimate.notes:
            print(f"Note: {note}.")
        if args.calibrate:
            print(f"\n{measured}")
        print(f"\nMemory of plan 1 on each GPU at the peak, in the {estimate.peak_phase} phase:\n")
        print(bars(estimate, budget=budget))
        print(f"\nPlan 1 as code:\n\n{best.code(args.model)}")
        fewest = smallest_num_gpus(config, seq_length=args.seq, **options)
        if fewest is not None:
            print(f"\nFewest such GPUs (in powers of two) that hold this training at all: {fewest}.")
    if args.png:
        labelled = [(f"plan {i}: {_label(plan)}", plan.estimate) for i, plan in enumerate(shown, start=1)]
        target = draw(args.png, labelled, budget=budget)
        print(f"Picture: {target}", file=sys.stderr if args.json else sys.stdout)


def _report_longest(args: argparse.Namespace, gpu: Gpu, budget: Budget) -> None:
    """Print the longest rows, and the memory of the longest of them."""
    config, options = as_config(args.model), _options(args)
    rows = longest_rows(config, num_gpus=args.gpus, **options)
    best = max(rows, key=lambda row: row.seq_length)
    if args.json:
        found = {**_job(args, gpu, budget, best.estimate), "rows": [_row(row) for row in rows]}
        print(json.dumps(found, indent=1))
    else:
        print(_headline(args, config, best.estimate, budget))
        print(f"\n{row_table(rows)}")
        for note in (*best.estimate.notes, *_notes_on_rows(args, config, best.seq_length)):
            print(f"Note: {note}.")
        phase = best.estimate.peak_phase
        print(f"\nMemory of the row of {best.seq_length} tokens on each GPU, in the {phase} phase:\n")
        print(bars(best.estimate, budget=budget))
    if args.png:
        lengths = lengths_to_draw(rows)
        curves = []
        for row in rows:
            near = [length for length in lengths if length <= 2 * row.seq_length]
            curves.append((row, peaks_by_length(config, row, near, num_gpus=args.gpus, **options)))
        target = draw_lengths(args.png, lengths, curves, budget=budget)
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


def _row(row: LongestRow) -> dict[str, Any]:
    """One longest row, for the JSON output."""
    return {
        "cp": row.cp,
        "seq_length": row.seq_length,
        "sac_ratio": str(row.sac_ratio),
        "sac_placement": row.sac_placement,
        "sac_offload": row.sac_offload,
        "peak_bytes": row.peak_bytes,
        "peak_phase": row.estimate.peak_phase,
        "breakdown_bytes": dict(row.estimate.breakdown),
        "host_bytes": row.estimate.host_bytes,
    }


def _notes_on_rows(args: argparse.Namespace, config: Any, longest: int) -> Iterator[str]:
    """Remarks on rows of this length."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(positions, int) and positions < longest:
        yield f"the config gives the model {positions} positions"
    if not args.no_padding:
        yield (
            "attention gets a mask of S x S; packs have none where use_varlen_attention runs (--no-padding)"
        )


def _headline(args: argparse.Namespace, config: Any, estimate: MemoryEstimate, budget: Budget) -> str:
    """The model, its size and the job, in one line."""
    total, active = estimate.parameters, estimate.active_parameters
    size = f"{total / 1e9:.2f}B parameters" + (f" ({active / 1e9:.2f}B active)" if active != total else "")
    what = f"{args.global_batch} sequences of {args.seq} tokens a step"
    return (
        f"{config.model_type}, {size}, on {args.gpus} x {args.gpu} "
        f"({budget.memory_bytes / GIB:.1f} GiB each), {'the longest row that fits' if args.longest else what}"
    )


def _label(plan: RunPlan) -> str:
    """A plan in a few words, for the picture."""
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


def _calibrated(config: Any, best: RunPlan) -> tuple[MemoryEstimate, str]:
    """The estimate of the best plan corrected by a measurement, and a sentence about it."""
    found = calibrate(config, best.setup)
    return found.refine(best.estimate), (
        f"Calibration on {found.device}: a real block keeps {found.measured_bytes / (1 << 20):.1f} MiB of "
        f"1 x {found.seq_length} tokens, the planner says {found.estimated_bytes / (1 << 20):.1f} MiB there "
        f"(factor {found.factor:.3f})."
    )
