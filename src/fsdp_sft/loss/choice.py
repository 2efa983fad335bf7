"""The implementation chosen for a model's loss."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from fsdp_sft.loss.counting import Targets
from fsdp_sft.loss.linear_cross_entropy import chunked_loss
from fsdp_sft.loss.linear_head import head_operands
from fsdp_sft.loss.terms import PLAIN, Terms
from fsdp_sft.loss.transform import Transform


@dataclass(frozen=True)
class LossChoice:
    """The chosen implementation of one model's loss.

    Attributes:
        impl: ``"chunked"`` or ``"logits"``.
        transform: Scale and soft cap that a fused loss applies to the head's output.
        head: Head whose forward a fused loss replaces; None for ``"logits"``.
    """

    impl: str
    transform: Transform = field(default_factory=Transform)
    head: "weakref.ref[nn.Module] | None" = None

    def loss_of(
        self,
        head: nn.Module,
        labels: torch.Tensor,
        known: Targets | None = None,
        weights: torch.Tensor | None = None,
        terms: Terms = PLAIN,
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function from hidden states ``(B, S, H)`` to the loss, for targets and weights ``(B, S)``."""
        return self.at(head, partial(chunked_loss, labels=labels, known=known, weights=weights, terms=terms))

    def at(
        self, head: nn.Module, compute: Callable[..., torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function from hidden states to ``compute(hidden=, weight=, bias=, scale=, softcap=)``."""

        def computed(hidden: torch.Tensor) -> torch.Tensor:
            # FSDP2 replaces the head's parameters when it gathers them, so they are looked up at each call.
            weight, bias = head_operands(head)
            return compute(
                hidden=hidden,
                weight=weight,
                bias=bias,
                scale=self.transform.scale,
                softcap=self.transform.softcap,
            )

        return computed
