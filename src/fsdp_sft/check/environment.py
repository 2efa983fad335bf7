"""Versions, variables, clocks and devices: what ranks must have in common, and what a bug report needs."""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import statistics
import sys
import time
from collections import Counter
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
from fsdp_sft.check.job import CheckedJob, Found, Problem
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
_CLOCK_WARNS, _CLOCK_FAILS = 1.0, 2.5  # seconds; machines that ask a time server agree within 0.01
_READINGS = 7  # of the clock: the one at which a rank was least late counts
_LEAST_SHARED = 1 * GIB  # of /dev/shm: loaders and NCCL put what they share there
_FREE_WARNS, _FREE_FAILS = 0.95, 0.8  # of a device's memory; a context of our own takes a hundredth
# Reasons for lower clocks that a healthy GPU does not have: https://docs.nvidia.com/deploy/nvml-api/. A cap
# on power (0x4) is normal under load.
_SLOWED = {0x8: "hardware slowdown", 0x40: "heat (hardware)", 0x20: "heat (software)", 0x80: "power brake"}
_REPORT_SECONDS = 120


def environment(job: CheckedJob) -> Found:
    """Whether ranks have the same versions and variables, clocks that agree, and free, sound devices."""
    clocks = []
    for _ in range(_READINGS):
        all_gather_objects(None)  # all ranks leave it at about the same time
        clocks.append(time.time())

    def own() -> dict[str, Any]:
        shared, faults = Path("/dev/shm"), driver_and_faults(job.device)
        return {
            "facts": {**versions(job.device), **variables()},
            "clocks": clocks,
            "shared": shutil.disk_usage(shared).free if shared.is_dir() else None,
            "memory": memory_of_device(job.device),
            "faults": None if faults is None else faults[1],
        }

    said, measured, problems = through_rank_0("comparing environments", own, _compare)
    job.measured.update(measured)
    count = torch.accelerator.device_count()
    if job.context.launcher == "single" and count > 1:
        text = f"one of the {count} devices here is checked: start with torchrun --nproc-per-node {count}"
        problems.append(Problem("warn", (), text))
    return said, problems


def _compare(everyone: list[dict[str, Any]]) -> tuple[str, dict[str, Any], list[Problem]]:
    """(what was seen, what was measured, what is wrong) from what each rank has."""
    facts, skews = [one["facts"] for one in everyone], _skews([one["clocks"] for one in everyone])
    problems = [*_apart(facts), *_late(skews), *_devices(everyone)]
    parts = [f"{name} {facts[0][name]}" for name in ("torch", "transformers", "device")]
    parts.append(f"clocks within {max(0.01, *map(abs, skews)):.2f} s")
    known = [one["memory"] for one in everyone if one["memory"] is not None]
    if known:
        free, total = (min(one[place] for one in known) for place in (0, 1))
        parts.append(f"{free / GIB:.1f} GiB free of {total / GIB:.1f}")
    if known and any(one["faults"] is None for one in everyone):
        parts[-1] += "; not seen: faults of devices (no nvidia-ml-py)"
    return ", ".join(parts), {"memory_bytes": total} if known else {}, problems


def _apart(facts: list[dict[str, str]]) -> Iterator[Problem]:
    advice = "give all ranks the same image, and set variables in the job's script"
    for name, (usual, others) in minorities(facts).items():
        if len(others) >= _MANY:
            ranks = tuple(sorted(rank for some in others.values() for rank in some))
            yield Problem("warn", ranks, f"{name} has {len(others) + 1} values: if not on purpose, {advice}")
            continue
        for value, some in others.items():
            text = f"{name} is {_shown(value)}, and {_shown(usual)} elsewhere: {advice}"
            yield Problem("fail", tuple(some), text, exclude=name in ("device", "driver"))


def _skews(clocks: list[list[float]]) -> list[float]:
    """Seconds by which each rank's clock is off that of most: at the reading at which it is least off.

    Of two ranks nobody can say which is off: the second is held against the first.
    """
    usual = [one[0] if len(one) < 3 else statistics.median_low(one) for one in zip(*clocks, strict=True)]
    return [min((now - mean for now, mean in zip(own, usual, strict=True)), key=abs) for own in clocks]


def _late(skews: list[float]) -> Iterator[Problem]:
    for rank, skew in enumerate(skews):
        if abs(skew) > _CLOCK_WARNS:
            way = "ahead of" if skew > 0 else "behind"
            text = f"its clock is {abs(skew):.1f} s {way} the others: start a time service (chronyd) there"
            yield Problem("fail" if abs(skew) > _CLOCK_FAILS else "warn", (rank,), text)


def _devices(everyone: list[dict[str, Any]]) -> Iterator[Problem]:
    for rank, one in enumerate(everyone):
        if one["shared"] is not None and one["shared"] < _LEAST_SHARED:
            text = f"/dev/shm has {one['shared'] / GIB:.2f} GiB free: workers of loaders fail there"
            yield Problem("warn", (rank,), f"{text}; give the container more (--shm-size, --ipc=host)")
        free, total = one["memory"] or (1, 1)
        if free < _FREE_WARNS * total:
            text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB of its device's memory are free"
            text += ": another process has the rest; end it"
            yield Problem("fail" if free < _FREE_FAILS * total else "warn", (rank,), text, exclude=True)
        for text in one["faults"] or ():
            yield Problem("fail", (rank,), text, exclude=True)


