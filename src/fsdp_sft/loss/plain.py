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
    if weights is None and terms == PLAIN:
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


@torch.no_grad()
def num_correct(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Number of targets whose logit is the largest of their row, from full logits; int64, 0-dim.

    Args:
        logits: Logits ``(N, V)``.
        targets: Target ids, int64 ``(N,)``; -100 does not count.
    """
    own = logits.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    return ((own == logits.amax(-1)) & (targets != IGNORE_INDEX)).sum()


def plain_token_losses(logits: torch.Tensor, targets: torch.Tensor, entropy: bool) -> torch.Tensor:
    """The loss of each target and, with ``entropy``, the entropy of its prediction; 0 where there is none.

    Args:
        logits: Logits ``(B, S, V)``, float32 or float64.
        targets: Target ids, int64 ``(B, S)``; -100 does not count.
        entropy: Whether the entropies are wanted, too.

    Returns:
        ``(1, B, S)`` or ``(2, B, S)``.
    """
    flat = logits.flatten(0, 1), targets.flatten()
    losses = F.cross_entropy(*flat, ignore_index=IGNORE_INDEX, reduction="none").view(targets.shape)
    if not entropy:
        return losses[None]
    logs = logits.log_softmax(-1)
    entropies = torch.where(targets != IGNORE_INDEX, -(logs.exp() * logs).sum(-1), 0.0)
    return torch.stack([losses, entropies])
