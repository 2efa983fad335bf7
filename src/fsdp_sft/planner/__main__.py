"""``python -m fsdp_sft.planner``: the same as ``fsdp-sft plan``."""

import argparse
import sys

from fsdp_sft.planner.command import DESCRIPTION, EXAMPLES, add_arguments, run


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0 if something fits, 1 if nothing does, 2 for bad input.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_sft.planner",
        description=DESCRIPTION,
        epilog=EXAMPLES.replace("fsdp-sft plan", "python -m fsdp_sft.planner"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
