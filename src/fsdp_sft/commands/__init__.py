"""The console script ``fsdp-sft``: plans, data and machines from the shell.

Each command has its options in options.py, and what it does in the package of its subject:
planner/command.py, check/command.py, check/__init__.py, and data.py here.
"""

import argparse
import os
import sys
from importlib import import_module

from fsdp_sft.commands.options import COMMANDS
from fsdp_sft.errors import CheckpointCorruptError, FsdpSftError, NoPlanError, printable

_EXAMPLES = """examples:
  fsdp-sft plan --model Qwen/Qwen2.5-14B --gpus 8 --gpu h100 --seq 4096 --global-batch 64
  fsdp-sft inspect-data chats.jsonl --tokenizer Qwen/Qwen2.5-14B --max-length 4096 --html rows.html
  torchrun --nproc-per-node 8 -m fsdp_sft check --root checkpoints

exit code: 0 if all is well, 1 if not (nothing fits, a checkpoint or a machine is damaged), 2 for bad input"""


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
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=command.says,
            description=command.says,
            epilog=command.epilog,
            formatter_class=parser.formatter_class,
        )
        flags: dict[str, str] = {}  # by what an option is called in messages, where that is not its name
        for title, options in command.options.items():
            group = own.add_argument_group(title) if title else own
            for option, settings in options.items():
                dest = group.add_argument(option, **settings).dest
                flags |= {dest: option} if option not in (dest, f"--{dest}") else {}
        own.set_defaults(run=command.runs, flags=flags)
    return parser