def memory_of_device(device: torch.device) -> tuple[int, int] | None:
    """(free, total) bytes of an accelerator; None for the CPU, and where torch does not know it."""
    if device.type not in ("cpu", "meta"):
        with suppress(RuntimeError, NotImplementedError):
            free, total = torch.accelerator.get_memory_info(device)
            return int(free), int(total)
    return None


def driver_and_faults(device: torch.device) -> tuple[str, list[str]] | None:
    """What NVIDIA's management library says of a GPU; None without ``nvidia-ml-py``."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        driver, handle = str(pynvml.nvmlSystemGetDriverVersion()), pynvml.nvmlDeviceGetHandleByUUID(name)
    except Exception:  # not installed, another vendor's driver, or a device that it does not show
        return None

    def ask(function: str, *arguments: Any) -> Any:
        with suppress(pynvml.NVMLError, AttributeError):  # not every GPU, nor every version, has it
            return getattr(pynvml, function)(handle, *arguments)
        return 0

    uncorrected = ask(
        "nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    )
    _, _, is_pending, has_failed = ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    slowed = ", ".join(why for bit, why in _SLOWED.items() if reasons & bit)
    said = {
        f"{uncorrected} uncorrected memory errors: reset the GPU, or replace it": uncorrected,
        "a row of its memory could not be replaced: replace the GPU": has_failed,
        "rows of its memory wait to be replaced: reset the GPU": is_pending,
        f"its clocks are lowered by {slowed}: look at cooling and power": slowed,
    }
    return driver, [text for text, is_so in said.items() if is_so]


def versions(device: torch.device) -> dict[str, str]:
    """Versions and the kind of device of this rank, by name; what is not installed is "none"."""
    has_nccl = torch.distributed.is_nccl_available() and torch.cuda.is_available()
    driver = driver_and_faults(device)
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: _installed(name) for name in PACKAGES},
        "CUDA": str(torch.version.cuda or "none"),
        "ROCm": str(torch.version.hip or "none"),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none",
        "driver": "not known" if driver is None else driver[0],
        "device": device_name(device) or device.type,
        "processor": platform.machine(),
    }


def _installed(name: str) -> str:
    """The version of a package; also that of the module, if another one has been imported."""
    try:
        known = version(name)
    except PackageNotFoundError:
        known = "none"
    imported = getattr(sys.modules.get(name.replace("-", "_")), "__version__", None)
    if imported is None or str(imported) == known:
        return known
    return str(imported) if known == "none" else f"{known} (imported: {imported})"


def variables() -> dict[str, str]:
    """The variables of this rank that matter, as ``comparable``, without those that differ on purpose."""
    return {
        name: comparable(name, value)
        for name, value in sorted(os.environ.items())
        if _MATTERS.fullmatch(name) and not _OF_A_RANK.fullmatch(name)
    }


def shown(name: str, value: str) -> str:
    """The value of a variable as it may be shown, in a line: never that of a token, a key or a password."""
    if _SECRET.search(name):
        return "set, not shown"
    cut = _QUERY.sub("?***", _BEFORE_HOST.sub(lambda found: f"{found[1] or ''}***@", value))
    return "".join(letter if letter.isprintable() else " " for letter in cut)


def comparable(name: str, value: str) -> str:
    """A value that is equal on two ranks if the variable is, and does not give a secret away.

    Digests stay in the memory of the job: what is printed or written is ``shown``.
    """
    hidden = shown(name, value)
    if hidden == value:
        return value
    return f"{hidden}\0{hashlib.sha256(value.encode(errors='replace')).hexdigest()}"


def _shown(value: str | None) -> str:
    """What may be shown of a value of ``comparable``."""
    return "not set" if value is None else value.partition("\0")[0]


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
        values: list[str | None] = [facts.get(name) for facts in everyone]
        counts = Counter(values)
        most = max(counts, key=lambda value: (counts[value], value == values[0]))
        others: dict[str | None, list[int]] = {}
        for rank, value in enumerate(values):
            if value != most:
                others.setdefault(value, []).append(rank)
        if others:
            found[name] = (most, others)
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
        facts = [
            {part: {name: _shown(value) for name, value in some.items()} for part, some in one.items()}
            for one in everyone
        ]
        print(json.dumps({"ranks": facts}, indent=1) if args.json else _text(everyone), flush=True)
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
            marked = "; ".join(f"{_shown(value)} on {said_ranks(ranks)}" for value, ranks in others.items())
            lines.append(f"  {name:<{width}}  {_shown(usual)}{'  <- differs: ' + marked if marked else ''}")
        lines.append("")
    return printable("\n".join(map(str.rstrip, lines)).rstrip())
