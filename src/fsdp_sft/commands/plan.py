"""The options of ``fsdp-sft plan``; what it does is in planner/command.py.

Nothing here imports torch, so that help comes at once. Options that are fields of ``fs.Run`` go there by
name, which checks them.
"""

import argparse

from fsdp_sft._process.gpus import GPUS

_DESCRIPTION = (
    "What fits on the GPUs at hand, how fast it is, and where its memory goes; from a model's config alone."
)
_EXAMPLES = """examples:
  %(prog)s --model Qwen/Qwen2.5-14B --gpus 8 --gpu h100 --seq 4096 --global-batch 64
  %(prog)s --model ./my-model --gpus 2 --gpu 4090 --seq 2048 --global-batch 16 --lora 16 --json
  %(prog)s --model ./my-model --gpus 4 --gpu mine=48,362,864,per_node=4 --seq 4096 --global-batch 32"""


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan to a parser."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(run="planner.command:run")
    add, either = parser.add_argument, argparse.BooleanOptionalAction
    add("--model", required=True, help="folder with a config.json, or a Hub id; no weights are read")
    add("--gpus", dest="num_gpus", required=True, type=int, metavar="N", help="number of GPUs")
    add(
        "--gpu",
        required=True,
        help=f"{', '.join(GPUS)}, "
        "with a size if unusual (a100-40gb, h100-79.1gib), or NAME=GiB,TFLOPs,GB/s "
        "of its memory, after which link=GB/s, network=GB/s, per_node=N may follow; cpu is for memory only",
    )
    add(
        "--seq",
        dest="seq_length",
        required=True,
        type=_length,
        metavar="N",
        help="tokens per sequence; 8k is 8192",
    )
    add(
        "--global-batch",
        dest="global_batch_size",
        required=True,
        type=int,
        metavar="N",
        help="sequences of a step, over all GPUs",
    )
    add = parser.add_argument_group("searched if not given").add_argument
    add("--micro-batch", dest="micro_batch_size", type=int, metavar="N", help="sequences per GPU and forward")
    add("--sac", dest="sac_ratio", metavar="RATIO", help="checkpointed share of the blocks, such as 1/3")
    add("--reshard", dest="reshard_after_forward", action=either, help="blocks are freed after their forward")
    add("--optimizer", metavar="NAME", help="as fs.Run has them: adamw, adamw_fused, adamw8bit, sgd, ...")
    add = parser.add_argument_group("not searched").add_argument
    add("--compile", action=either, help="the blocks are compiled; default: yes")
    add("--sac-placement", metavar="even|prefix", help="which blocks are checkpointed; default: even")
    add("--grad-sync", metavar="each|last", help="reduce gradients after each micro-batch, or the last")
    add("--cp", type=int, help="GPUs that share each row")
    add("--ep", dest="ep_size", type=int, metavar="N", help="ranks that share out the experts of each layer")
    add("--replicas", dest="dp_replicate", type=int, metavar="N", help="replicas of the sharded model (HSDP)")
    add(
        "--no-padding",
        dest="attention_mask",
        action="store_false",
        help="batches have no attention mask (packed sequences)",
    )
    add("--loss", dest="loss_impl", metavar="chunked|logits", help="default: chunked")
    add("--masters", dest="master_dtype", metavar="float32|bfloat16", help="dtype of the stored parameters")
    add("--lora", dest="lora_rank", type=int, metavar="RANK", help="train adapters of that rank only")
    add(
        "--frozen-dtype",
        metavar="DTYPE",
        help="how frozen weights are kept: float32, bfloat16, or packed as nf4, fp8, stored",
    )
    add = parser.add_argument_group("output").add_argument
    add("--plans", type=int, default=8, help="how many plans to print")
    add("--json", action="store_true", help="print plans as JSON, and nothing else")
    add("--write", metavar="FILE", help="write plan 1 as a program for chats, to run as it is")
    flags = {action.dest: action.option_strings[0] for action in parser._actions}
    parser.set_defaults(flags={name: flag for name, flag in flags.items() if flag != f"--{name}"})


def _length(text: str) -> int:
    """A number of tokens; k is 1024 of them."""
    number, thousands = (text[:-1], 1024) if text[-1:] in "kK" else (text, 1)
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"takes a number of tokens such as 8192 or 8k, got {text!r}")
    return int(number) * thousands
