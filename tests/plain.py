"""The plain loop that trainings are compared with: one process, torch alone, no code of the library."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def step(
    model: nn.Module,
    losses: Iterable[torch.Tensor],
    optimizers: Iterable[Any],
    *,
    max_norm: float | None = None,
    keep: dict[str, torch.Tensor] | None = None,
) -> tuple[float, float]:
    """One step of accumulated losses: (their sum, the norm of the gradient before it is clipped).

    Args:
        model: Trained in place.
        losses: Each is gone back through before the next is asked for, so a generator may touch the
            gradients behind its ``yield``.
        optimizers: Over parts of the model.
        max_norm: Of the gradient of all parameters.
        keep: Filled with the clipped gradients, by name.
    """
    total = 0.0
    for loss in losses:
        if loss.requires_grad:  # not where nothing has a target
            loss.backward()
        total += float(loss.detach())
    named = {name: p for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm([p.grad for p in named.values() if p.grad is not None])
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(named.values(), max_norm, norm)
    if keep is not None:
        keep.update({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    return total, float(norm)
