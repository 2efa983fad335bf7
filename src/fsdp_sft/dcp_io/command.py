"""The command lines for checkpoints: inspect, convert from other tools."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_sft.dcp_io.convert import convert_checkpoint
from fsdp_sft.dcp_io.foreign.open import FORMATS
from fsdp_sft.dcp_io.inspect import inspect_checkpoint
from fsdp_sft.errors import FsdpSftError, printable

INSPECT = "what a step or a folder of steps holds, and what is wrong"
CONVERT = "from Accelerate, Trainer, torchtitan, torchtune, torch's distributed checkpoint"


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``inspect``."""
    parser.add_argument("path", type=Path, help="folder of one step, or of all steps")
    parser.add_argument("--verify", action="store_true", help="read every file and compare checksums")
    parser.set_defaults(run=_guarded(_inspect))


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``convert``."""
    parser.add_argument("source", type=Path, help="what the other tool has written")
    parser.add_argument("target", type=Path, help="folder of all steps")
    parser.add_argument("--model", required=True, help="folder with a config.json, or a Hub id; no weights")
    parser.add_argument("--format", choices=FORMATS, default="auto", help="whose it is; default: found out")
    parser.add_argument("--key-map", type=Path, help="JSON: the tool's name of a parameter to the model's")
    parser.add_argument("--allow-pickle", action="store_true", help="read whole files of torch.save")
    parser.set_defaults(run=_guarded(_convert))


def _guarded(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """``run`` with errors printed: it returns 1 for a damaged or unfit checkpoint and 2 for bad input."""

    def guarded(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except (FsdpSftError, ValueError, OSError) as error:
            print(printable(f"error: {error}"), file=sys.stderr)
            return 1 if isinstance(error, FsdpSftError) else 2

    return guarded


def _inspect(args: argparse.Namespace) -> int:
    text, sound = inspect_checkpoint(args.path, hashes=args.verify)
    print(text)
    return 0 if sound else 1


def _convert(args: argparse.Namespace) -> int:
    path = convert_checkpoint(
        args.source,
        args.target,
        model=_model(args.model),
        format=args.format,
        key_map=json.loads(args.key_map.read_text()) if args.key_map else None,
        allow_pickle=args.allow_pickle,
    )
    print(f"{path} is written")
    return 0


def _model(name: str) -> Any:
    """A model without memory for the config of a folder or a Hub id."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
