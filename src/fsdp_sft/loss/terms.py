"""Terms of a target's loss beside the cross entropy: label smoothing and the z-loss."""

import math
from dataclasses import dataclass, field, fields

import torch
from torch.nn import functional as F

from fsdp_sft.targets import IGNORE_INDEX


@dataclass(frozen=True)
class Terms:
    """The loss of one target.

    With ``p`` the softmax of its logits and ``Z`` the sum of their exponentials::

        (1 - label_smoothing) * -log p[target] + label_smoothing * mean(-log p) + z_loss * log(Z) ** 2

    Attributes:
        label_smoothing: Label smoothing in [0, 1), defined as in ``torch.nn.functional.cross_entropy``.
        z_loss: Factor of the z-loss, 0 or more. It keeps log(Z) near 0, and so keeps the logits from
            drifting. PaLM used 1e-4 (https://arxiv.org/abs/2204.02311, section 5).
    """

    label_smoothing: float = field(default=0.0, kw_only=True, metadata={"below": 1.0})
    z_loss: float = field(default=0.0, kw_only=True, metadata={"below": math.inf})

    def __post_init__(self) -> None:
        for term in fields(self):
            value, below = getattr(self, term.name), term.metadata["below"]
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{term.name} must be a number, got {value!r}")
            if not 0 <= value < below:
                raise ValueError(f"{term.name} must be in [0, {below:g}), got {value!r}")

    def __bool__(self) -> bool:
        """Whether any term is added to the cross entropy."""
        return any(vars(self).values())


PLAIN = Terms()


def summed_loss(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, terms: Terms
) -> torch.Tensor:
    """The loss summed over targets, from full logits.

    Args:
        logits: Logits ``(N, V)``, float32 or float64.
        targets: Target ids, int64 ``(N,)``; -100 does not count.
        weights: Factors of the targets' losses, ``(N,)``; None is 1.
        terms: What the loss has beside the cross entropy.
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
