"""What tests of the losses of tokens share, beside the plain losses in ``tests/plain.py``."""

from typing import Any

import torch

from tests.harness.models import full


def signed(batch: dict[str, Any], seed: int = 0) -> torch.Tensor:
    """A weight of either sign for each token of a batch, float64 ``(B, S)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch["labels"].shape, generator=generator, dtype=torch.float64)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of a model, whole and on the CPU, which are then gone."""
    found = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
