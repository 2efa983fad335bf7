"""``python -m fsdp_sft.planner``: what fits on the GPUs at hand, and where its memory goes."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch

from fsdp_sft.errors import NoPlanError
from fsdp_sft.planner.calibrate import calibrate
from fsdp_sft.planner.devices import parse_gpu
from fsdp_sft.planner.estimate import MemoryEstimate, check_options
from fsdp_sft.planner.longest import longest_rows, peaks_by_length
from fsdp_sft.planner.model import as_config, build_skeleton
from fsdp_sft.planner.picture import bars, draw, draw_lengths, lengths_to_draw, plan_table, row_table
from fsdp_sft.planner.search import RunPlan, plan_run, smallest_num_gpus

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 0 if something fits, 1 if nothing does, 2 for bad input."""
    args = _parser().parse_args(arguments)
    try:
        name, memory = parse_gpu(args.gpu)
        return _report(args, name, memory)
    except NoPlanError as error:
        print(error)
        return 1
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fsdp_sft.planner", description=__doc__)
    parser.add_argument(
        "--model", required=True, help="folder with a config.json, or a Hub id; no weights are read"
    )
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs")
    parser.add_argument(
        "--gpu", required=True, help="a100, h100, h200, gb200 or cpu, with a size if unusual: h100-80gb"
    )
    parser.add_argument("--seq", type=int, help="tokens per sequence")
    parser.add_argument("--global-batch", type=int, help="sequences per optimizer step, over all GPUs")
    parser.add_argument(
        "--longest",
        action="store_true",
        help="the longest row that fits, by the number of GPUs that share it; without --seq, --global-batch",
    )
    parser.add_argument(
        "--micro-batch", type=int, help="sequences per GPU and forward; searched if not given"
    )
    parser.add_argument("--cp", type=int, help="GPUs that share each row; searched if not given")
    parser.add_argument(
        "--sac", metavar="RATIO", help="checkpointed share of the blocks, such as 1/3; searched if not"
    )
    parser.add_argument(
        "--offload",
        action=argparse.BooleanOptionalAction,
        help="what checkpointed blocks keep waits in host memory; searched if not given (no, with --longest)",
    )
    parser.add_argument("--compile", action="store_true", help="the blocks are compiled")
    parser.add_argument(
        "--no-padding", action="store_true", help="batches have no attention mask (packed sequences)"
    )
    parser.add_argument("--loss", choices=("chunked", "logits"), default="chunked")
    parser.add_argument(
        "--masters", choices=_DTYPES, default="float32", help="dtype of the stored parameters"
    )
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--replicas", type=int, default=1, help="replicas of the sharded model (HSDP)")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="train adapters of that rank only"
    )
    parser.add_argument("--plans", type=int, default=8, help="how many plans to print")
    parser.add_argument("--png", metavar="FILE", help="draw the plans' memory, or that of rows by length")
    parser.add_argument(
        "--calibrate", action="store_true", help="run two real blocks and correct the estimate by them"
    )
    return parser


def _options(args: argparse.Namespace, gpu: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "gpu": gpu,
        "compile": args.compile,
        "attention_mask": not args.no_padding,
        "loss_impl": args.loss,
        "master_dtype": _DTYPES[args.masters],
        "optimizer": args.optimizer,
        "dp_replicate": args.replicas,
        "lora_rank": args.lora,
    }
    searched = {"cp": args.cp, "micro_batch_size": args.micro_batch, "sac_ratio": args.sac}
    searched["sac_offload"] = args.offload
    return options | {name: value for name, value in searched.items() if value is not None}


