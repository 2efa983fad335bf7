"""The loss of a batch: the library's, or the caller's own, whose result is checked."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.blocks import without_caches
from fsdp_sft.attention.context_parallel import SequenceGroup
from fsdp_sft.experts import counter_of
from fsdp_sft.loss import PLAIN, LossImpl, RouterLoss, Terms, check_router_loss, loss_parts
from fsdp_sft.step.trained import refuse_sharded_loss

LossFn = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True)
class Objective:
    """Definition of the loss of a batch; the fields are arguments of ``train_step``.

    Attributes:
        impl: Implementation of the loss, the argument ``loss_impl``.
        loss_fn: The caller's loss; None for that of ``loss_sum``.
        router_loss: What to do with a router's loss; see ``loss_sum``.
        terms: ``label_smoothing`` and ``z_loss``.
    """

    impl: LossImpl = "auto"
    loss_fn: LossFn | None = None
    router_loss: RouterLoss | None = None
    terms: Terms = PLAIN

    def options(self) -> dict[str, Any]:
        """Options that must be the same on every rank; of ``loss_fn`` only whether it is given."""
        own = {"loss_impl": self.impl, "router_loss": self.router_loss, "loss_fn": self.loss_fn is not None}
        return own | {name: float(value) for name, value in vars(self.terms).items()}

    def check(self, count_fn: Any) -> None:
        """Refuse what is not a function, and options of ``loss_sum`` beside a ``loss_fn``."""
        check_router_loss(self.router_loss)
        for name, function in (("loss_fn", self.loss_fn), ("count_fn", count_fn)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function, got {type(function).__name__}")
        for name, value, default in (
            ("loss_impl", self.impl, "auto"),
            ("router_loss", self.router_loss, None),
            *((name, value, 0.0) for name, value in vars(self.terms).items()),
        ):
            if self.loss_fn is not None and value != default:
                raise ValueError(
                    f"{name}={value!r} says how the loss here is computed; loss_fn takes its place"
                )

    def of(
        self, model: nn.Module, batch: Any, *, is_counted: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(the loss summed over a batch's targets, the router's loss or None if it is not added)."""
        if self.loss_fn is None:
            return loss_parts(model, batch, self.impl, self.router_loss, self.terms, is_counted)
        counter = counter_of(model)
        with nullcontext() if counter is None else counter.counting(_mask_of(batch)):
            return _summed(self.loss_fn, model, batch), None


def _mask_of(batch: Any) -> torch.Tensor | None:
    """Mask of the tokens that are not padding, in a batch for the caller's loss; None if unknown."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask != 0 if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None


def refuse_own_loss(group: SequenceGroup | None, loss_fn: Any, count_fn: Any) -> None:
    """Refuse a ``loss_fn`` or ``count_fn`` under context parallelism, where ranks compute parts of rows."""
    given = [name for name, value in (("loss_fn", loss_fn), ("count_fn", count_fn)) if value is not None]
    if group is not None and given:
        raise ValueError(
            f"{given[0]} is called with whole rows, of which each of the {group.size} ranks that share them "
            "computes a part; under context parallelism the loss is loss_sum's"
        )


def _summed(loss_fn: LossFn, model: nn.Module, batch: Any) -> torch.Tensor:
    """Checked result of ``loss_fn``: a scalar, with gradients where they are enabled."""
    with without_caches(model):
        loss = loss_fn(model, batch)
    refuse_sharded_loss(loss)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        got = (
            f"a {loss.dtype} tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else type(loss).__name__
        )
        raise TypeError(f"loss_fn must return the loss summed over the batch's targets, a scalar; got {got}")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss that depends on no parameter that is trained; a batch without targets "
            "needs one too, such as (logits * 0).sum(), because other ranks wait in its backward"
        )
    return loss.reshape(())
