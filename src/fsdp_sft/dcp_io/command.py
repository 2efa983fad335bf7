"""What ``fsdp-sft inspect-checkpoint`` and ``convert`` do; their options are in commands/checkpoints.py."""

import argparse
import json
from typing import Any

from fsdp_sft._model.configs import config_of
from fsdp_sft.dcp_io.convert import convert_checkpoint
from fsdp_sft.dcp_io.inspect import inspect_checkpoint


def inspect(args: argparse.Namespace) -> int:
    """Describe a step, or list the steps below a root; 1 if something is not sound."""
    found = inspect_checkpoint(args.path, hashes=args.verify)
    print(json.dumps(found.facts, indent=1) if args.json else found.text)
    return 0 if found.sound else 1


def convert(args: argparse.Namespace) -> int:
    """Convert another tool's checkpoint."""
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
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)
