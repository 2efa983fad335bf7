"""The options of ``fsdp-sft inspect-checkpoint``; what it does is in dcp_io/inspect.py."""

import argparse
import json
from pathlib import Path


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``inspect-checkpoint``."""
    parser.add_argument("path", type=Path, help="folder of one step, or of all steps")
    parser.add_argument("--verify", action="store_true", help="read every file and compare checksums")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON, and nothing else")
    parser.set_defaults(run=_inspect)


def _inspect(args: argparse.Namespace) -> int:
    """Describe a step, or list the steps below a root; 1 if something is not sound."""
    from fsdp_sft.dcp_io.inspect import inspect_checkpoint

    found = inspect_checkpoint(args.path, hashes=args.verify)
    print(json.dumps(found.facts, indent=1) if args.json else found.text)
    return 0 if found.sound else 1
