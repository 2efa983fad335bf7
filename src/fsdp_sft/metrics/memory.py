"""Memory of this process on a device, now and at its peak."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from fsdp_sft.metrics.flops import resolve_device

_PROC_STATUS = Path("/proc/self/status")
_PROC_CLEAR_REFS = Path("/proc/self/clear_refs")


def memory_stats(device: torch.device | str | int | None = None) -> dict[str, int]:
    """Memory in use by this process, of one device.

    Args:
        device: A CUDA or CPU device; None means the current CUDA device if there is one, otherwise the CPU.

    Returns:
        CUDA: `peak_allocated_bytes`, `peak_reserved_bytes` (since the start or `reset_peak_memory`),
        `allocated_bytes` (tensors now), `total_bytes` (of the device), `num_alloc_retries` (a count: how
        often the caching allocator had to free its cache; more than a few in a run: memory is too tight).
        CPU: `peak_resident_bytes` and `resident_bytes` of the process. Where there is no /proc (macOS),
        `resident_bytes` is absent.

    Raises:
        ValueError: The device is neither CUDA nor CPU.
    """
    device = _memory_device(device)
    if device.type == "cpu":
        return _cpu_memory_stats()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "total_bytes": torch.cuda.get_device_properties(device).total_memory,
        "num_alloc_retries": int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)),
    }


def reset_peak_memory(device: torch.device | str | int | None = None) -> bool:
    """Start a new peak: later `memory_stats` report the highest value from here on.

    Args:
        device: As in `memory_stats`.

    Returns:
        True if the peaks were reset; False on a CPU whose operating system keeps one peak for the life of the
        process (no writable /proc/self/clear_refs).

    Raises:
        ValueError: The device is neither CUDA nor CPU.
    """
    device = _memory_device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _PROC_CLEAR_REFS.write_text(
            "5"
        )  # 5 resets VmHWM: https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html
    except OSError:
        return False
    return True


def _memory_device(device: torch.device | str | int | None) -> torch.device:
    device = resolve_device(device)
    if device.type not in ("cuda", "cpu"):
        raise ValueError(
            f"memory is known for cuda and cpu devices, got {device}; pass device='cpu' or 'cuda'"
        )
    return device


def _cpu_memory_stats() -> dict[str, int]:
    if not _PROC_STATUS.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # ru_maxrss is bytes on macOS, KiB elsewhere.
        return {"peak_resident_bytes": peak if sys.platform == "darwin" else peak * 1024}
    fields = dict(line.split(":", 1) for line in _PROC_STATUS.read_text().splitlines())
    kib = {name: int(fields[name].split()[0]) for name in ("VmHWM", "VmRSS")}
    return {"peak_resident_bytes": kib["VmHWM"] * 1024, "resident_bytes": kib["VmRSS"] * 1024}
