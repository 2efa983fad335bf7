"""What a loss is, from full logits: read this first. ``linear`` computes the same without holding them."""

import math
from dataclasses import dataclass

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

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name, value, below in (
            ("label_smoothing", self.label_smoothing, 1.0),
            ("z_loss", self.z_loss, math.inf),
        ):
            if not 0 <= value < below:
                raise ValueError(f"{name} must be in [0, {below:g}), got {value!r}")


PLAIN = Terms()


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of losses and of kept gradients: float64 for float64 inputs, and float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def plain_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    terms: Terms = PLAIN,
    summed: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the loss, the number of targets whose logit is the largest of their row), from full logits.

    Args:
        logits: Logits ``(B, S, V)``.
        labels: Target ids, int64 ``(B, S)``; -100 does not count.
        weights: Factors of the targets' losses, ``(B, S)``; None is 1.
        terms: What the loss has beside the cross entropy.
        summed: Whether the loss is summed; if not, it is ``(B, S)``, and 0 where a label does not count.
    """
    flat, targets = logits.to(wide_dtype(logits)).flatten(0, 1), labels.flatten().to(logits.device)
    counts = targets != IGNORE_INDEX
    with torch.no_grad():
        own = flat.gather(1, targets.clamp_min(0)[:, None])[:, 0]
        correct = ((own == flat.amax(-1)) & counts).sum()
    if summed and weights is None and terms == PLAIN:
        return F.cross_entropy(flat, targets, ignore_index=IGNORE_INDEX, reduction="sum"), correct
    losses = F.cross_entropy(
        flat, targets, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=terms.label_smoothing
    )
    if terms.z_loss:
        losses = losses + terms.z_loss * torch.where(counts, flat.logsumexp(-1), 0.0).square()
    if weights is not None:
        losses = losses * torch.where(counts, weights.flatten().to(losses), 0.0)
    return losses.sum(dtype=torch.float64).to(flat.dtype) if summed else losses.view(labels.shape), correct
