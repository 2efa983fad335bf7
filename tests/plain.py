"""The plain training that others are compared with: one process, torch alone, no code of the library.

Losses are the cross entropy of plain logits; those of tokens are of each row by itself, padded or in a pack.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
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


def spans_of(batch: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(row of the batch, first token, end) of each row, without padding; a pack has several."""
    ids, mask, positions = (batch.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    spans = []
    for row in range(len(ids)):
        width = ids.shape[1] if mask is None else int(mask[row].sum())
        starts = [0] if positions is None else (positions[row, :width] == 0).nonzero().flatten().tolist()
        spans += [(row, a, b) for a, b in zip(starts, [*starts[1:], width], strict=True)]
    return spans


def plain_logits(model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Logits ``(S, V)`` of each row by itself, on the CPU."""
    return [
        model(input_ids=batch["input_ids"][row : row + 1, a:b], use_cache=False).logits[0]
        for row, a, b in spans_of(batch)
    ]


def plain_token_losses(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Losses ``(B, S)``, aligned with the labels; 0 where nothing is predicted."""
    losses = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    for (row, a, b), logits in zip(spans_of(batch), plain_logits(model, batch), strict=True):
        labels = batch["labels"][row, a + 1 : b]
        losses[row, a + 1 : b] = F.cross_entropy(logits[:-1], labels, reduction="none").double()
    return losses


def mean_loss(model: nn.Module, batches: Iterable[dict[str, Any]]) -> torch.Tensor:
    """Mean over all targets of all batches, padded or of one row."""
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
        labels = batch["labels"][:, 1:]
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="none")
        total = total + losses.double().sum()
        targets += int((labels != -100).sum())
    return total / targets


def gradients(model: nn.Module, batches: Iterable[dict[str, Any]]) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss of batches and its gradient of each parameter by name; the model is left alone."""
    model = copy.deepcopy(model)
    loss = mean_loss(model, batches)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
