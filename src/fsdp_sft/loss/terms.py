"""What a target's loss is beside the cross entropy: smoothed labels, and the z-loss."""

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from fsdp_sft.collate import IGNORE_INDEX


@dataclass(frozen=True)
class Terms:
    """The loss of one target.

    With ``p`` the softmax of its logits and ``Z`` the sum of their exponentials::

        (1 - label_smoothing) * -log p[target] + label_smoothing * mean(-log p) + z_loss * log(Z) ** 2

    Attributes:
        label_smoothing: In [0, 1), as for ``torch.nn.functional.cross_entropy``.
        z_loss: From 0 on; 1e-4 in PaLM, https://arxiv.org/abs/2204.02311, section 5. It keeps log(Z) near 0,
            and so the logits from drifting.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name, value, most in (
            ("label_smoothing", self.label_smoothing, 1.0),
            ("z_loss", self.z_loss, math.inf),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if not 0 <= value < most:
                raise ValueError(f"{name} must be in [0, {most:g}), got {value!r}")

    def __bool__(self) -> bool:
        """Whether there is anything beside the cross entropy."""
        return bool(self.label_smoothing or self.z_loss)


PLAIN = Terms()


def summed_loss(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, terms: Terms
) -> torch.Tensor:
    """The loss summed over targets, from logits in full.

    Args:
        logits: ``(N, V)``, float32 or float64.
        targets: int64 ``(N,)``; -100 does not count.
        weights: ``(N,)``, a factor for each target's loss; None for none.
        terms: What the loss is.
    """
    if weights is None and not terms:
        return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    losses = F.cross_entropy(
        logits, targets, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=terms.label_smoothing
    )
    counts = targets != IGNORE_INDEX
    if terms.z_loss:
        losses = losses + terms.z_loss * torch.where(counts, logits.logsumexp(-1), 0.0).square()
    if weights is not None:
        losses = losses * torch.where(counts, weights.to(losses), 0.0)
    return losses.sum(dtype=torch.float64).to(logits.dtype)
