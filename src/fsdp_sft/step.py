"""One optimizer step, and evaluation: what belongs between a data loader and an optimizer under FSDP2."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_sft._agree import all_reduce_min, all_reduce_sum, is_distributed, raise_first, world_size
from fsdp_sft.collate import IGNORE_INDEX
from fsdp_sft.distributed import compute_device, mesh_of, reshard, sum_over_mesh
from fsdp_sft.errors import NonFiniteGradientError
from fsdp_sft.loss import Batch, LossImpl, loss_sum, num_targets, scale_for_backward
from fsdp_sft.preemption import keep_workers_alive

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.lr_scheduler import LRScheduler

GradSync = Literal["each", "last", "reduce_scatter"]
SyncMode = Literal["all", "reduce_scatter", "none"]


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on every rank.

    Attributes:
        loss: Mean over the window's targets on all ranks; nan for a window without any.
        grad_norm: 2-norm of the whole gradient before clipping; nan where there was none.
        num_targets: Targets of the window on all ranks.
        num_tokens: Tokens of the window on all ranks, without what ``attention_mask`` calls padding. A pack
            has no mask: there what ``PackedCollator`` filled up counts.
        skipped: Whether the optimizer did not step.
        skip_reason: ``"no targets"`` or ``"inf gradients"``; None if it did step.
    """

    loss: float
    grad_norm: float
    num_targets: int
    num_tokens: int
    skipped: bool
    skip_reason: str | None = None


@dataclass(frozen=True)
class EvalResult:
    """Exact evaluation over all ranks; the same on every rank.

    Attributes:
        loss: Mean over all targets.
        perplexity: ``exp(loss)``; inf where that overflows.
        num_targets: How many targets that was.
    """

    loss: float
    perplexity: float
    num_targets: int


def windows(loader: Iterable[Batch], grad_accum_steps: int) -> Iterator[list[Batch]]:
    """Group a loader's batches into the windows of optimizer steps, the same number on all ranks.

    Before each window ranks agree on how many micro-batches every one of them has: the smallest number
    counts, so a rank that runs out early ends the pass for all instead of hanging it. The last window may
    be short. If reading the data fails on one rank, all raise its error. A sampler or data set with
    ``mark_consumed`` (``ResumableSampler``, ``PackedSampler``, ``PackedStream``) is told the rows or packs of
    each window before the window is handed out. What a checkpoint left of an epoch may be nothing.

    Args:
        loader: A DataLoader, or any iterable of batches with ``input_ids`` and ``labels``.
        grad_accum_steps: Micro-batches per window.

    Yields:
        Lists of 1 to ``grad_accum_steps`` batches.

    Raises:
        ValueError: If ``grad_accum_steps`` is not positive, or a whole epoch had no target on any rank.

    Collective: all ranks, in step.
    """
    if isinstance(grad_accum_steps, bool) or not isinstance(grad_accum_steps, int) or grad_accum_steps < 1:
        raise ValueError(f"grad_accum_steps must be a positive integer, got {grad_accum_steps!r}")
    return _windows(loader, grad_accum_steps)


def _windows(loader: Iterable[Batch], grad_accum_steps: int) -> Iterator[list[Batch]]:
    sampler = _resumable(loader)
    mark_consumed = getattr(sampler, "mark_consumed", None)
    end_epoch = getattr(sampler, "end_epoch", None)
    # After a checkpoint at an epoch's last window nothing may be left of that epoch: a loader drops its tail.
    in_mid_epoch = bool(getattr(sampler, "position", 0))
    batches: Iterator[Batch] | None = None
    targets_seen = False
    while True:
        window: list[Batch] = []
        error: Exception | None = None
        try:
            batches = batches if batches is not None else keep_workers_alive(loader)
            window = list(itertools.islice(batches, grad_accum_steps))
            targets_seen = targets_seen or any(num_targets(batch) > 0 for batch in window)
        except Exception as caught:
            error = caught
        length = all_reduce_min(len(window) if error is None else -1)
        if length == -1:
            raise_first(error, "reading the next window")
        if length == 0:
            break
        window = window[:length]
        if mark_consumed is not None:
            mark_consumed(_num_consumed(loader, sampler, window))
        yield window
        if length < grad_accum_steps:
            break
    if end_epoch is not None:
        end_epoch()
    if all_reduce_sum([targets_seen or in_mid_epoch])[0] == 0:
        raise ValueError(
            "the data set has no target on any rank: every label, after the shift, is -100, or there is no "
            "batch. Look at a row with render_labels, and at the counts that filter_rows returns"
        )


