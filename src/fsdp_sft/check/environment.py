"""Versions, variables and devices: what ranks must have in common, and what a bug report needs."""

import argparse
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fsdp_sft._process.devices import device_name, resolve_device
from fsdp_sft._process.gpus import GIB
from fsdp_sft._ranks.agree import all_gather_objects, is_distributed, this_rank, through_rank_0, world_size
from fsdp_sft._ranks.init import init_distributed
from fsdp_sft._ranks.launch import detect_launch
from fsdp_sft._ranks.words import said_ranks
from fsdp_sft.check.machines import CheckedJob, Found, Problem
from fsdp_sft.errors import printable

PACKAGES = ("fsdp-sft", "transformers", "safetensors", "huggingface-hub", "tokenizers", "numpy")
EXTRAS = ("peft", "datasets", "flash-attn", "torchao", "triton", "accelerate", "kernels")
# Variables that change what a rank computes, how ranks talk, or what files are found.
_MATTERS = re.compile(
    r"(NCCL|TORCH_NCCL|RCCL|GLOO|TORCH_GLOO|TORCH|PYTORCH|TORCHINDUCTOR|CUDA|CUBLAS|CUDNN|NVIDIA|OMP|MKL|KMP|GOMP"
    r"|OPENBLAS|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|FI|UCX|RDMAV|IB|MELLANOX|HSA|HIP|ROCR|MIOPEN|GPU|ZE|CCL"
    r"|ONEAPI|TRITON|FLASH|FSDP_SFT|SAFETENSORS|MALLOC|XLA|ASCEND|HCCL|TP_SOCKET)_[A-Z0-9_]*"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|PYTHONHASHSEED|(HTTPS?|ALL|NO)_PROXY|MASTER_(ADDR|PORT)"
    r"|(https?|all|no)_proxy"
)
# Those that a launcher gives each rank, or each node, a value of its own.
_OF_A_RANK = re.compile(
    r"\w*VISIBLE_DEVICES|\w*AFFINITY(_MASK)?|GPU_DEVICE_ORDINAL|TORCHELASTIC_\w*|NCCL_HOSTID|TORCH_TRACE|OMP_PLACES"
    r"|\w*CACHE_(DIR|PATH)|\w*CACHE|NCCL_DEBUG\w*|TORCH_NCCL_DEBUG_INFO_\w+|UCX_NET_DEVICES"
)
_SECRET = re.compile(
    r"TOKEN(?!IZER)|(?<!P)KEY|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|BEARER|SIGNATURE|(^|_)(PWD|PAT|SAS|SIG)(_|$)",
    re.IGNORECASE,
)
# What stands before the last "@" of an address, and what follows a "?": users, passwords and signatures.
_BEFORE_HOST = re.compile(r"^([A-Za-z][\w+.-]*://)?.*@", re.DOTALL)
_QUERY = re.compile(r"\?.*", re.DOTALL)
_MANY = 4  # values beside the usual one that are not listed
_FREE_WARNS, _FREE_FAILS = 0.95, 0.8  # of a device's memory; a context of our own takes a hundredth
_DRIVER = Path("/proc/driver/nvidia/version")
_REPORT_SECONDS = 120


def environment(job: CheckedJob) -> Found:
    """Whether ranks have the same versions and variables, and their devices' memory to themselves."""

    def own() -> dict[str, Any]:
        facts = {**versions(job.device), **variables()}
        return {"facts": facts, "memory": memory_of_device(job.device)}

    said, problems = through_rank_0("comparing environments", own, _compare)
    count = torch.accelerator.device_count()
    if job.context.launcher == "single" and count > 1:
        text = f"one of the {count} devices here is checked: start with torchrun --nproc-per-node {count}"
        problems.append(Problem("warn", (), text))
    return said, problems


def _compare(everyone: list[dict[str, Any]]) -> Found:
    """What was seen, and what is wrong, from what each rank has."""
    facts = [one["facts"] for one in everyone]
    known = {rank: one["memory"] for rank, one in enumerate(everyone) if one["memory"] is not None}
    parts = [f"{name} {facts[0][name]}" for name in ("torch", "transformers", "device")]
    if known:
        free, total = min(known.values())
        parts.append(f"{free / GIB:.1f} GiB free of {total / GIB:.1f}")
    return ", ".join(parts), [*_apart(facts), *_taken(known)]


def _apart(facts: list[dict[str, str]]) -> Iterator[Problem]:
    advice = "give all ranks the same image, and set variables in the job's script"
    for name, (usual, others) in minorities(facts).items():
        if len(others) >= _MANY:
            ranks = tuple(sorted(rank for some in others.values() for rank in some))
            yield Problem("warn", ranks, f"{name} has {len(others) + 1} values: if not on purpose, {advice}")
            continue
        for value, some in others.items():
            text = f"{name} is {value or 'not set'}, and {usual or 'not set'} elsewhere: {advice}"
            yield Problem("fail", tuple(some), text, exclude=name in ("device", "driver"))


def _taken(known: dict[int, tuple[int, int]]) -> Iterator[Problem]:
    """Devices whose memory others have, from (free, total) bytes by rank."""
    for rank, (free, total) in known.items():
        if free < _FREE_WARNS * total:
            text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB of its device's memory are free"
            text += ": another process has the rest; end it"
            yield Problem("fail" if free < _FREE_FAILS * total else "warn", (rank,), text, exclude=True)


