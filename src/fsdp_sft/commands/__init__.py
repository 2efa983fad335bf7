"""The console script ``fsdp-sft``: plans, data and machines from the shell.

Each command has its options in options.py, and what it does in the package of its subject:
planner/command.py, check/command.py, check/__init__.py, and data.py here.
"""

import argparse
import os
import sys
from importlib import import_module

from fsdp_sft.commands.options import add_check, add_data, add_env, add_plan
from fsdp_sft.errors import CheckpointCorruptError, FsdpSftError, NoPlanError, printable

_EXAMPLES = """examples:
  fsdp-sft plan --model Qwen/Qwen2.5-14B --gpus 8 --gpu h100 --seq 4096 --global-batch 64
  fsdp-sft inspect-data chats.jsonl --tokenizer Qwen/Qwen2.5-14B --max-length 4096 --html rows.html
  torchrun --nproc-per-node 8 -m fsdp_sft check --root checkpoints

exit code: 0 if all is well, 1 if not (nothing fits, a checkpoint or a machine is damaged), 2 for bad input"""
# By name: what adds the options, and the line in the list of commands.
_COMMANDS = {
    "plan": (add_plan, "what fits on the GPUs at hand, how fast it is, and where its memory goes"),
    "inspect-data": (add_data, "what of a file of chats would be trained, and what is refused"),
    "check": (add_check, "whether a job's machines are sound, and how fast; under its launcher"),
    "env": (add_env, "versions, devices, launcher and variables of all ranks, for a bug report"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0 if all is well, 1 if not (nothing fits, a checkpoint is damaged), 2 for bad input.
    """
    args = _parser().parse_args(arguments)
    module, _, function = args.run.partition(":")  # imported now, so that help comes at once
    try:
        code = int(getattr(import_module(f"fsdp_sft.{module}"), function)(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (NoPlanError, CheckpointCorruptError) as error:
        print(printable(str(error)))
        return 1
    except (FsdpSftError, ValueError, OSError, ModuleNotFoundError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    from fsdp_sft import __version__

    parser = argparse.ArgumentParser(
        prog="fsdp-sft",
        description="FSDP2 building blocks for supervised fine-tuning: what can be asked from the shell.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fsdp-sft {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (add_options, says) in _COMMANDS.items():
        add_options(
            commands.add_parser(name, help=says, description=says, formatter_class=parser.formatter_class)
        )
    return parser
