"""The console script ``fsdp-sft``: plans, data and checkpoints from the shell.

Each command is in the package of its subject: ``plan`` in planner/command.py,
``inspect-checkpoint`` and ``convert`` in dcp_io/command.py, ``inspect-data`` in commands/data.py.
"""

import argparse

from fsdp_sft.commands.data import add_data

_EXAMPLES = """examples:
  fsdp-sft plan --model Qwen/Qwen2.5-14B --gpus 8 --gpu h100 --seq 4096 --global-batch 64
  fsdp-sft inspect-data chats.jsonl --tokenizer Qwen/Qwen2.5-14B --max-length 4096 --html rows.html
  fsdp-sft inspect-checkpoint checkpoints --verify
  fsdp-sft convert trainer/checkpoint-500 checkpoints --model meta-llama/Llama-3.1-8B"""


def main(arguments: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0 if all is well, 1 if not (nothing fits, a checkpoint is damaged), 2 for bad input.
    """
    args = _parser().parse_args(arguments)
    return int(args.run(args))


def _parser() -> argparse.ArgumentParser:
    # Imported here and not at the top, so that importing this module stays cheap.
    from fsdp_sft.dcp_io.command import CONVERT, INSPECT, add_convert, add_inspect
    from fsdp_sft.planner.command import add_plan

    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="fsdp-sft",
        description="FSDP2 building blocks for supervised fine-tuning: what can be asked from the shell.",
        epilog=_EXAMPLES,
        formatter_class=layout,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_plan(
        commands.add_parser(
            "plan", help="what fits on the GPUs at hand, how fast it is, and where its memory goes"
        )
    )
    add_data(
        commands.add_parser(
            "inspect-data",
            help="what of a file of chats would be trained, and what is refused",
            formatter_class=layout,
        )
    )
    add_inspect(commands.add_parser("inspect-checkpoint", help=INSPECT, description=INSPECT))
    add_convert(commands.add_parser("convert", help=CONVERT, description=CONVERT))
    return parser