def _resumable(loader: Any) -> Any:
    """What keeps the position: a sampler, a sampler of batches, a stream, or the loader itself."""
    sources = [getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")]
    sources.append(getattr(sources[1], "sampler", None))
    return next((source for source in [*sources, loader] if hasattr(source, "mark_consumed")), None)


def _num_consumed(loader: Any, sampler: Any, window: list[Batch]) -> int:
    """Rows or packs of a window, in whatever the sampler counts.

    A sampler of rows counts what the loader took from it: a collator may have packed rows into one, or left
    some out.
    """
    batches = getattr(loader, "batch_sampler", None)
    size = getattr(batches, "batch_size", None)
    if getattr(batches, "sampler", None) is not sampler or not isinstance(size, int):
        return sum(_num_rows(batch) for batch in window)
    left = len(sampler) if isinstance(sampler, Sized) else size * len(window)
    return min(size * len(window), left)


def train_step(
    model: nn.Module,
    micro_batches: list[Batch],
    optimizer: torch.optim.Optimizer,
    *,
    mesh: "DeviceMesh | None" = None,
    max_grad_norm: float | None = 1.0,
    scheduler: "LRScheduler | None" = None,
    scaler: torch.amp.GradScaler | None = None,
    grad_sync: GradSync = "each",
    loss_impl: LossImpl = "auto",
) -> StepResult:
    """Forward, backward and optimizer step over one window; gradients are zeroed afterwards.

    Every target of the window, over ranks and micro-batches, weighs the same. A window without a target on
    any rank changes nothing and does not advance the scheduler.

    Args:
        model: A decoder-only language model in ``train()`` mode, sharded or not.
        micro_batches: The window: batches with ``input_ids`` and ``labels``, int64 ``(B, S)``; the same
            number on every rank. They are moved to the model's device.
        optimizer: Over the model's (sharded) parameters.
        mesh: Ranks that share the window; None takes the mesh of the model's parameters, or a single
            process if it has none.
        max_grad_norm: Clip the gradient's 2-norm to this; None only measures it.
        scheduler: Stepped once if the optimizer was.
        scaler: ``torch.amp.GradScaler`` for float16 compute; an inf on any rank skips the step on all.
        grad_sync: ``"each"`` reduces gradients after every micro-batch (least memory), ``"last"`` only
            after the last (least communication; holds unsharded gradients), ``"reduce_scatter"`` shards
            them each time but, under HSDP, defers the all-reduce between replicas to the last.
        loss_impl: As ``impl`` of ``loss_sum``.

    Returns:
        The same ``StepResult`` on every rank.

    Raises:
        ValueError: If a rank's batches are not usable or the numbers of micro-batches differ; raised on all
            ranks, before the forward. If ``optimizer`` was made before the model was sharded.
        NonFiniteGradientError: If the gradient norm is not finite and no scaler handles it. Parameters and
            optimizer are as before the step; gradients are zeroed.

    Collective: all ranks of the mesh.
    """
    if grad_sync not in ("each", "last", "reduce_scatter"):
        raise ValueError(f"grad_sync must be 'each', 'last' or 'reduce_scatter', got {grad_sync!r}")
    _check_optimizer(model, optimizer)
    if scaler is not None and not scaler.is_enabled():
        scaler = None  # it would let gradients that are not finite through
    mesh = mesh if mesh is not None else mesh_of(model)
    targets, tokens = _agree_on_window(micro_batches, mesh)
    if targets == 0:
        return StepResult(math.nan, math.nan, 0, tokens, True, "no targets")
    device = compute_device(model)
    deferred: SyncMode = {"each": "all", "last": "none", "reduce_scatter": "reduce_scatter"}[grad_sync]  # type: ignore[assignment]
    total = torch.zeros((), dtype=torch.float64)
    for index, batch in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        with gradient_sync(model, "all" if last else deferred):
            summed, _ = loss_sum(model, _to_device(batch, device), impl=loss_impl)
            loss = scale_for_backward(summed, num_targets=targets, mesh=mesh) if mesh else summed / targets
            (scaler.scale(loss) if scaler is not None else loss).backward()
        total = total.to(summed.device) + summed.detach()
    grad_norm, skip_reason = _optimizer_step(model, optimizer, max_grad_norm, scaler)
    optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)  # also what the optimizer was not given
    (loss_total,) = sum_over_mesh([float(total)], mesh)
    if scaler is None and not math.isfinite(grad_norm):
        raise NonFiniteGradientError(
            f"the gradient norm is {grad_norm} at a loss of {loss_total / targets:.4g}; parameters and "
            "optimizer are unchanged. Look at the last batches, lower the learning rate, or start from the "
            "last checkpoint"
        )
    if scheduler is not None and skip_reason is None:
        scheduler.step()
    return StepResult(loss_total / targets, grad_norm, targets, tokens, skip_reason is not None, skip_reason)


