"""The console script ``fsdp-sft``: plans, data and machines from the shell.

Each command has its options in a file here, which imports nothing heavy, and what it does in the package of
its subject: planner/command.py, check/command.py; ``inspect-data`` has both in data.py.
"""

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module

from fsdp_sft.errors import CheckpointCorruptError, FsdpSftError, NoPlanError, printable

_EXAMPLES = """examples:
  fsdp-sft plan --model Qwen/Qwen2.5-14B --gpus 8 --gpu h100 --seq 4096 --global-batch 64
  fsdp-sft inspect-data chats.jsonl --tokenizer Qwen/Qwen2.5-14B --max-length 4096 --html rows.html
  torchrun --nproc-per-node 8 -m fsdp_sft check --root checkpoints

exit code: 0 if all is well, 1 if not (nothing fits, a checkpoint or a machine is damaged), 2 for bad input"""
# By name: the module and the function that adds the options, and the line in the list of commands.
_COMMANDS = {
    "plan": ("plan", "add_plan", "what fits on the GPUs at hand, how fast it is, and where its memory goes"),
    "inspect-data": ("data", "add_data", "what of a file of chats would be trained, and what is refused"),
    "check": ("check", "add_check", "whether a job's machines are sound, and how fast; under its launcher"),
    "env": ("check", "add_env", "versions, devices, launcher and variables of all ranks, for a bug report"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0 if all is well, 1 if not (nothing fits, a checkpoint is damaged), 2 for bad input.
    """
    given = sys.argv[1:] if arguments is None else arguments
    args = _parser(given).parse_args(given)
    module, _, function = args.run.partition(":")  # imported now, so that help comes at once
    return _guarded(lambda: int(getattr(import_module(f"fsdp_sft.{module}"), function)(args)))


def _parser(given: list[str]) -> argparse.ArgumentParser:
    """The parser, with the options of the command that is asked for."""
    from fsdp_sft import __version__

    parser = argparse.ArgumentParser(
        prog="fsdp-sft",
        description="FSDP2 building blocks for supervised fine-tuning: what can be asked from the shell.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fsdp-sft {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((word for word in given if not word.startswith("-")), None)
    for name, (module, function, says) in _COMMANDS.items():
        own = commands.add_parser(
            name, help=says, description=says, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == asked:
            getattr(import_module(f"fsdp_sft.commands.{module}"), function)(own)
    return parser


def _guarded(run: Callable[[], int]) -> int:
    """The exit code of a command, with errors printed."""
    try:
        code = run()
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
