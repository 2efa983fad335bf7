"""Mean loss over all targets of all ranks, without gradients."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_sft._model.sharded import compute_device, training_mesh_of
from fsdp_sft._model.view import reshard
from fsdp_sft._process.streams import LateValues
from fsdp_sft._ranks.agree import all_gather_objects, this_rank
from fsdp_sft._ranks.mesh import sum_over_mesh
from fsdp_sft.errors import BatchError
from fsdp_sft.loss import Rows, rows_of
from fsdp_sft.step.checks import check_batches
from fsdp_sft.step.objective import CountFn, LossFn, Objective, Sums
from fsdp_sft.step.window import (
    MicroBatch,
    Window,
    agree_on_window,
    begun_late,
    measured,
    metrics_over_mesh,
    to_device,
    verify_rows,
)


def in_step(
    batches: Iterable[Any],
    mesh: DeviceMesh | None,
    objective: Objective,
    check: Callable[[list[Any]], int] | None,
    rows: Rows,
) -> Iterator[tuple[MicroBatch, Window]]:
    """Yield this rank's batches and then stand-ins, until every rank has run out.

    A stand-in is the rank's last batch, as long as it has the keys of the others'. If one rank's has not, a
    rank that still has some sends one to all. Each round costs one small exchange.

    Args:
        batches: This rank's batches.
        mesh: Mesh of the model, whose ranks go through their batches together; None is this rank alone.
        objective: Definition of the loss, which says what a target is.
        check: Function that raises for batches that the model cannot take; see ``agree_on_window``.
        rows: How ranks have the rows of the batches.

    Yields:
        (the batch, what the ranks have agreed on); a batch that is not among ``micro_batches`` of that is a
        stand-in and does not count.

    Raises:
        BatchError: On all ranks, if those that have a batch have different keys.

    Collective: all ranks, if there is a mesh.
    """
    source = begun_late(batches)
    held: list[MicroBatch] = []
    while True:
        window = agree_on_window(
            itertools.islice(source, 1),
            mesh,
            objective,
            check=check,
            rows=rows,
            options={
                "check": check is not None,
                "loss_fn": objective.is_own,
                "count_fn": objective.count_fn is not None,
            },
            held=held,
        )
        if window.sender < 0:
            return
        held = window.micro_batches or held
        if window.lacks:
            sends = to_device(held[0].given, torch.device("cpu")) if this_rank() == window.sender else None
            sent = all_gather_objects(sends)[window.sender]
            held = window.micro_batches or measured([sent], objective, rows)
        yield held[0], window


@dataclass(frozen=True)
class EvalResult:
    """Result of an evaluation over all targets of all ranks; the same on every rank.

    Attributes:
        loss: Mean over all targets, weighted by ``loss_weights`` where batches have them.
        perplexity: ``exp(loss)``, a perplexity where the loss is the plain cross entropy; inf where that
            overflows.
        num_targets: Number of targets; see ``StepResult``.
        router_loss: Loss of a mixture's router, its coefficient included, as the mean over batches weighted
            by their tokens; 0 if no router's loss is added.
        metrics: Values that ``loss_fn`` returned by name beside the loss, as means per target.
        token_accuracy: Share of the targets to which the model gave the largest logit; see ``StepResult``.
    """

    loss: float
    perplexity: float
    num_targets: int
    router_loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict, hash=False)
    token_accuracy: float = math.nan


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss_fn: LossFn | None = None,
    count_fn: CountFn | None = None,
    check: bool = True,
) -> EvalResult:
    """Mean loss over all targets of all ranks, without gradients, in ``eval()`` mode.

    Ranks may have different numbers of batches, even none. A rank that has run out takes part in the others'
    forwards with its last batch, whose targets do not count again; if that lacks their keys, or it never had
    one, with a batch that one of them sends it by pickle. Afterwards the model is in the mode it was in, and
    its parameters are sharded.

    Args:
        model: Decoder-only language model, sharded or not; with ``loss_fn``, any model.
        batches: This rank's batches, of the form that ``loss_sum`` takes; they are moved to the model's
            device.
        loss_fn: Loss of your own; see ``train_step``. Its result for a batch that does not count is ignored.
        count_fn: Function that counts the targets of a batch; see ``train_step``.
        check: Whether to check the batches, and packs as ``train_step`` does.

    Returns:
        The same ``EvalResult`` on every rank.

    Raises:
        PackingError: If the model mixes the rows of a pack, or a pack has an attention mask.
        ModelLossError: If the model's own loss is not the cross entropy.
        BatchError: If ranks have batches of different keys at the same time or differ in an argument, if no
            rank has a target or all targets have weight 0, or if a batch has an id or a label that the model
            has no row for.

    Collective: all ranks, if the model is sharded or inside DistributedDataParallel.

    Example:
        >>> fs.evaluate(model, loader)
        EvalResult(loss=..., perplexity=..., num_targets=..., router_loss=0.0, metrics={}, token_accuracy=...)
    """
    objective = Objective(loss_fn, count_fn)
    mesh, rows = training_mesh_of(model), rows_of(model)
    device = compute_device(model)
    reshard(model)  # a forward before an optimizer's step leaves the root gathered, with the old values
    modes = {module: module.training for module in model.modules()}
    sums, targets, weight, tokens = Sums(device), 0.0, 0.0, 0
    look = partial(check_batches, model, own_loss=objective.is_own) if check else None
    model.eval()
    try:
        # Not in a caller's inference_mode: FSDP2 keeps the memory that it first gathers into.
        with torch.inference_mode(mode=False), torch.no_grad():
            for batch, window in in_step(batches, mesh, objective, look, rows):
                if check:
                    verify_rows(model, [batch], window, objective, mesh)
                found = objective.of(model, batch.on_device(device, own_loss=objective.is_own))
                if window.micro_batches:
                    targets, weight = targets + batch.targets, weight + batch.weight
                    tokens += 0 if found.router is None else batch.tokens
                    sums.add(found, None if found.router is None else found.router * batch.tokens)
    finally:
        for module, training in modes.items():
            module.training = training
        reshard(model)
    read = LateValues(sums.tensors()).read()  # the only place where the host waits
    loss, router_loss, correct, all_targets, all_weight, all_tokens = sum_over_mesh(
        [*read[:3], targets, weight, tokens], mesh
    )
    if all_weight == 0:
        raise BatchError(
            f"evaluate: the loss_weights of all {int(all_targets)} targets are 0"
            if all_targets
            else "evaluate: no target on any rank; each label, after the shift, is -100, or there is no batch"
        )
    loss = loss / all_weight
    metrics = metrics_over_mesh(sums.metrics, read[3:], mesh) if objective.is_own else {}
    return EvalResult(
        loss,
        math.exp(loss) if loss < 709 else math.inf,
        round(all_targets),
        router_loss / max(all_tokens, 1),
        {name: value / all_weight for name, value in metrics.items()},
        correct / all_targets if objective.knows_accuracy else math.nan,
    )
