"""``python -m fsdp_sft.planner``: the same as ``fsdp-sft plan``."""

import argparse
import sys

from fsdp_sft.planner.command import add_plan, run


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0 if something fits, 1 if nothing does, 2 for bad input.
    """
    parser = argparse.ArgumentParser(prog="python -m fsdp_sft.planner")
    add_plan(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