def _report(args: argparse.Namespace, gpu: str, memory: int) -> int:
    if args.longest:
        return _report_longest(args, gpu, memory)
    if args.seq is None or args.global_batch is None:
        raise ValueError("--seq and --global-batch are needed, or --longest")
    config, options = as_config(args.model), _options(args, gpu)
    plans = plan_run(
        config,
        num_gpus=args.gpus,
        gpu_memory_bytes=memory,
        seq_length=args.seq,
        global_batch_size=args.global_batch,
        **options,
    )
    best = plans[0]
    shown = plans[: args.plans]
    print(_headline(args, config, best.estimate, memory))
    print(f"\n{plan_table(shown)}")
    if len(plans) > len(shown):
        print(f"... and {len(plans) - len(shown)} more (--plans {len(plans)})")
    print(f"\nPlan 1: {'; '.join(best.reasons)}.")
    for note in best.estimate.notes:
        print(f"Note: {note}.")
    estimate = best.estimate
    if args.calibrate:
        estimate = _calibrated(args, config, options, best)
    print(f"\nMemory of plan 1 on each GPU at the peak, in the {estimate.peak_phase} phase:\n")
    print(bars(estimate, memory_bytes=memory))
    smallest = smallest_num_gpus(config, gpu_memory_bytes=memory, seq_length=args.seq, **options)
    if smallest is not None:
        print(f"\nFewest such GPUs (in powers of two) that hold this training at all: {smallest}.")
    if args.png:
        labelled = [(f"plan {i}: {_label(plan)}", plan.estimate) for i, plan in enumerate(shown, start=1)]
        print(f"Picture: {draw(args.png, labelled, memory_bytes=memory)}")
    return 0


def _report_longest(args: argparse.Namespace, gpu: str, memory: int) -> int:
    config, options = as_config(args.model), _options(args, gpu)
    rows = longest_rows(config, num_gpus=args.gpus, gpu_memory_bytes=memory, **options)
    best = max(rows, key=lambda row: row.seq_length)
    print(_headline(args, config, best.estimate, memory))
    print(f"\n{row_table(rows)}")
    for note in (*best.estimate.notes, *_notes_on_rows(args, config, best.seq_length)):
        print(f"Note: {note}.")
    phase = best.estimate.peak_phase
    print(f"\nMemory of the row of {best.seq_length} tokens on each GPU, in the {phase} phase:\n")
    print(bars(best.estimate, memory_bytes=memory))
    if args.png:
        lengths = lengths_to_draw(rows)
        curves = []
        for row in rows:
            near = [length for length in lengths if length <= 2 * row.seq_length]
            curves.append((row, peaks_by_length(config, row, near, num_gpus=args.gpus, **options)))
        print(f"Picture: {draw_lengths(args.png, lengths, curves, memory_bytes=memory)}")
    return 0


def _notes_on_rows(args: argparse.Namespace, config: Any, longest: int) -> Iterator[str]:
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(positions, int) and positions < longest:
        yield f"the config gives the model {positions} positions"
    if not args.no_padding:
        yield (
            "attention gets a mask of S x S; packs have none where use_varlen_attention runs (--no-padding)"
        )


def _headline(args: argparse.Namespace, config: Any, estimate: MemoryEstimate, memory: int) -> str:
    total, active = estimate.parameters, estimate.active_parameters
    size = f"{total / 1e9:.2f}B parameters" + (f" ({active / 1e9:.2f}B active)" if active != total else "")
    what = f"{args.global_batch} sequences of {args.seq} tokens a step"
    return (
        f"{config.model_type}, {size}, on {args.gpus} x {args.gpu} ({memory / (1 << 30):.1f} GiB each), "
        f"{'the longest row that fits' if args.longest else what}"
    )


def _label(plan: RunPlan) -> str:
    text = f"{plan.micro_batch_size} x {plan.grad_accum_steps}"
    if plan.cp > 1:
        text += f", cp {plan.cp}"
    if plan.sac_ratio:
        text += ", all checkpointed" if plan.sac_ratio == 1 else f", {plan.sac_ratio} {plan.sac_placement}"
        text += ", offloaded" if plan.sac_offload else ""
    return text + ("" if plan.reshard_after_forward else ", kept gathered")


def _calibrated(args: argparse.Namespace, config: Any, options: dict[str, Any], best: RunPlan) -> Any:
    chosen = {**options, "micro_batch_size": best.micro_batch_size, "cp": best.cp}
    setup = check_options(num_gpus=args.gpus, seq_length=args.seq, **chosen)
    build_skeleton(config, setup)
    found = calibrate(config, setup)
    print(
        f"\nCalibration on {found.device}: a real block keeps {found.measured_bytes / (1 << 20):.1f} MiB of "
        f"1 x {found.seq_length} tokens, the planner says {found.estimated_bytes / (1 << 20):.1f} MiB there "
        f"(factor {found.factor:.3f})."
    )
    return found.refine(best.estimate)


if __name__ == "__main__":
    sys.exit(main())
