"""Losses of tokens from plain logits, each row by itself: the oracle of losses made of them."""

from typing import Any

import torch
import torch.nn.functional as F

from tests.harness.models import full


def spans_of(batch: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(row of the batch, first token, end) of each row, without padding; a pack has several."""
    ids, mask, positions = (batch.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    spans = []
    for row in range(len(ids)):
        width = ids.shape[1] if mask is None else int(mask[row].sum())
        starts = [0] if positions is None else (positions[row, :width] == 0).nonzero().flatten().tolist()
        spans += [(row, a, b) for a, b in zip(starts, [*starts[1:], width], strict=True)]
    return spans


def plain_token_losses(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Losses ``(B, S)``, aligned with the labels; 0 where nothing is predicted."""
    losses = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    for row, a, b in spans_of(batch):
        logits = model(input_ids=batch["input_ids"][row : row + 1, a:b], use_cache=False).logits[0]
        labels = batch["labels"][row, a + 1 : b]
        losses[row, a + 1 : b] = F.cross_entropy(logits[:-1], labels, reduction="none").double()
    return losses


def signed(batch: dict[str, Any], seed: int = 0) -> torch.Tensor:
    """A weight of either sign for each token of a batch, float64 ``(B, S)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch["labels"].shape, generator=generator, dtype=torch.float64)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of a model, whole and on the CPU, which are then gone."""
    found = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