@contextmanager
def gradient_sync(model: nn.Module, mode: SyncMode) -> Iterator[None]:
    """Choose which gradient collectives the backwards inside run.

    Args:
        model: A sharded model; for an ordinary one there is nothing to choose.
        mode: ``"all"`` reduce-scatters and, under HSDP, all-reduces. ``"reduce_scatter"`` leaves out the
            all-reduce between replicas. ``"none"`` keeps unsharded gradients on each rank; they are added
            to by later backwards and reduced by the first one under ``"all"``.

    Raises:
        ValueError: For another mode.
    """
    if mode not in ("all", "reduce_scatter", "none"):
        raise ValueError(f"mode must be 'all', 'reduce_scatter' or 'none', got {mode!r}")
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_requires_gradient_sync(mode != "none")
    model.set_requires_all_reduce(mode == "all")
    model.set_is_last_backward(mode == "all")
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
        model.set_is_last_backward(True)


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    mesh: "DeviceMesh | None" = None,
    loss_impl: LossImpl = "auto",
) -> EvalResult:
    """Mean loss over all targets of all ranks, without gradients, in ``eval()`` mode.

    Ranks may have different numbers of batches, none included: one that has run out takes part in the
    others' forwards with a batch of its own without targets. The model's mode is restored and its
    parameters are sharded again afterwards.

    Args:
        model: A decoder-only language model, sharded or not.
        batches: This rank's batches, as for ``loss_sum``; moved to the model's device.
        mesh: Ranks that share the evaluation; None takes the mesh of the model's parameters, or a single
            process if it has none.
        loss_impl: As ``impl`` of ``loss_sum``.

    Raises:
        ValueError: If no rank has a target.

    Collective: all ranks of the mesh.
    """
    mesh = mesh if mesh is not None else mesh_of(model)
    device = compute_device(model)
    modes = {module: module.training for module in model.modules()}
    total, targets = torch.zeros((), dtype=torch.float64), 0
    model.eval()
    try:
        with torch.no_grad():
            for batch in _in_step(batches, mesh):
                summed, count = loss_sum(model, _to_device(batch, device), impl=loss_impl)
                total, targets = total.to(summed.device) + summed, targets + count
    finally:
        for module, training in modes.items():
            module.training = training
        reshard(model)
    loss_total, all_targets = sum_over_mesh([float(total), targets], mesh)
    if all_targets == 0:
        raise ValueError(
            "evaluate: no target on any rank; every label, after the shift, is -100, or there is no batch"
        )
    loss = loss_total / all_targets
    return EvalResult(loss, math.exp(loss) if loss < 709 else math.inf, int(all_targets))


