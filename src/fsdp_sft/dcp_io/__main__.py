"""``python -m fsdp_sft.dcp_io``: look at checkpoints, convert those of other tools."""

import argparse
import sys

from fsdp_sft.dcp_io.command import CONVERT, INSPECT, add_convert, add_inspect


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 0 if all is well, 1 if a checkpoint is not sound, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m fsdp_sft.dcp_io", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add_inspect(commands.add_parser("inspect", help=INSPECT))
    add_convert(commands.add_parser("convert", help=CONVERT))
    args = parser.parse_args(arguments)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
