"""The loss of a batch and its targets: the library's, or the caller's own, and the metrics it returns."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.blocks import without_caches
from fsdp_sft.experts import counter_of
from fsdp_sft.loss import OF_WHOLE_ROWS, LossParts, counted_tokens, loss_parts, rows_of

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

        The caller's loss and metrics are those of whole rows. Ranks that have the same rows return equal
        shares.
        """
        if self.loss_fn is None:
            return loss_parts(model, batch)
        counter, rows = counter_of(model), rows_of(model)
        counting = nullcontext() if counter is None else counter.counting(counted_tokens(batch))
        before = OF_WHOLE_ROWS.set(True)
        try:
            with counting, without_caches(model):
                result = self.loss_fn(model, batch)
        finally:
            OF_WHOLE_ROWS.reset(before)
        loss, named = result if isinstance(result, tuple) else (result, {})
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and isinstance(named, Mapping)):
            raise TypeError(
                "loss_fn must return the sum of a batch's losses, a tensor of one number, or (it, a dict of "
                f"metrics), as is loss_sum(...)[0]; got {type(loss).__name__} and {type(named).__name__}"
            )
        summed = rows.share(loss.reshape(()))
        metrics = {
            name: rows.share(
                torch.as_tensor(value, dtype=torch.float64, device=summed.device).detach().reshape(())
            )
            for name, value in named.items()
        }
        return LossParts(summed, None, torch.zeros_like(summed, dtype=torch.int64), metrics)


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
