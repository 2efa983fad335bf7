"""Check that a caller's own loss is a sum over targets: the step would divide a mean a second time."""

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_sft._model.sharded import compute_device
from fsdp_sft._ranks.mesh import sum_over_mesh
from fsdp_sft.errors import BatchError, ModelLossError
from fsdp_sft.loss import ProbeError, evaluating, guarded
from fsdp_sft.step.once import done_with
from fsdp_sft.step.own_loss import CountFn, Objective, counted
from fsdp_sft.step.window import num_rows, to_device, with_parts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Factor by which a loss grows when every target is there twice: 2 for a sum, 1 for a mean. The bounds leave
# room for other terms.
_SUM, _MEAN = (1.8, 2.2), (0.95, 1.05)

_DONE = "its loss was checked for a sum"

_logger = logging.getLogger("fsdp_sft.step")


def refuse_mean(
    model: nn.Module,
    micro_batches: list[Any],
    objective: Objective,
    mesh: "DeviceMesh | None",
) -> None:
    """Refuse a ``loss_fn`` that returns a mean; each function is looked at once.

    The loss of one row is compared with the loss of a batch that has that row twice. If the targets double
    and the loss stays the same, it is a mean over targets, and the step would divide it once more. A case
    that cannot be decided (a batch that is not made of rows, a loss that is neither) passes and is logged.

    Args:
        model: Model, which is left as it was.
        micro_batches: This rank's micro-batches.
        objective: The caller's loss.
        mesh: Ranks that share the window.

    Raises:
        ModelLossError: On all ranks, if ``loss_fn`` returns a mean on any rank and a sum on none.

    Collective: all ranks of the mesh; two forwards of at most two rows.
    """
    done = (_DONE, objective.code)
    if objective.loss_fn is None or done in done_with(model):
        return
    ranks = mesh.size() if mesh is not None else 1
    rows = _row_and_twins(micro_batches, objective.count_fn)
    # One rank that cannot form these batches must not leave the others alone in a forward.
    if sum_over_mesh([rows is not None], mesh)[0] < ranks:
        done_with(model).add(done)
        _logger.debug("whether loss_fn returns a sum was not looked at: its batches are not made of rows")
        return
    grown = _growth(model, objective, rows)
    sums, means = sum_over_mesh([low <= grown <= high for low, high in (_SUM, _MEAN)], mesh)
    if means and not sums:
        raise ModelLossError(
            "loss_fn returns the same for a row and for that row twice: it is a mean over the targets. "
            "The step divides by the targets of the whole window and needs their sum: return that "
            "(reduction='sum', or the mean times the targets), or, if every batch is meant to weigh "
            "the same, give count_fn=lambda batch: 1. check_labels=False leaves this check out"
        )
    done_with(model).add(done)
    if not sums:
        _logger.info("whether loss_fn returns a sum over targets could not be told (growth %.3g)", grown)


def _row_and_twins(batches: list[Any], count_fn: CountFn | None) -> tuple[Any, Any] | None:
    """A batch of one row, with targets if any row has them, and a batch of that row twice.

    None if the batches are not made of rows, or if the row twice does not count as twice the targets.
    """
    try:
        for batch in batches:
            for row in range(num_rows(batch)):
                one, two = repeated(batch, row, 1), repeated(batch, row, 2)
                targets = counted(one, count_fn)
                if targets:
                    doubled = math.isclose(counted(two, count_fn), 2 * targets, rel_tol=1e-5)
                    return (one, two) if doubled else None
        first = batches[0]
        # No row here has a target; the other ranks still need this one in their forwards.
        return repeated(first, 0, 1), repeated(first, 0, 2)
    except Exception as error:  # the caller's count_fn may need more than a single row has
        _logger.debug("no batch of one row could be made: %s: %s", type(error).__name__, error)
        return None


def _growth(model: nn.Module, objective: Objective, batches: tuple[Any, Any] | None) -> float:
    """Loss of the second batch divided by that of the first; nan if it cannot be computed."""
    device = compute_device(model)
    losses = []
    with evaluating(model):
        for batch in batches or ():
            try:
                loss = guarded(model, lambda own=batch: objective.of(model, to_device(own, device))[0])
                losses.append(float(loss))
            except ProbeError as error:  # go on: every rank must run both forwards, also after an error
                _logger.debug("%s", error)
                losses.append(math.nan)
    return losses[1] / losses[0] if losses and losses[0] else math.nan


def repeated(batch: Any, row: int, times: int) -> Any:
    """A batch that repeats one row of ``batch``; everything that has an entry for each row is cut alike."""
    rows = num_rows(batch)

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.cat([value[row : row + 1]] * times) if value.ndim and len(value) == rows else value
        is_list = isinstance(value, (list, tuple)) and not hasattr(value, "_fields")
        if is_list and len(value) == rows and not any(isinstance(inner, torch.Tensor) for inner in value):
            return type(value)([value[row]] * times)
        return with_parts(value, cut)

    if isinstance(batch, (Mapping, list, tuple, torch.Tensor)):
        return cut(batch)
    raise BatchError(f"a {type(batch).__name__} is not made of rows")
