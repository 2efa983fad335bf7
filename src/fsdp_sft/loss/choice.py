"""How the loss of a model is computed, and whether that has been found out for the model as it is now."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_sft.loss import liger
from fsdp_sft.loss.head import plain_head
from fsdp_sft.loss.linear_cross_entropy import linear_cross_entropy_sum


@dataclass(frozen=True)
class Transform:
    """What a model does to its head's output: ``cap(scale * logits)``."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The model's logits from its head's output, of any shape."""
        scaled = logits * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


@dataclass(frozen=True)
class LossChoice:
    """The loss of one model.

    Attributes:
        impl: ``"chunked"``, ``"liger"`` or ``"logits"``.
        reason: Why the logits are computed in full; empty where they are not.
        transform: What the fused losses apply to the logits.
        head: The head it was made for; dead or another one now, and the choice is void.
        sharded: Likewise.
    """

    impl: str
    reason: str
    transform: Transform
    head: "weakref.ref[nn.Module] | None"
    sharded: bool

    def holds(self, model: nn.Module) -> bool:
        """Whether the model still has the structure that the choice was made for."""
        if self.sharded != isinstance(model, FSDPModule):
            return False
        head, _ = plain_head(model)
        return head is (None if self.head is None else self.head())

    def loss_of(self, head: nn.Linear, labels: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function from hidden states ``(B, S, H)`` to the loss, for targets ``(B, S)``."""
        fused = liger.linear_cross_entropy_sum if self.impl == "liger" else linear_cross_entropy_sum

        def loss(hidden: torch.Tensor) -> torch.Tensor:
            # FSDP2 swaps parameters on gathering, so they are looked up here.
            return fused(
                hidden,
                head.weight,
                labels,
                bias=head.bias,
                scale=self.transform.scale,
                softcap=self.transform.softcap,
            )

        return loss
