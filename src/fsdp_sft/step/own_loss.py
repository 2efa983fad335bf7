"""A loss of the caller's own: what it may be, and what it must return."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_sft.loss import LossImpl, loss_sum

LossFn = Callable[[nn.Module, Any], torch.Tensor]


def check_functions(loss_fn: Any, count_fn: Any, loss_impl: str) -> None:
    """Refuse what is no function, and an ``impl`` of a loss that is not computed."""
    for name, function in (("loss_fn", loss_fn), ("count_fn", count_fn)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, got {type(function).__name__}")
    if loss_fn is not None and loss_impl != "auto":
        raise ValueError(
            f"loss_impl={loss_impl!r} says how the loss here is computed; loss_fn takes its place"
        )


def batch_loss(model: nn.Module, batch: Any, impl: LossImpl, loss_fn: LossFn | None) -> torch.Tensor:
    """The loss of a batch summed over its targets: by ``loss_fn``, or the causal-LM loss."""
    if loss_fn is None:
        return loss_sum(model, batch, impl=impl)[0]
    return _summed(loss_fn, model, batch)


def _summed(loss_fn: LossFn, model: nn.Module, batch: Any) -> torch.Tensor:
    """What ``loss_fn`` returns, if it is a loss: a scalar, with gradients where they are enabled."""
    loss = loss_fn(model, batch)
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
