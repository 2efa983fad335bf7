"""Gradient scalers."""

from typing import Any

import torch


def found_infs(scaler: torch.amp.GradScaler, optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The flags that ``unscale_`` set for each optimizer and device: not 0 if a gradient has an inf or nan.

    ``GradScaler`` decides for each optimizer separately, from ``_per_optimizer_states``, which no public
    function shows.
    """
    records: Any = scaler._per_optimizer_states
    found = [records[id(optimizer)]["found_inf_per_device"] for optimizer in optimizers]
    return [flag for by_device in found for flag in by_device.values()]


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Let a scaler unscale after a failed step: only ``update`` clears its ``_per_optimizer_states``."""
    scaler._per_optimizer_states.clear()


def known_scale(scaler: torch.amp.GradScaler) -> float | None:
    """The scale in ``_scale``; None if it is on a device, for which ``get_scale`` would wait."""
    scale: Any = scaler._scale
    if scale is None:
        return float(scaler._init_scale)
    return float(scale) if scale.device.type == "cpu" else None


def keep_scale_on_host(scaler: torch.amp.GradScaler) -> None:
    """Keep the scale of a ``GradScaler`` on the host, where the gradients of offloaded parameters are.

    ``unscale_`` copies the scale to a gradient's device without waiting. From an accelerator to the host that
    is a copy into pinned memory, which the CPU reads before the scale has arrived: the gradients become NaN,
    or are divided by what was there before. The scale is made on the device of the first scaled tensor, and
    no public function moves it (``_scale``, ``_growth_tracker``).
    """
    scale, tracker = scaler._scale, scaler._growth_tracker
    if scale is None:
        scaler.scale(torch.zeros(()))  # makes the scale, on the CPU
    elif scale.device.type != "cpu":
        scaler._scale, scaler._growth_tracker = scale.cpu(), None if tracker is None else tracker.cpu()