def _in_step(batches: Iterable[Batch], mesh: "DeviceMesh | None") -> Iterator[Batch]:
    """This rank's batches, then stand-ins without targets, until every rank has run out."""
    stand_in: Batch = {
        "input_ids": torch.zeros((1, 2), dtype=torch.int64),
        "attention_mask": torch.ones((1, 2), dtype=torch.int64),
        "labels": torch.full((1, 2), IGNORE_INDEX),
    }
    source: Iterator[Batch] | None = None
    while True:
        batch = error = None
        try:
            source = source if source is not None else keep_workers_alive(batches)
            batch = next(source, None)
            if batch is not None:
                num_targets(batch)
        except Exception as caught:
            error = caught
        have, failed = sum_over_mesh([batch is not None, error is not None], mesh)
        if failed:
            _raise_on_mesh(error, "reading a batch to evaluate", mesh)
        if not have:
            return
        yield batch if batch is not None else stand_in


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse one over the tensors that sharding has replaced: it would step and train nothing."""
    own = {id(p) for p in model.parameters() if isinstance(p, DTensor)}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    if own and stepped and not any(id(p) in own or isinstance(p, DTensor) for p in stepped):
        raise ValueError(
            "the optimizer has none of the model's parameters: sharding has replaced those that it was made "
            "over. Make it after shard_model or load_pretrained"
        )


def _agree_on_window(micro_batches: list[Batch], mesh: "DeviceMesh | None") -> tuple[int, int]:
    """Targets and tokens of the window over all ranks, or the first rank's error on all of them."""
    error: Exception | None = None
    targets = tokens = count = 0
    try:
        micro_batches = _checked_window(micro_batches)
        count = len(micro_batches)
        targets = sum(num_targets(batch) for batch in micro_batches)
        tokens = sum(_num_tokens(batch) for batch in micro_batches)
    except Exception as caught:
        error = caught
    sums = sum_over_mesh([targets, tokens, error is not None, count, count**2], mesh)
    if sums[2]:
        _raise_on_mesh(error, "checking the window's micro-batches", mesh)
    ranks = mesh.size() if mesh is not None else 1
    if ranks * sums[4] != sums[3] ** 2:  # the variance of the counts over ranks
        raise ValueError(
            f"ranks have different numbers of micro-batches (this one {count}, {sums[3] / ranks:.2f} on "
            "average); iterate with windows(), which ends all ranks together"
        )
    return int(sums[0]), int(sums[1])


def _raise_on_mesh(error: Exception | None, phase: str, mesh: "DeviceMesh | None") -> None:
    """Raise the first error on all ranks of the mesh, which all know that one of them failed."""
    if mesh is not None and is_distributed() and mesh.size() == world_size():
        raise_first(error, phase)
    # Ranks outside the mesh are not here to exchange a verdict with.
    raise error or RuntimeError(f"another rank of the mesh failed while {phase}")


def _checked_window(micro_batches: Any) -> list[Batch]:
    if isinstance(micro_batches, Mapping) or not isinstance(micro_batches, (list, tuple)):
        raise ValueError(
            f"train_step takes the window as a list of batches, got {type(micro_batches).__name__}; "
            "wrap a single batch as [batch]"
        )
    if not micro_batches:
        raise ValueError("train_step got an empty window; it needs at least one micro-batch")
    return list(micro_batches)


def _optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float | None,
    scaler: torch.amp.GradScaler | None,
) -> tuple[float, str | None]:
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = _clip(model, max_grad_norm)
    if scaler is None:
        if math.isfinite(norm):
            optimizer.step()
        return norm, None
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    # The scaler lowers its scale exactly when it found an inf and left the optimizer alone.
    return norm, "inf gradients" if scaler.get_scale() < before else None


def _clip(model: nn.Module, max_grad_norm: float | None) -> float:
    """Clip the gradients in place and return their 2-norm over all ranks."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # the norm of shards is a partial result until it is reduced
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    return float(norm)


def _to_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def _num_tokens(batch: Batch) -> int:
    mask = batch.get("attention_mask")
    return int(mask.sum()) if isinstance(mask, torch.Tensor) else _checked_ids(batch).numel()


def _num_rows(batch: Batch) -> int:
    return _checked_ids(batch).shape[0]


def _checked_ids(batch: Batch) -> torch.Tensor:
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        raise ValueError(f"a batch needs 'input_ids', got {sorted(batch)}")
    return ids
