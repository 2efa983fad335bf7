"""``fsdp-sft env``: what a bug report needs, on all ranks, with their differences marked."""

import argparse
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from fsdp_sft._process.devices import resolve_device
from fsdp_sft._process.gpus import GIB
from fsdp_sft._ranks.agree import all_gather_objects, is_distributed, this_rank, world_size
from fsdp_sft._ranks.init import init_distributed
from fsdp_sft._ranks.launch import detect_launch
from fsdp_sft._ranks.words import said_ranks
from fsdp_sft.check.device_memory import memory_of_device
from fsdp_sft.check.environment import comparable, extras, minorities, place, said, variables, versions
from fsdp_sft.errors import printable

_TIMEOUT = timedelta(minutes=2)
_DIFFERS = "  <- differs: "


def env(args: argparse.Namespace) -> int:
    """Print versions, devices, launcher and variables of all ranks, on rank 0.

    Returns:
        0: that ranks differ is shown, and not judged.

    Collective: all ranks.
    """
    context, launcher = None, "none"
    try:
        if is_distributed() or detect_launch().world_size > 1:
            context = init_distributed(timeout=_TIMEOUT)
            launcher = f"{context.launcher}, {context.backend}"
    except ValueError as error:  # the report is needed all the more
        launcher = f"cannot be used: {error}"
    device = context.device if context is not None else resolve_device(None)
    everyone = all_gather_objects(_facts(device, {"launcher": launcher}))
    if this_rank() == 0:
        print(json.dumps(_as_json(everyone), indent=1) if args.json else _text(everyone), flush=True)
    all_gather_objects(None)  # a launcher ends the job when its first rank has left
    return 0


def _facts(device: torch.device, launcher: dict[str, str]) -> dict[str, dict[str, str]]:
    """What is known of this rank, by section; all values are ``comparable``."""
    memory = memory_of_device(device)
    shown_memory = {} if memory is None else {"memory": f"{memory[1] / GIB:.1f} GiB"}
    return {
        "versions": {**versions(device), **extras()},
        "job": {**launcher, "ranks": str(world_size())},
        "machine": {**place(), **shown_memory},
        "variables": {name: comparable(name, value) for name, value in variables().items()},
    }


def _text(everyone: list[dict[str, dict[str, str]]]) -> str:
    lines: list[str] = []
    for section in everyone[0]:
        facts = [one[section] for one in everyone]
        lines += [section, *_section(facts), ""]
    return printable("\n".join(lines).rstrip())


def _section(facts: list[dict[str, str]]) -> Iterator[str]:
    apart = minorities(facts)
    names = sorted({name for one in facts for name in one})
    width = max(map(len, names), default=0)
    for name in names:
        usual = apart[name][0] if name in apart else facts[0][name]
        others = apart[name][1].items() if name in apart else ()
        marked = "; ".join(f"{_shown(value)} on {said_ranks(ranks)}" for value, ranks in others)
        yield f"  {name:<{width}}  {_shown(usual)}{_DIFFERS + marked if marked else ''}".rstrip()


def _shown(value: str | None) -> str:
    return "not set" if value is None else said(value)


def _as_json(everyone: list[dict[str, dict[str, str]]]) -> dict[str, Any]:
    """The facts of each rank, and the names of those in which ranks differ."""
    apart = {section: sorted(minorities([one[section] for one in everyone])) for section in everyone[0]}
    ranks = [
        {part: {name: said(value) for name, value in facts.items()} for part, facts in one.items()}
        for one in everyone
    ]
    return {"ranks": ranks, "differ": {section: names for section, names in apart.items() if names}}
