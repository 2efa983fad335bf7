"""Devices and dtypes: what an accelerator can do and count, whoever made it."""

import functools
from typing import Any

import torch


def default_device_type() -> str:
    """The type of this machine's accelerator; ``"cpu"`` without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """The device that an argument means.

    Args:
        device: A device or its name; an index, which counts the accelerator's devices; or None, which means
            the accelerator's current device, or the CPU without an accelerator.

    Raises:
        RuntimeError: For an index without an accelerator.
    """
    if device is None:
        device = "cpu" if default_device_type() == "cpu" else torch.accelerator.current_device_index()
    return torch.device(device)


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on a device is done; a CPU queues nothing."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def device_name(device: torch.device) -> str | None:
    """The vendor's name for a device; None where torch has no name for it, as for the CPU."""
    module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else None


@functools.cache
def has_mixed_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device multiplies two matrices of a 16-bit dtype into float32: ``torch.mm(..., out_dtype=)``.

    No function of torch says so, hence one trial for each device and dtype.
    """
    empty = torch.empty(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(empty, empty, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def memory_of(device: torch.device) -> dict[str, int]:
    """This process's memory on an accelerator as torch counts it, in bytes; see ``memory_stats``.

    Raises:
        ValueError: If the device is not this process's accelerator, or torch counts none of its memory.
    """
    try:
        stats = torch.accelerator.memory_stats(device)  # empty before the first allocation
        total = torch.accelerator.get_memory_info(device)[1]
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"torch {torch.__version__} counts no memory of {device.type} devices here; got {device}"
        ) from error
    return {
        "peak_allocated_bytes": int(stats.get("allocated_bytes.all.peak", 0)),
        "peak_reserved_bytes": int(stats.get("reserved_bytes.all.peak", 0)),
        "allocated_bytes": int(stats.get("allocated_bytes.all.current", 0)),
        "total_bytes": int(total),
        "num_alloc_retries": int(stats.get("num_alloc_retries", 0)),
    }


def reset_peak_of(device: torch.device) -> bool:
    """Reset the peak of an accelerator's memory; False where its allocator cannot.

    Raises:
        ValueError: If the device is not this process's accelerator.
    """
    try:
        torch.accelerator.reset_peak_memory_stats(device)
    except RuntimeError:
        return False
    return True


def check_dtypes(**given: torch.dtype | None) -> None:
    """Raise for an argument that is no floating-point dtype, such as the name of one; None passes.

    Raises:
        ValueError: With the argument's name.
    """
    for name, dtype in given.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"{name} must be a floating-point torch.dtype such as torch.bfloat16, got {dtype!r}"
            )
