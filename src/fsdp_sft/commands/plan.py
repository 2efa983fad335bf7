"""The options of ``fsdp-sft plan``; what it does is in planner/command.py.

Nothing here imports torch, so that help comes at once. Choices are those of the planner's own types, which a
test compares.
"""

import argparse

from fsdp_sft._process.gpus import GPUS

_DESCRIPTION = (
    "What fits on the GPUs at hand, how fast it is, and where its memory goes; from a model's config alone."
)
_EXAMPLES = """examples:
  %(prog)s --model Qwen/Qwen2.5-14B --gpus 8 --gpu h100 --seq 4096 --global-batch 64
  %(prog)s --model ./my-model --gpus 2 --gpu 4090 --seq 2048 --global-batch 16 --lora 16 --json
  %(prog)s --model Qwen/Qwen2.5-14B --gpus 8 --gpu h200 --seq 4096 --global-batch 64 --tokens 300M
  %(prog)s --model ./my-model --gpus 4 --gpu mine=48,362,864,per_node=4 --seq 4096 --global-batch 32"""
_EXPERTS = ("grouped_mm", "eager")
_FROZEN = ("float32", "bfloat16", "nf4", "fp8", "stored")
_OPTIMIZERS = (
    *("adamw", "adamw_foreach", "adamw_fused", "adamw_for_loop", "adamw_stochastic", "adamw8bit"),
    *("sgd", "sgd_momentum"),
)
_DTYPES = ("float32", "bfloat16")


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan to a parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(run="planner.command:run")
    add, either = parser.add_argument, argparse.BooleanOptionalAction
    add("--model", help="folder with a config.json, or a Hub id; no weights are read")
    add("--gpus", type=int, metavar="N", help="number of GPUs")
    add(
        "--gpu",
        help=f"{', '.join(GPUS)}, "
        "with a size if unusual (a100-40gb, h100-79.1gib), or NAME=GiB,TFLOPs,GB/s "
        "of its memory, after which link=GB/s, network=GB/s, per_node=N may follow; cpu is for memory only",
    )
    add("--seq", type=_length, help="tokens per sequence; 8k is 8192")
    add("--global-batch", type=int, help="sequences per optimizer step, over all GPUs")
    add("--tokens", metavar="N", help="of the whole training, as 300M: says its hours and GPU-hours")
    add("--list-gpus", action="store_true", help="print the known GPUs with memory, rates and links")
    searched = parser.add_argument_group("searched if not given")
    add = searched.add_argument
    add("--micro-batch", type=int, help="sequences per GPU and forward")
    add("--grad-sync", choices=("each", "last"), help="reduce gradients after each micro-batch, or the last")
    add("--sac", metavar="RATIO", help="checkpointed share of the blocks, such as 1/3")
    add("--sac-placement", choices=("even", "prefix"), help="which blocks those are")
    add("--reshard", action=either, help="blocks are freed between forward and backward")
    add("--optimizer", choices=_OPTIMIZERS, help="adamw, fused where its update decides what fits")
    add("--compile", action=either, help="the blocks are compiled")
    add = parser.add_argument_group("not searched").add_argument
    add("--cp", type=int, default=1, help="GPUs that share each row")
    add("--ep", type=int, default=1, metavar="N", help="ranks that share out the experts of each layer")
    add("--replicas", type=int, default=1, help="replicas of the sharded model (HSDP)")
    add("--offload", action="store_true", help="what checkpointed blocks keep waits on the host")
    add("--no-padding", action="store_true", help="batches have no attention mask (packed sequences)")
    add("--loss", choices=("chunked", "logits"), default="chunked", help="default: chunked")
    add("--experts", choices=_EXPERTS, default="grouped_mm", help="default: grouped_mm")
    add("--masters", choices=_DTYPES, default="float32", help="dtype of the stored parameters")
    add("--cpu-offload", action="store_true", help="shards and optimizer live on the host")
    add("--lora", type=int, default=0, metavar="RANK", help="train adapters of that rank only")
    add("--frozen-dtype", choices=_FROZEN, help="how frozen weights are kept; nf4, fp8, stored: packed")
    add = parser.add_argument_group("output").add_argument
    add("--plans", type=int, default=8, help="how many plans to print")
    add("--json", action="store_true", help="print plans as JSON, and nothing else")
    add("--png", metavar="FILE", help="draw the plans' memory")
    add("--write", metavar="FILE", help="write plan 1 as a program for chats, to run as it is")


def _length(text: str) -> int:
    """A number of tokens; k is 1024 of them."""
    number, thousands = (text[:-1], 1024) if text[-1:] in "kK" else (text, 1)
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"takes a number of tokens such as 8192 or 8k, got {text!r}")
    return int(number) * thousands
