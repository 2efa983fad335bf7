"""Memory of this process on a device, now and at its peak."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from fsdp_sft._process.devices import memory_of, reset_peak_of, resolve_device

# Names of `memory_stats` for the peak, that to show first.
PEAKS = ("peak_reserved_bytes", "peak_allocated_bytes", "peak_resident_bytes")
_PROC_STATUS = Path("/proc/self/status")
_PROC_CLEAR_REFS = Path("/proc/self/clear_refs")


def memory_stats(device: torch.device | str | int | None = None) -> dict[str, int]:
    """Memory that this process uses on one device.

    Args:
        device: An accelerator (an index is one of this process's) or the CPU; None means the current
            accelerator if there is one, otherwise the CPU.

    Returns:
        Accelerator: `peak_allocated_bytes`, `peak_reserved_bytes` (since the start or `reset_peak_memory`),
        `allocated_bytes` (tensors now), `total_bytes` (of the device), `num_alloc_retries` (how often the
        caching allocator had to free its cache; more than a few in a run mean that memory is too tight).
        CPU: `peak_resident_bytes` and `resident_bytes` of the process. Where there is no /proc (macOS),
        `resident_bytes` is absent.

    Raises:
        ValueError: The device is neither the CPU nor this process's accelerator, or torch does not count its
            memory.

    Example:
        >>> sorted(fs.memory_stats("cpu"))
        ['peak_resident_bytes', 'resident_bytes']
    """
    device = resolve_device(device)
    return _cpu_memory_stats() if device.type == "cpu" else memory_of(device)


def reset_peak_memory(device: torch.device | str | int | None = None) -> bool:
    """Start a new peak: from here on `memory_stats` reports the highest value since this call.

    Args:
        device: The device, as for `memory_stats`.

    Returns:
        True if the peaks were reset; False where one peak is kept for the life of the process: on an
        accelerator whose allocator cannot reset it, on a CPU without a writable /proc/self/clear_refs.

    Raises:
        ValueError: The device is neither the CPU nor this process's accelerator.

    Example:
        >>> if fs.reset_peak_memory():
        ...     result = fs.evaluate(model, [batch])
        ...     stats = fs.memory_stats()  # with the peak of this evaluation
    """
    device = resolve_device(device)
    if device.type != "cpu":
        return reset_peak_of(device)
    try:
        # 5 resets VmHWM: https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html
        _PROC_CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _cpu_memory_stats() -> dict[str, int]:
    if not _PROC_STATUS.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # ru_maxrss is bytes on macOS, KiB elsewhere.
        return {"peak_resident_bytes": peak if sys.platform == "darwin" else peak * 1024}
    fields = dict(line.split(":", 1) for line in _PROC_STATUS.read_text().splitlines())
    kib = {name: int(fields[name].split()[0]) for name in ("VmHWM", "VmRSS")}
    return {"peak_resident_bytes": kib["VmHWM"] * 1024, "resident_bytes": kib["VmRSS"] * 1024}
