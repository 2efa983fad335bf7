"""The loss of a batch and its targets: the library's, or the caller's own, whose results are checked."""

import math
import numbers
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.blocks import without_caches
from fsdp_sft.attention.context_parallel import SequenceGroup, sequence_group_of
from fsdp_sft.experts import counter_of
from fsdp_sft.loss import (
    PLAIN,
    WEIGHTS_KEY,
    LossImpl,
    RouterLoss,
    Terms,
    check_router_loss,
    loss_of_whole_rows,
    loss_parts,
    num_targets,
    own_part,
    tokens_of,
    weight_of,
)
from fsdp_sft.step.own_metrics import checked_metrics
from fsdp_sft.step.trained import refuse_sharded_loss

LossFn = Callable[[nn.Module, Any], torch.Tensor | tuple[torch.Tensor, Mapping[str, Any]]]
CountFn = Callable[[Any], float]


@dataclass(frozen=True)
class Objective:
    """Definition of the loss of a batch; the fields are arguments of ``train_step``.

    Attributes:
        impl: Implementation of the loss, the argument ``loss_impl``.
        loss_fn: The caller's loss; None for that of ``loss_sum``.
        count_fn: The caller's count of a batch's targets, or their weight; None counts its labels.
        router_loss: What to do with a router's loss; see ``loss_sum``.
        terms: ``label_smoothing`` and ``z_loss``.
    """

    impl: LossImpl = "auto"
    loss_fn: LossFn | None = None
    count_fn: CountFn | None = None
    router_loss: RouterLoss | None = None
    terms: Terms = PLAIN

    @property
    def code(self) -> Any:
        """What tells the caller's loss from others: the code of a function, the class of another object."""
        function = getattr(self.loss_fn, "func", self.loss_fn)  # of a partial
        return getattr(function, "__code__", type(function))

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

    def of(
        self, model: nn.Module, batch: Any, *, is_counted: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
        """(the loss summed over a batch's targets, the router's loss or None, the caller's metrics).

        The caller's loss and metrics are those of whole rows. Ranks that share rows return equal shares.
        """
        if self.loss_fn is None:
            parts = loss_parts(model, batch, self.impl, self.router_loss, self.terms, is_counted)
            return *parts, {}
        counter, group = counter_of(model), sequence_group_of(model)
        with (
            nullcontext() if counter is None else counter.counting(_mask_of(batch)),
            nullcontext() if group is None else loss_of_whole_rows(),
        ):
            summed, metrics = _summed(self.loss_fn, model, batch)
        if group is not None:
            summed = summed / group.size
            metrics = {name: value / group.size for name, value in metrics.items()}
        return summed, None, metrics

    def part(self, batch: Any, group: SequenceGroup | None) -> Any:
        """What this rank computes of a batch on the host; the caller's loss gets whole rows."""
        return batch if self.is_own else own_part(batch, group)

    def measured(self, given: Any, part: Any, group: SequenceGroup | None) -> tuple[float, float, int]:
        """This rank's share of a batch's (targets, weight of them, tokens).

        The first of the ranks that share rows counts what is asked of whole rows.

        Args:
            given: The batch as the caller gave it.
            part: What this rank computes of it, on the host.
            group: Ranks that share its rows; None if none do.
        """
        once = group is None or group.rank == 0
        whole = self.is_own or self.count_fn is not None
        count = counted(given if self.count_fn is not None else part, self.count_fn)
        count = count if once or not whole else 0
        weighted = not self.is_own and isinstance(part, Mapping) and part.get(WEIGHTS_KEY) is not None
        tokens = tokens_of(part, needs_ids=not self.is_own) if once or not self.is_own else 0
        return count, weight_of(part) if weighted else float(count), tokens


def _mask_of(batch: Any) -> torch.Tensor | None:
    """Mask of the tokens that are not padding, in a batch for the caller's loss; None if unknown."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask != 0 if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None


def counted(batch: Any, count_fn: CountFn | None) -> float:
    """Number of targets of a batch, or their weight: by ``count_fn``, or by its labels."""
    if count_fn is None:
        return num_targets(batch)
    count: Any = count_fn(batch)
    if isinstance(count, torch.Tensor) and count.numel() == 1:
        count = count.item()
    if isinstance(count, bool) or not isinstance(count, numbers.Real):
        raise TypeError(f"count_fn must return a number, a batch's targets or their weight, got {count!r}")
    number: float = float(count)
    if not 0 <= number < math.inf:
        raise ValueError(f"count_fn must return a number of targets or their weight, got {count}")
    return number


def _summed(loss_fn: LossFn, model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Checked result of ``loss_fn``: a scalar, with gradients where they are enabled, and metrics."""
    with without_caches(model):
        result: Any = loss_fn(model, batch)
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    refuse_sharded_loss(loss)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        got = (
            f"a {loss.dtype} tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else type(loss).__name__
        )
        raise TypeError(
            f"loss_fn must return the loss summed over the batch's targets, a scalar; got {got}. Values to "
            "report go beside it: (loss, {name: summed value})"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss that depends on no parameter that is trained; a batch without targets "
            "needs one too, such as (logits * 0).sum(), because other ranks wait in its backward"
        )
    return loss.reshape(()), checked_metrics(metrics, loss.device)
