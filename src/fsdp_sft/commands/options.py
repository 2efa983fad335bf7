"""The commands and their options; what they do is in the packages of their subjects, imported later.

Nothing here imports torch, so that help comes at once. Options of a plan that are fields of ``fs.Run`` go
there by name, which checks them.
"""

from argparse import BooleanOptionalAction
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

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

# What ``add_argument`` takes for each option, by the title of a group and the option's name.
Options: TypeAlias = dict[str, dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Command:
    """A command of the console script.

    Attributes:
        says: Its line in the list of commands.
        runs: The module below this package and the function that it calls, which gets the parsed arguments.
        options: Its options.
        epilog: What stands below its help.
    """

    says: str
    runs: str
    options: Options
    epilog: str | None = None


_OF_PLAN: Options = {
    "": {
        "--model": {"required": True, "help": "folder with a config.json, or a Hub id; no weights are read"},
        "--gpus": {
            "dest": "num_gpus",
            "required": True,
            "type": int,
            "metavar": "N",
            "help": "number of GPUs",
        },
        "--gpu": {
            "required": True,
            "help": f"{', '.join(GPUS)}, or NAME=GiB,TFLOPs,GB/s of its memory, after which link=GB/s, "
            "network=GB/s, per_node=N may follow; cpu is for memory only",
        },
        "--seq": {
            "dest": "seq_length",
            "required": True,
            "type": int,
            "metavar": "N",
            "help": "tokens per sequence",
        },
        "--global-batch": {
            "dest": "global_batch_size",
            "required": True,
            "type": int,
            "metavar": "N",
            "help": "sequences of a step, over all GPUs",
        },
    },
    "searched if not given": {
        "--micro-batch": {
            "dest": "micro_batch_size",
            "type": int,
            "metavar": "N",
            "help": "sequences per GPU and forward",
        },
        "--sac": {
            "dest": "sac_ratio",
            "metavar": "RATIO",
            "help": "checkpointed share of the blocks, such as 1/3",
        },
        "--reshard": {
            "dest": "reshard_after_forward",
            "action": BooleanOptionalAction,
            "help": "blocks are freed after their forward",
        },
        "--optimizer": {
            "metavar": "NAME",
            "help": "as fs.Run has them: adamw, adamw_fused, adamw8bit, sgd, ...",
        },
    },
    "not searched": {
        "--compile": {"action": BooleanOptionalAction, "help": "the blocks are compiled; default: yes"},
        "--sac-placement": {
            "metavar": "even|prefix",
            "help": "which blocks are checkpointed; default: even",
        },
        "--grad-sync": {
            "metavar": "each|last",
            "help": "reduce gradients after each micro-batch, or the last",
        },
        "--cp": {"type": int, "help": "GPUs that share each row"},
        "--ep": {
            "dest": "ep_size",
            "type": int,
            "metavar": "N",
            "help": "ranks that share out the experts of each layer",
        },
        "--replicas": {
            "dest": "dp_replicate",
            "type": int,
            "metavar": "N",
            "help": "replicas of the sharded model (HSDP)",
        },
        "--no-padding": {
            "dest": "attention_mask",
            "action": "store_false",
            "help": "batches have no attention mask (packed sequences)",
        },
        "--loss": {"dest": "loss_impl", "metavar": "chunked|logits", "help": "default: chunked"},
        "--masters": {
            "dest": "master_dtype",
            "metavar": "float32|bfloat16",
            "help": "dtype of the stored parameters",
        },
        "--lora": {
            "dest": "lora_rank",
            "type": int,
            "metavar": "RANK",
            "help": "train adapters of that rank only",
        },
        "--frozen-dtype": {
            "metavar": "DTYPE",
            "help": "how frozen weights are kept: float32, bfloat16, or packed as nf4, fp8, stored",
        },
    },
    "output": {
        "--plans": {"type": int, "default": 8, "help": "how many plans to print"},
        "--json": {"action": "store_true", "help": "print plans as JSON, and nothing else"},
        "--write": {"metavar": "FILE", "help": "write plan 1 as a program for chats, to run as it is"},
    },
}
_OF_DATA: Options = {
    "": {
        "path": {"type": Path, "help": "a .jsonl or .json file of rows, in any form that encode_chat takes"},
        "--tokenizer": {"required": True, "help": "Hugging Face folder or Hub id"},
        "--chat-template": {
            "type": Path,
            "metavar": "FILE",
            "help": "a Jinja file to use instead of the tokenizer's template, as a base model needs",
        },
        "--max-length": {"type": int, "help": "tokens of a row, and of a pack; default: rows as they are"},
        "--train-on": {
            "default": "assistant",
            "choices": ("assistant", "last", "all"),
            "help": "default: assistant",
        },
        "--limit": {
            "type": int,
            "default": 10_000,
            "help": "rows to look at, from the first on; default: 10000",
        },
        "--show": {"type": int, "default": 2, "metavar": "N", "help": "rows to print; default: 2"},
        "--html": {"type": Path, "metavar": "FILE", "help": "write the first 50 rows as a page"},
        "--json": {"action": "store_true", "help": "print the report as JSON, and nothing else"},
    }
}
_OF_CHECK: Options = {
    "": {
        "--model": {
            "help": "folder with a config.json, or a Hub id; no weights are read; default: a Llama",
        },
        "--root": {
            "type": Path,
            "help": "folder of the run, which all nodes see; default: none, or a temporary one",
        },
        "--json": {
            "type": Path,
            "default": Path("check.json"),
            "metavar": "FILE",
            "help": "default: check.json",
        },
        "--only": {
            "nargs": "+",
            "metavar": "CHECK",
            "choices": _CHECKS,
            "help": f"of {', '.join(_CHECKS)}, these alone",
        },
    },
    "the training, for parity": {
        "--replicas": {"type": int, "default": 1, "help": "replicas of the sharded model (HSDP)"},
        "--cp": {"type": int, "default": 1, "help": "ranks that share each row"},
        "--ep": {"type": int, "default": 1, "help": "ranks that share out the experts of each layer"},
        "--compile": {"action": "store_true", "help": "the blocks are compiled"},
        "--frozen": {
            "choices": ("bfloat16", "nf4", "fp8"),
            "help": "dtype of a frozen base, below adapters (needs peft)",
        },
    },
}
COMMANDS = {
    "plan": Command(
        "what fits on the GPUs at hand, how fast it is, and where its memory goes",
        "planner.command:run",
        _OF_PLAN,
        _PLAN,
    ),
    "inspect-data": Command(
        "what of a file of chats would be trained, and what is refused",
        "commands.data:inspect",
        _OF_DATA,
        _DATA,
    ),
    "check": Command(
        "whether a job's machines are sound, and how fast; under its launcher",
        "check.command:check",
        _OF_CHECK,
        _CHECK,
    ),
    "env": Command(
        "versions, devices, launcher and variables of all ranks, for a bug report",
        "check:env",
        {"": {"--json": {"action": "store_true", "help": "print it as JSON, and nothing else"}}},
    ),
}
