"""How much of a device's memory is free, of all that any process could have."""

from typing import Any

import torch


def memory_of_device(device: torch.device) -> tuple[int, int] | None:
    """(free, total) bytes of an accelerator; None for the CPU, and where torch does not know it."""
    if device.type in ("cpu", "meta"):
        return None
    ask: Any = getattr(torch.accelerator, "get_memory_info", None)  # torch 2.12
    ask = ask or getattr(torch.get_device_module(device), "mem_get_info", None)
    if ask is None:
        return None
    try:
        free, total = ask(device)
    except (RuntimeError, NotImplementedError):
        return None
    return int(free), int(total)
