"""The loss of a batch and its targets: the library's, or the caller's own, whose results are checked."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.blocks import without_caches
from fsdp_sft.attention.context_parallel import SequenceGroup
from fsdp_sft.experts import counter_of
from fsdp_sft.loss import (
    PLAIN,
    WEIGHTS_KEY,
    LossImpl,
    RouterLoss,
    Terms,
    check_router_loss,
    loss_parts,
    num_targets,
    weight_of,
)
from fsdp_sft.step.trained import refuse_sharded_loss

LossFn = Callable[[nn.Module, Any], torch.Tensor]
CountFn = Callable[[Any], int]


@dataclass(frozen=True)
class Objective:
    """Definition of the loss of a batch; the fields are arguments of ``train_step``.

    Attributes:
        impl: Implementation of the loss, the argument ``loss_impl``.
        loss_fn: The caller's loss; None for that of ``loss_sum``.
        count_fn: The caller's count of a batch's targets; None counts its labels.
        router_loss: What to do with a router's loss; see ``loss_sum``.
        terms: ``label_smoothing`` and ``z_loss``.
    """

    impl: LossImpl = "auto"
    loss_fn: LossFn | None = None
    count_fn: CountFn | None = None
    router_loss: RouterLoss | None = None
    terms: Terms = PLAIN

    @property
    def is_own(self) -> bool:
        """Whether the loss is the caller's."""
        return self.loss_fn is not None

    def options(self) -> dict[str, Any]:
        """Options that must be the same on every rank; of ``loss_fn`` only whether it is given."""
        own = {"loss_impl": self.impl, "router_loss": self.router_loss, "loss_fn": self.is_own}
        return own | {name: float(value) for name, value in vars(self.terms).items()}

    def check(self) -> None:
        """Refuse what is not a function, and options of ``loss_sum`` beside a ``loss_fn``."""
        check_router_loss(self.router_loss)
        for name, function in (("loss_fn", self.loss_fn), ("count_fn", self.count_fn)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function, got {type(function).__name__}")
        for name, value, default in (
            ("loss_impl", self.impl, "auto"),
            ("router_loss", self.router_loss, None),
            *((name, value, 0.0) for name, value in vars(self.terms).items()),
        ):
            if self.is_own and value != default:
                raise ValueError(
                    f"{name}={value!r} says how the loss here is computed, and loss_fn replaces that loss: "
                    f"leave {name} out"
                )

    def refuse_parts(self, group: SequenceGroup | None) -> None:
        """Refuse the caller's functions under context parallelism, where ranks compute parts of rows."""
        own = "loss_fn" if self.is_own else "count_fn"
        if group is not None and (self.is_own or self.count_fn is not None):
            raise ValueError(
                f"{own} is called with whole rows, of which each of the {group.size} ranks that share them "
                "computes a part; leave it out, or train without context parallelism (cp=1)"
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

    def counted(self, given: Any, part: Any) -> int:
        """Number of targets of a batch, of which ``part`` is this rank's part on the host."""
        return counted(part if self.count_fn is None else given, self.count_fn)

    def weight(self, part: Any, count: int) -> float:
        """Divisor of a batch's loss: the number of its targets, or the sum of their ``loss_weights``."""
        weighted = not self.is_own and isinstance(part, Mapping) and part.get(WEIGHTS_KEY) is not None
        return weight_of(part) if weighted else float(count)


def _mask_of(batch: Any) -> torch.Tensor | None:
    """Mask of the tokens that are not padding, in a batch for the caller's loss; None if unknown."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask != 0 if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None


def counted(batch: Any, count_fn: CountFn | None) -> int:
    """Number of targets of a batch, by ``count_fn`` or by its labels."""
    if count_fn is None:
        return num_targets(batch)
    count: Any = count_fn(batch)
    if isinstance(count, torch.Tensor) and count.numel() == 1 and not count.is_floating_point():
        count = int(count)
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"count_fn must return an int, the targets of a batch, got {count!r}")
    if count < 0:
        raise ValueError(f"count_fn must return a number of targets, got {count}")
    return count


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
