"""The loss of a batch and its targets: the library's, or the caller's own, and the metrics it returns."""

import math
import numbers
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.blocks import without_caches
from fsdp_sft.attention.context_parallel import sequence_group_of
from fsdp_sft.experts import counter_of
from fsdp_sft.loss import (
    OF_WHOLE_ROWS,
    LossParts,
    loss_parts,
    num_targets,
    within,
)

LossFn = Callable[[nn.Module, Any], torch.Tensor | tuple[torch.Tensor, Mapping[str, Any]]]
CountFn = Callable[[Any], float]


@dataclass(frozen=True)
class Objective:
    """Definition of the loss of a batch.

    Attributes:
        loss_fn: The caller's loss; None for that of ``loss_sum``.
        count_fn: The caller's count of a batch's targets, or their weight; None counts its labels.
    """

    loss_fn: LossFn | None = None
    count_fn: CountFn | None = None

    @property
    def knows_accuracy(self) -> bool:
        """Whether what counts is the labels, so that the number of correct ones means something."""
        return self.loss_fn is None and self.count_fn is None

    @property
    def is_own(self) -> bool:
        """Whether the loss is the caller's."""
        return self.loss_fn is not None

    def of(self, model: nn.Module, batch: Any) -> LossParts:
        """The loss of a batch.

        The caller's loss and metrics are those of whole rows. Ranks that share rows return equal shares.
        """
        if self.loss_fn is None:
            return loss_parts(model, batch)
        counter, group = counter_of(model), sequence_group_of(model)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        counted = mask != 0 if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None
        with (
            nullcontext() if counter is None else counter.counting(counted),
            within(OF_WHOLE_ROWS, group is not None),
            without_caches(model),
        ):
            summed, metrics = _checked(self.loss_fn(model, batch))
        if group is not None:
            summed = summed / group.size
            metrics = {name: value / group.size for name, value in metrics.items()}
        return LossParts(summed, None, torch.zeros_like(summed, dtype=torch.int64), metrics)


def counted(batch: Any, count_fn: CountFn | None) -> float:
    """Number of targets of a batch, or their weight: by ``count_fn``, or by its labels."""
    if count_fn is None:
        return num_targets(batch)
    count: Any = count_fn(batch)
    if isinstance(count, torch.Tensor) and count.numel() == 1:
        count = count.item()
    if isinstance(count, bool) or not isinstance(count, numbers.Real) or not 0 <= float(count) < math.inf:
        raise TypeError(f"count_fn must return a number, a batch's targets or their weight, got {count!r}")
    return float(count)


def _checked(result: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Result of a ``loss_fn``: a scalar, and float64 metrics."""
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not isinstance(metrics, Mapping):
        got = [tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in (loss, metrics)]
        raise TypeError(
            "loss_fn must return the loss summed over the batch's targets, a scalar, or (loss, {name: summed "
            f"value}}), got {got[0]!r} and {got[1]!r}"
        )
    sums = {
        name: value.detach().to(torch.float64).reshape(())
        if isinstance(value, torch.Tensor)
        else torch.tensor(float(value), dtype=torch.float64, device=loss.device)
        for name, value in metrics.items()
    }
    return loss.reshape(()), sums


class Sums:
    """This rank's sums over batches, 0-dim and on the device, so that the host does not wait for them.

    Attributes:
        loss: The loss of its targets, float64.
        router: The routers' losses, each times its batch's weight.
        correct: Number of targets whose logit is the largest.
        metrics: The caller's metrics by name; a batch may lack names that others have.
    """

    def __init__(self, device: torch.device) -> None:
        self.loss = self.router = self.correct = torch.zeros((), dtype=torch.float64, device=device)
        self.metrics: dict[str, torch.Tensor] = {}

    def add(self, found: LossParts, router: torch.Tensor | None) -> None:
        """Add what a forward gave of a batch, with the router's loss in the unit that the caller sums in."""
        self.loss, self.correct = self.loss + found.summed.detach(), self.correct + found.correct
        if router is not None:
            self.router = self.router + router.detach()
        for name, value in found.metrics.items():
            self.metrics[name] = self.metrics[name] + value if name in self.metrics else value

    def tensors(self) -> list[torch.Tensor]:
        """[loss, router, correct, each metric]: what is copied to the host."""
        return [self.loss, self.router, self.correct, *self.metrics.values()]
