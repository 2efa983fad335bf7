"""The options of ``fsdp-sft inspect-checkpoint`` and ``convert``; what they do is in dcp_io/command.py."""

import argparse
from pathlib import Path

_FORMATS = ("auto", "accelerate", "dcp", "full")


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``inspect-checkpoint``."""
    parser.add_argument("path", type=Path, help="folder of one step, or of all steps")
    parser.add_argument("--verify", action="store_true", help="read every file and compare checksums")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON, and nothing else")
    parser.set_defaults(run=_inspect)


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``convert``."""
    parser.add_argument("source", type=Path, help="what the other tool has written")
    parser.add_argument("target", type=Path, help="folder of all steps, in which one is made")
    parser.add_argument("--model", required=True, help="folder with a config.json, or a Hub id; no weights")
    parser.add_argument("--format", choices=_FORMATS, default="auto", help="of the source; default: detected")
    parser.add_argument("--key-map", type=Path, help="JSON: the tool's name of a parameter to the model's")
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="also a torch.save file of the whole model (as data: no code is run)",
    )
    parser.set_defaults(run=_convert)


def _inspect(args: argparse.Namespace) -> int:
    from fsdp_sft.dcp_io.command import inspect

    return inspect(args)


def _convert(args: argparse.Namespace) -> int:
    from fsdp_sft.dcp_io.command import convert

    return convert(args)