def memory_of_device(device: torch.device) -> tuple[int, int] | None:
    """(free, total) bytes of an accelerator; None for the CPU, and where torch does not know it."""
    if device.type not in ("cpu", "meta"):
        with suppress(RuntimeError, NotImplementedError):
            free, total = torch.accelerator.get_memory_info(device)
            return int(free), int(total)
    return None


def versions(device: torch.device) -> dict[str, str]:
    """Versions and the kind of device of this rank, by name; what is not installed is "none"."""
    has_nccl = torch.distributed.is_nccl_available() and torch.cuda.is_available()
    driver = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text()) if _DRIVER.exists() else None
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: _installed(name) for name in PACKAGES},
        "CUDA": str(torch.version.cuda or "none"),
        "ROCm": str(torch.version.hip or "none"),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none",
        "driver": driver[0] if driver is not None else "not known",
        "device": device_name(device) or device.type,
        "processor": platform.machine(),
    }


def _installed(name: str) -> str:
    """The version of a package; of the module, if it has been imported and has one."""
    imported = getattr(sys.modules.get(name.replace("-", "_")), "__version__", None)
    try:
        return str(imported or version(name))
    except PackageNotFoundError:
        return "none"


def variables() -> dict[str, str]:
    """The variables of this rank that matter, as they may be shown, without those that differ on purpose."""
    return {
        name: shown(name, value)
        for name, value in sorted(os.environ.items())
        if _MATTERS.fullmatch(name) and not _OF_A_RANK.fullmatch(name)
    }


def shown(name: str, value: str) -> str:
    """The value of a variable as it may be shown, in a line: never that of a token, a key or a password."""
    if _SECRET.search(name):
        return "set, not shown"
    cut = _QUERY.sub("?***", _BEFORE_HOST.sub(lambda found: f"{found[1] or ''}***@", value))
    return "".join(letter if letter.isprintable() else " " for letter in cut) or "''"


def host_name() -> str:
    """This host by the name that ``--exclude`` takes: nodes of Slurm may have no domain where hosts do."""
    host, node = socket.gethostname(), os.environ.get("SLURMD_NODENAME")
    return node if node and host.startswith(f"{node}.") else host


def minorities(
    everyone: Sequence[Mapping[str, str]],
) -> dict[str, tuple[str | None, dict[str | None, list[int]]]]:
    """What ranks have not in common.

    Args:
        everyone: The facts of each rank, in rank order.

    Returns:
        By fact: what most ranks have, None for nothing at all, and each other value with its ranks. With two
        values of as many ranks, that of rank 0 counts as what most have.
    """
    found = {}
    for name in sorted({name for facts in everyone for name in facts}):
        by_value: dict[str | None, list[int]] = {}
        for rank, facts in enumerate(everyone):
            by_value.setdefault(facts.get(name), []).append(rank)
        # The first of several values of as many ranks is that of the lowest rank.
        most = max(by_value.items(), key=lambda pair: len(pair[1]))[0]
        del by_value[most]
        if by_value:
            found[name] = (most, by_value)
    return found


def env(args: argparse.Namespace) -> int:
    """Print versions, devices, launcher and variables of all ranks, on rank 0.

    Returns:
        0: that ranks differ is shown, and not judged.

    Collective: all ranks.
    """
    context, launcher = None, "none"
    try:
        if is_distributed() or detect_launch().world_size > 1:
            context = init_distributed(timeout=_REPORT_SECONDS)
            launcher = f"{context.launcher}, {context.backend}"
    except ValueError as error:  # the report is needed all the more
        launcher = f"cannot be used: {error}"
    device = context.device if context is not None else resolve_device(None)
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    usable = len(affinity(0)) if affinity is not None else os.cpu_count()
    memory = memory_of_device(device)
    own = {
        "versions": {
            **versions(device),
            **{name: known for name in EXTRAS if (known := _installed(name)) != "none"},
        },
        "job": {"launcher": launcher, "ranks": str(world_size())},
        "machine": {
            "host": host_name(),
            "system": f"{platform.system()} {platform.release()}",
            "processors": f"{usable} of {os.cpu_count()} usable",
            **({} if memory is None else {"memory": f"{memory[1] / GIB:.1f} GiB"}),
        },
        "variables": variables(),
    }
    everyone = all_gather_objects(own)
    if this_rank() == 0:
        print(json.dumps({"ranks": everyone}, indent=1) if args.json else _text(everyone), flush=True)
    all_gather_objects(None)  # a launcher ends the job when its first rank has left
    return 0


def _text(everyone: list[dict[str, dict[str, str]]]) -> str:
    lines: list[str] = []
    for section in everyone[0]:
        facts = [one[section] for one in everyone]
        apart, names = minorities(facts), sorted({name for one in facts for name in one})
        width = max(map(len, names), default=0)
        lines.append(section)
        for name in names:
            usual, others = apart.get(name, (facts[0].get(name), {}))
            told = [f"{value or 'not set'} on {said_ranks(ranks)}" for value, ranks in others.items()]
            marked = f"  <- differs: {'; '.join(told)}" if told else ""
            lines.append(f"  {name:<{width}}  {usual or 'not set'}{marked}")
        lines.append("")
    return printable("\n".join(map(str.rstrip, lines)).rstrip())
