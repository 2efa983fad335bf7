"""Versions, devices, launcher and variables of a rank: what ranks must have in common, and a bug report."""

import hashlib
import os
import platform
import re
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from fsdp_sft._process.devices import device_name

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
_HIDDEN = "set, not shown"


def versions(device: torch.device) -> dict[str, str]:
    """Versions and the kind of device of this rank, by name; what is not installed is "none"."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        **{name: _installed(name) for name in PACKAGES},
        "CUDA": str(torch.version.cuda or "none"),
        "ROCm": str(torch.version.hip or "none"),
        "NCCL": _nccl(),
        "device": device_name(device) or device.type,
        "processor": platform.machine(),
    }


def extras() -> dict[str, str]:
    """Versions of what is optional, as far as it is installed."""
    return {name: known for name in EXTRAS if (known := _installed(name)) != "none"}


def variables() -> dict[str, str]:
    """The variables of this rank that matter, without those that differ on purpose; see ``shown``."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if _MATTERS.fullmatch(name) and not _OF_A_RANK.fullmatch(name)
    }


def shown(name: str, value: str) -> str:
    """The value of a variable as it may be shown, in a line: never that of a token, a key or a password."""
    if _SECRET.search(name):
        return _HIDDEN
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


def said(comparable_value: str) -> str:
    """What may be shown of a value of ``comparable``."""
    return comparable_value.partition("\0")[0]


def place() -> dict[str, str]:
    """Where this rank is: host, system, processors."""
    return {
        "host": _host(),
        "system": f"{platform.system()} {platform.release()}",
        "processors": f"{usable_processors()} of {os.cpu_count()} usable",
    }


def _host() -> str:
    """This host by the name that ``--exclude`` takes: nodes of Slurm may have no domain where hosts do."""
    host, node = socket.gethostname(), os.environ.get("SLURMD_NODENAME")
    return node if node and host.startswith(f"{node}.") else host


def usable_processors() -> int:
    """Processors on which this process may run."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


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
        if len(counts) > 1:
            others: dict[str | None, list[int]] = {}
            for rank, value in enumerate(values):
                if value != most:
                    others.setdefault(value, []).append(rank)
            found[name] = (most, others)
    return found


def _installed(name: str) -> str:
    """The version of a package; also that of the module, if another one has been imported."""
    try:
        known = version(name)
    except PackageNotFoundError:
        known = "none"
    module: Any = sys.modules.get(name.replace("-", "_"))
    imported = getattr(module, "__version__", None)
    if imported is None or str(imported) == known:
        return known
    return str(imported) if known == "none" else f"{known} (imported: {imported})"


def _nccl() -> str:
    if not torch.distributed.is_nccl_available() or not torch.cuda.is_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))
