"""``python -m fsdp_sft.dcp_io``: look at checkpoints, mend a lost manifest, convert those of other tools."""

import argparse
import json
import sys
from pathlib import Path

from fsdp_sft.dcp_io.convert import convert_checkpoint
from fsdp_sft.dcp_io.foreign.open import FORMATS
from fsdp_sft.dcp_io.inspect import inspect_checkpoint
from fsdp_sft.dcp_io.rebuild import rebuild_manifest
from fsdp_sft.errors import FsdpSftError


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 0 if all is well, 1 if a checkpoint is not, 2 for bad input."""
    args = _parser().parse_args(arguments)
    try:
        return _run(args)
    except FsdpSftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    if args.command == "inspect":
        text, sound = inspect_checkpoint(args.path, hashes=args.verify)
        print(text)
        return 0 if sound else 1
    if args.command == "rebuild":
        compared = rebuild_manifest(args.path)
        how = "compared with the checksums of the save" if compared else "as they are: no checksums were left"
        print(f"{args.path}: the manifest is there again; the files were taken {how}")
        return 0
    key_map = json.loads(args.key_map.read_text()) if args.key_map else None
    path = convert_checkpoint(
        args.source,
        args.target,
        model=_model(args.model),
        format=args.format,
        key_map=key_map,
        allow_pickle=args.allow_pickle,
    )
    print(f"{path} is written")
    return 0


def _model(name: str):  # type: ignore[no-untyped-def]
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fsdp_sft.dcp_io", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    look = commands.add_parser("inspect", help="what a step or a folder of steps holds, and what is wrong")
    look.add_argument("path", type=Path)
    look.add_argument("--verify", action="store_true", help="read every file and compare checksums")
    mend = commands.add_parser("rebuild", help="write a lost or damaged manifest again, from the files")
    mend.add_argument("path", type=Path, help="folder of one step")
    convert = commands.add_parser(
        "convert", help="from Accelerate, Trainer, torchtitan, torchtune, torch's distributed checkpoint"
    )
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path, help="folder of all steps")
    convert.add_argument("--model", required=True, help="folder with a config.json, or a Hub id; no weights")
    convert.add_argument("--format", choices=FORMATS, default="auto")
    convert.add_argument("--key-map", type=Path, help="JSON: the tool's name of a parameter to the model's")
    convert.add_argument("--allow-pickle", action="store_true", help="read whole files of torch.save")
    return parser


if __name__ == "__main__":
    sys.exit(main())
