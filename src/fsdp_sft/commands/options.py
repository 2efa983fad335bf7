"""The options of each command; what they do is in the packages of their subjects, which are imported later.

Nothing here imports torch, so that help comes at once. Options of a plan that are fields of ``fs.Run`` go
there by name, which checks them.
"""

import argparse
from pathlib import Path

from fsdp_sft._process.gpus import GPUS

_PLAN = """examples:
  %(prog)s --model Qwen/Qwen2.5-14B --gpus 8 --gpu h100 --seq 4096 --global-batch 64
  %(prog)s --model ./my-model --gpus 2 --gpu 4090 --seq 2048 --global-batch 16 --lora 16 --json
  %(prog)s --model ./my-model --gpus 4 --gpu mine=48,362,864,per_node=4 --seq 4096 --global-batch 32"""
_DATA = """examples:
  fsdp-sft inspect-data chats.jsonl --tokenizer Qwen/Qwen3-8B --max-length 4096
  fsdp-sft inspect-data chats.jsonl --tokenizer ./model --train-on last --html rows.html
  fsdp-sft inspect-data chats.jsonl --tokenizer ./base --chat-template chatml.jinja
  fsdp-sft inspect-data chats.jsonl --tokenizer ./model --json > report.json"""
_CHECK = """examples:
  torchrun --nproc-per-node 8 -m fsdp_sft check --model Qwen/Qwen2.5-14B --root checkpoints
  srun fsdp-sft check --root /shared/run --json check.json

exit code: 0 if all is well, 1 if something is wrong, 2 if the checks cannot run"""
_CHECKS = ("environment", "products", "reductions", "network", "folder", "parity")


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan to a parser."""
    parser.epilog = _PLAN
    parser.set_defaults(run="planner.command:run")
    add, either = parser.add_argument, argparse.BooleanOptionalAction
    add("--model", required=True, help="folder with a config.json, or a Hub id; no weights are read")
    add("--gpus", dest="num_gpus", required=True, type=int, metavar="N", help="number of GPUs")
    add(
        "--gpu",
        required=True,
        help=f"{', '.join(GPUS)}, "
        "or NAME=GiB,TFLOPs,GB/s "
        "of its memory, after which link=GB/s, network=GB/s, per_node=N may follow; cpu is for memory only",
    )
    add("--seq", dest="seq_length", required=True, type=int, metavar="N", help="tokens per sequence")
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
    parser.set_defaults(flags={name: flag for name, flag in flags.items() if flag not in (f"--{name}", "-h")})


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``inspect-data`` to a parser."""
    parser.epilog = _DATA
    add = parser.add_argument
    add("path", type=Path, help="a .jsonl or .json file of rows, in any form that encode_chat takes")
    add("--tokenizer", required=True, help="Hugging Face folder or Hub id")
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a Jinja file to use instead of the tokenizer's template, as a base model needs",
    )
    add("--max-length", type=int, help="tokens of a row, and of a pack; default: rows as they are")
    add("--train-on", default="assistant", choices=("assistant", "last", "all"), help="default: assistant")
    add("--limit", type=int, default=10_000, help="rows to look at, from the first on; default: 10000")
    add("--show", type=int, default=2, metavar="N", help="rows to print; default: 2")
    add("--html", type=Path, metavar="FILE", help="write the first 50 rows as a page")
    add("--json", action="store_true", help="print the report as JSON, and nothing else")
    parser.set_defaults(run="commands.data:inspect")


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``check``."""
    parser.epilog = _CHECK
    parser.set_defaults(run="check.command:check")
    add = parser.add_argument
    add("--model", help="folder with a config.json, or a Hub id; no weights are read; default: a Llama")
    add("--root", type=Path, help="folder of the run, which all nodes see; default: none, or a temporary one")
    add("--json", type=Path, default=Path("check.json"), metavar="FILE", help="default: check.json")
    add("--only", nargs="+", metavar="CHECK", choices=_CHECKS, help=f"of {', '.join(_CHECKS)}, these alone")
    add = parser.add_argument_group("the training, for parity").add_argument
    add("--replicas", type=int, default=1, help="replicas of the sharded model (HSDP)")
    add("--cp", type=int, default=1, help="ranks that share each row")
    add("--ep", type=int, default=1, help="ranks that share out the experts of each layer")
    add("--compile", action="store_true", help="the blocks are compiled")
    add(
        "--frozen",
        choices=("bfloat16", "nf4", "fp8"),
        help="dtype of a frozen base, below adapters (needs peft)",
    )


def add_env(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``env``."""
    parser.set_defaults(run="check:env")
    parser.add_argument("--json", action="store_true", help="print it as JSON, and nothing else")
