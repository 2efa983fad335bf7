"""The options of ``fsdp-sft check`` and ``fsdp-sft env``; what they do is in check/."""

import argparse
from pathlib import Path

_CHECK = """Whether the machines of a job, and this library on them, are sound, and how fast they are: two
minutes under the job's own launcher, one process per GPU, before the booked hours begin."""
_CHECK_EXAMPLES = """examples:
  torchrun --nproc-per-node 8 -m fsdp_sft check --model Qwen/Qwen2.5-14B --root checkpoints
  srun fsdp-sft check --root /shared/run --json check.json

exit code: 0 if all is well, 1 if something is wrong, 2 if the checks cannot run"""
_CHECKS = ("environment", "products", "reductions", "network", "folder", "parity")
_ENV = "Versions, devices, launcher and variables, on all ranks, differences marked: what a bug report needs."


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``check``."""
    parser.description, parser.epilog = _CHECK, _CHECK_EXAMPLES
    parser.set_defaults(run="check.command:check")
    add = parser.add_argument
    add("--model", help="folder with a config.json, or a Hub id; no weights are read; default: a Llama")
    add("--root", type=Path, help="folder of the run, which all nodes see; default: none, or a temporary one")
    add("--json", type=Path, default=Path("check.json"), metavar="FILE", help="default: check.json")
    add("--only", nargs="+", metavar="CHECK", choices=_CHECKS, help=f"of {', '.join(_CHECKS)}, these alone")
    add = parser.add_argument_group("the training, for parity").add_argument
    add("--replicas", type=int, default=1, help="replicas of the sharded model (HSDP)")
    add("--cp", type=int, default=1, help="ranks that share each row")
    add("--ep", type=int, default=1, help="ranks that share out the experts of each layer")
    add("--compile", action="store_true", help="the blocks are compiled")
    add(
        "--frozen",
        choices=("bfloat16", "nf4", "fp8"),
        help="dtype of a frozen base, below adapters (needs peft)",
    )


def add_env(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``env``."""
    parser.description = _ENV
    parser.set_defaults(run="check:env")
    parser.add_argument("--json", action="store_true", help="print it as JSON, and nothing else")
