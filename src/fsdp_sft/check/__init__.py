"""Whether a job's machines, and this library on them, are sound: ``fsdp-sft check``.

A check is a function ``job -> (what was seen, problems)`` that all ranks call. Here are the job and the first
check: what versions, variables and devices ranks have in common, which ``fsdp-sft env`` shows for a bug
report. ``machines.py`` has ``products``, ``reductions``, ``network`` and ``folder``, ``parity.py`` the
training, and ``command.py`` calls them in turn and prints a table.
"""

import argparse
import json
import os
import platform
import re
import socket
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from fsdp_sft._process.devices import device_name, resolve_device
from fsdp_sft._process.gpus import GIB
from fsdp_sft._ranks.agree import (
    all_gather_objects,
    said_ranks,
    this_rank,
    world_size,
)
from fsdp_sft._ranks.init import DistributedContext, detect_launch, init_distributed
from fsdp_sft.errors import printable

# Accelerators that compute beside the host, at a rate that does not depend on how busy it is.
ACCELERATORS = ("cuda", "xpu", "hpu", "npu", "mtia")


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes:
        level: ``"fail"``: the job would fail, or train wrongly or slowly. ``"warn"``: worth a look.
        ranks: The ranks that have it; () if it is not of single ranks.
        text: What is wrong and what to do.
        exclude: Whether the job would be well without the nodes of these ranks.
    """

    level: Literal["fail", "warn"]
    ranks: tuple[int, ...]
    text: str
    exclude: bool = False


# What a check returns, the same on all ranks: what was seen, in a few words, and what is wrong.
Found = tuple[str, list[Problem]]


@dataclass
class CheckedJob:
    """The ranks of a job, and the training that is checked.

    Attributes:
        context: This rank's place.
        hosts: The host of each rank.
        config: A transformers config of few layers.
        mesh: The mesh of the training, a ``DeviceMesh``.
        frozen_dtype: As ``shard_model(frozen_dtype=)``, below adapters; None trains all parameters.
        sharded: Function of a checkpoint's folder and a dtype: the model as it is trained, computing in this
            dtype; all ranks call it.
        folder: A new folder for files, which all ranks see; None without.
        measured: Rates and sizes, for ``check.json``.
    """

    context: DistributedContext
    hosts: list[str]
    config: Any = None
    mesh: Any = None
    frozen_dtype: str | None = None
    sharded: Any = None
    folder: Path | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def is_accelerated(self) -> bool:
        """Whether each rank has a device of its own, whose rate says something of the device."""
        return self.context.device.type in ACCELERATORS

    def hosts_of(self, ranks: tuple[int, ...]) -> list[str]:
        """The hosts of some ranks, each once."""
        return sorted({self.hosts[rank] for rank in ranks})


# --- environment ----------------------------------------------------------------------------------------

PACKAGES = (
    *(
        "fsdp-sft",
        "transformers",
        "safetensors",
        "huggingface-hub",
        "tokenizers",
        "numpy",
        "peft",
        "datasets",
    ),
    *("flash-attn", "torchao", "triton", "accelerate", "kernels"),
)
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
    own = {**versions(job.context.device), **variables()}
    everyone = all_gather_objects((own, memory_of_device(job.context.device)))
    known = {rank: memory for rank, (_, memory) in enumerate(everyone) if memory is not None}
    problems = [*_apart([facts for facts, _ in everyone]), *_taken(known)]
    count = torch.accelerator.device_count()
    if job.context.launcher == "single" and count > 1:
        text = f"one of the {count} devices here is checked: start with torchrun --nproc-per-node {count}"
        problems.append(Problem("warn", (), text))
    said = ", ".join(f"{name} {everyone[0][0][name]}" for name in ("torch", "transformers", "device"))
    return said, problems


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
            text = (
                f"{free / GIB:.1f} of {total / GIB:.1f} GiB of its device's memory are free: another process "
                "has the rest; end it"
            )
            yield Problem("fail" if free < _FREE_FAILS * total else "warn", (rank,), text, exclude=True)


def memory_of_device(device: torch.device) -> tuple[int, int] | None:
    """(free, total) bytes of an accelerator; None for the CPU, and where torch does not know it."""
    if device.type not in ("cpu", "meta"):
        with suppress(RuntimeError, NotImplementedError):
            return torch.accelerator.get_memory_info(device)
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
        values = [facts.get(name) for facts in everyone]
        usual = statistics.mode(values)  # of several values of as many ranks the first
        others = {
            value: [rank for rank, own in enumerate(values) if own == value]
            for value in dict.fromkeys(values)
            if value != usual
        }
        if others:
            found[name] = (usual, others)
    return found


def env(args: argparse.Namespace) -> int:
    """Print versions, devices, launcher and variables of all ranks, on rank 0.

    Returns:
        0: that ranks differ is shown, and not judged.

    Collective: all ranks.
    """
    context, launcher = None, "none"
    try:
        if world_size() > 1 or detect_launch().world_size > 1:
            context = init_distributed(timeout=_REPORT_SECONDS)
            launcher = f"{context.launcher}, {context.backend}"
    except ValueError as error:  # the report is needed all the more
        launcher = f"cannot be used: {error}"
    device = context.device if context is not None else resolve_device(None)
    memory = memory_of_device(device)
    own = {
        "versions": versions(device),
        "job": {"launcher": launcher, "ranks": str(world_size())},
        "machine": {
            "host": host_name(),
            "system": f"{platform.system()} {platform.release()}",
            "processors": f"{os.cpu_count()}, of which torch uses {torch.get_num_threads()}",
            "memory of a device": "not known" if memory is None else f"{memory[1] / GIB:.1f} GiB",
        },
        "variables": variables(),
    }
    everyone = all_gather_objects(own)
    if this_rank() == 0:
        text = json.dumps({"ranks": everyone}, indent=1) if args.json else "\n".join(_text(everyone))
        print(printable(text), flush=True)
    all_gather_objects(None)  # a launcher ends the job when its first rank has left
    return 0


def _text(everyone: list[dict[str, dict[str, str]]]) -> Iterator[str]:
    for section in everyone[0]:
        facts = [one[section] for one in everyone]
        apart = minorities(facts)
        yield section
        for name in sorted({name for one in facts for name in one}):
            usual, others = apart.get(name, (facts[0].get(name), {}))
            told = "; ".join(
                f"{value or 'not set'} on {said_ranks(ranks)}" for value, ranks in others.items()
            )
            yield f"  {name:<24}  {usual or 'not set'}{told and f'  <- differs: {told}'}"
        yield ""
