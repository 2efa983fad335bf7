"""One optimizer step over a window of micro-batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from fsdp_sft._compat.fsdp import forget_held_back
from fsdp_sft._compat.modules import forget_unscaled, known_scale
from fsdp_sft._model.sharded import compute_device, training_mesh_of
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._process.streams import LateValues
from fsdp_sft._ranks.agree import all_gather_objects, this_rank
from fsdp_sft._ranks.mesh import sum_over_mesh
from fsdp_sft._tensors.boxes import values_of
from fsdp_sft.errors import NonFiniteGradientError, abridged
from fsdp_sft.experts import ExpertLoad, counter_of
from fsdp_sft.loss import rows_of, scaled_for_averaging
from fsdp_sft.step.checks import (
    FIRST_WINDOW,
    check_batches,
    done_with,
    first_time,
    look_at_labels,
    note_stepped,
    refuse_beside,
    refuse_untrainable,
    warn_of_likely_mistakes,
)
from fsdp_sft.step.objective import CountFn, LossFn, Objective, Sums
from fsdp_sft.step.update import (
    Optimizers,
    SyncMode,
    checked_optimizers,
    checked_schedulers,
    clip_gradients,
    gradient_sync,
    options_of,
    prepare_scaler,
    step_all,
    unscale,
)
from fsdp_sft.step.window import Window, agree_on_window, metrics_over_mesh, verify_rows

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

GradSync = Literal["each", "last", "reduce_scatter"]

# What the backwards before a window's last one reduce.
_UNTIL_THE_LAST: dict[str, SyncMode] = {"each": "all", "last": "none", "reduce_scatter": "reduce_scatter"}


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step; the same on every rank.

    Attributes:
        loss: Mean over the window's targets on all ranks, weighted by ``loss_weights`` where batches have
            them; nan for a window without targets.
        grad_norm: 2-norm of the whole gradient before clipping; nan if there was no gradient.
        num_targets: Number of targets of the window on all ranks. If ``count_fn`` returns weights, their sum,
            rounded; ``target_weight`` is exact.
        num_tokens: Number of tokens of the window on all ranks, without padding. Padding is what
            ``attention_mask`` marks as such, and the filler at the end of a pack.
        skipped: Whether the optimizer did not step.
        skip_reason: Reason for a skipped step: ``"no targets"``, ``"no weight"`` (all targets have weight
            0) or ``"inf gradients"``. None if the optimizer did step.
        router_loss: Loss of a mixture's router, its coefficient included. The step minimises the sum of
            ``loss`` and this; 0 if no router's loss is added.
        expert_load: Number of tokens that each expert of a mixture was given; None unless ``watch_experts``
            was called.
        target_weight: Sum of the targets' ``loss_weights`` on all ranks, by which ``loss`` was divided;
            without weights the number of targets.
        metrics: Values that ``loss_fn`` returned by name beside the loss, summed over the window's batches on
            all ranks and divided like ``loss``: means per target.
        token_accuracy: Share of the targets to which the model gave the largest logit, before the step;
            ``loss_weights`` do not count. nan for a window without targets, and with ``loss_fn`` or
            ``count_fn``.
    """

    loss: float
    grad_norm: float
    num_targets: int
    num_tokens: int
    skipped: bool
    skip_reason: str | None = None
    router_loss: float = 0.0
    target_weight: float = 0.0
    expert_load: ExpertLoad | None = None
    metrics: dict[str, float] = field(default_factory=dict, hash=False)
    token_accuracy: float = math.nan


def train_step(
    model: nn.Module,
    micro_batches: list[Any],
    optimizer: Optimizers,
    *,
    max_grad_norm: float | None = 1.0,
    scheduler: "LRScheduler | Sequence[LRScheduler] | None" = None,
    scaler: torch.amp.GradScaler | None = None,
    grad_sync: GradSync = "each",
    loss_fn: LossFn | None = None,
    count_fn: CountFn | None = None,
    check: bool = True,
) -> StepResult:
    """Forward, backward and optimizer step over one window; no gradient is left afterwards, even if it fails.

    Every target of the window, over all ranks and micro-batches, has the same weight in the loss. Batches may
    bring weights of their own: ``loss_weights``, floating point ``(B, S)``, aligned with the labels. The loss
    is then ``sum(weight * loss) / sum(weight)``. If no rank has a target, or the weights of all targets are
    0, the step is skipped: nothing changes and the scheduler does not advance. A gradient that a backward of
    your own has left is added to, as everywhere in torch.

    Args:
        model: Decoder-only language model in ``train()`` mode, sharded or not; with ``loss_fn``, any model.
        micro_batches: The window: a list of batches with ``input_ids`` and ``labels``, int64 ``(B, S)``. Its
            length must be the same on every rank. Batches are moved to the model's device.
        optimizer: Optimizer of the model's (sharded) parameters, or a list of optimizers, such as
            ``torch.optim.Muon`` for the matrices and AdamW for the rest. Those of a list must between them
            hold every trained parameter exactly once; a warning names those that none has.
        max_grad_norm: Largest 2-norm of the gradient, to which it is clipped; None only measures the norm.
        scheduler: Learning rate scheduler or list of schedulers, each stepped once if the optimizers were.
            Step one that needs a metric (``ReduceLROnPlateau``) yourself.
        scaler: ``torch.amp.GradScaler`` for float16 compute. If any rank finds an inf, all ranks skip the
            step of every optimizer.
        grad_sync: When gradients are reduced. ``"each"``: after every micro-batch, which needs the least
            memory. ``"last"``: after the last only, which needs the least communication but holds unsharded
            gradients. ``"reduce_scatter"``: shards them after every micro-batch and, under HSDP, defers the
            all-reduce between replicas to the last.
        loss_fn: Function ``loss_fn(model, batch)`` that returns the loss of one batch, **summed** over its
            targets and not their mean: a scalar tensor on the model's device, connected to the parameters
            even for a batch without targets. None is ``loss_sum``, as ``prepare_loss`` has set it up for the
            model. Use it for label smoothing and a z-loss (arguments of ``loss_sum``), encoder-decoders,
            classifiers, models that are not transformers', another ignored label, or a loss of your own, made
            of ``token_losses``. It may return ``(loss, {name: summed value})``: values are numbers or 0-dim
            tensors, and ``StepResult.metrics`` has their means per target. Under context parallelism it gets
            whole rows on each rank of a group, is made of these two functions, and counts once. While it
            runs, ``use_cache`` is off in the model's configs, because transformers separates the rows of a
            pack only without a cache.
        count_fn: Function ``count_fn(batch)`` that returns the number of targets of a batch as the loader
            gave it, or their weight, a float; it is called before the first forward. The window's loss is
            divided by the sum. None counts the labels that are not -100 after the shift. With both functions
            given, a batch may be any object; tensors in dicts, lists and tuples are moved to the device.
        check: Whether to check the model and the batches before the first forward. Errors are labels that
            have been shifted already, ids beyond the model's, other rows on ranks that share them, nothing
            that is trained, and trained parameters outside the shards; the first pack shows whether the model
            mixes its rows, as ``verify_packing`` does. Warnings are the same rows on all ranks, and what may
            be meant. Labels that ``loss_fn`` or ``count_fn`` interprets are not checked; labels and rows are
            looked at in the model's first window.

    Returns:
        The same ``StepResult`` on every rank.

    Raises:
        BatchError: If a check of the batches fails, or ranks differ in the number of micro-batches, the keys
            of a micro-batch or the arguments of this call.
        UnsupportedModelError: If what is trained would not be reduced over the ranks as it has to be.
        ValueError: If a rank's batches cannot be used (all ranks raise it, before the forward).
        ModelLossError: If the model's own loss is not the cross entropy (see ``loss_sum``).
        OptimizerError: If an optimizer was made before the model was sharded, if a scheduler belongs to
            another optimizer, or if nothing is trained.
        TypeError: If an argument is not the optimizer, scheduler or function that it should be, or
            ``count_fn`` or ``loss_fn`` returns another type than it should.
        RuntimeError: If gradients are off, as under ``torch.no_grad``.
        PackingError: If the model mixes the rows of a pack, or a pack has an attention mask.
        NonFiniteGradientError: If the gradient norm is not finite and no scaler handles it. Parameters and
            optimizer are as before the step.

    Collective: all ranks, if the model is sharded or inside DistributedDataParallel.

    Example:
        >>> for window in fs.windows(loader, grad_accum_steps=2):
        ...     result = fs.train_step(model, window, optimizer, max_grad_norm=1.0)
        >>> result.skipped, result.num_targets > 0
        (False, True)
    """
    if grad_sync not in _UNTIL_THE_LAST:
        raise ValueError(f"grad_sync must be 'each', 'last' or 'reduce_scatter', got {grad_sync!r}")
    max_grad_norm = None if max_grad_norm is None else float(max_grad_norm)
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be above 0, or None to clip nothing, got {max_grad_norm!r}")
    optimizers, names, left_out = checked_optimizers(model, optimizer)
    objective, mesh, counter = Objective(loss_fn, count_fn), training_mesh_of(model), counter_of(model)
    schedulers = checked_schedulers(scheduler, optimizers)
    scaler = prepare_scaler(optimizers, scaler)
    is_first = check and FIRST_WINDOW not in done_with(model)

    def look(seen: list[Any]) -> int:
        refuse_untrainable(model, names, optimizers, mesh)
        warn_of_likely_mistakes(model, optimizers, schedulers, scaler, left_out)
        if is_first and objective.knows_accuracy:
            look_at_labels(seen)
        return check_batches(model, seen, own_loss=objective.is_own)

    options = {
        "max_grad_norm": max_grad_norm,
        "grad_sync": grad_sync,
        "loss_fn": objective.is_own,
        "count_fn": count_fn is not None,
        "check": check,
        "trained": tuple(name for parameter, name in names.items() if parameter.requires_grad),
        "optimizers": options_of(optimizers),
        "scale": None if scaler is None else known_scale(scaler),
        "watched": counter is not None,
        "micro_batches": len(micro_batches),
    }
    window = agree_on_window(
        micro_batches,
        mesh,
        objective,
        check=look if check else None,
        rows=rows_of(model),
        options=options,
        compare_rows=is_first,
    )
    if is_first:
        done_with(model).add(FIRST_WINDOW)
    if window.weight == 0:
        reason = "no weight" if window.targets else "no targets"
        if this_rank() == 0 and first_time(model, "a skipped step"):
            warn_caller(
                f"a window has {reason} on any rank, so its step is skipped and its loss is NaN: look at its "
                "rows with render_labels. If max_length cuts off the answers, filter_rows leaves such rows "
                "out"
            )
        return StepResult(math.nan, math.nan, window.targets, window.tokens, skipped=True, skip_reason=reason)
    if check:
        verify_rows(model, window.micro_batches, window, objective, mesh)
    try:
        sums = _forward_and_backward(model, window, objective, scaler, grad_sync)
        if check:
            refuse_beside(names, optimizers, mesh)
        with record_function("fsdp_sft.clip_gradients"):
            infs = unscale(optimizers, scaler)
            norm = clip_gradients(model, max_grad_norm)
        if counter is not None:
            counter.finish(mesh, sums.loss.device)
        late = LateValues([norm, *infs, *sums.tensors()])
        with record_function("fsdp_sft.optimizer"):
            total_norm, *read = late.read()  # the only place where the host waits for the device
            has_infs, read = any(read[: len(infs)]), read[len(infs) :]
            skipped = has_infs or not math.isfinite(total_norm)
            step_all(optimizers, scaler, skipped=skipped)
    except BaseException:
        if counter is not None:
            counter.abandon()
        if scaler is not None:
            forget_unscaled(scaler)
        raise
    finally:
        for one in optimizers:
            one.zero_grad(set_to_none=True)
        model.zero_grad(set_to_none=True)  # also gradients of parameters that no optimizer holds
    loss, router_loss, correct = sum_over_mesh(read[:3], mesh)
    loss, router_loss = loss / window.weight, router_loss / window.weight
    metrics = metrics_over_mesh(sums.metrics, read[3:], mesh) if objective.is_own else {}
    if skipped and not has_infs:
        raise NonFiniteGradientError(
            f"the gradient norm is {total_norm} at a loss of {loss:.4g}"
            + _what_is_not_finite(math.isfinite(read[0]), names, mesh)
        )
    for each in schedulers if not has_infs else ():
        each.step()
        note_stepped(each)
    return StepResult(
        loss,
        total_norm,
        window.targets,
        window.tokens,
        skipped=has_infs,
        skip_reason="inf gradients" if has_infs else None,
        router_loss=router_loss,
        target_weight=window.weight,
        expert_load=None if counter is None else counter.load(),
        metrics={name: value / window.weight for name, value in metrics.items()},
        token_accuracy=correct / window.targets if objective.knows_accuracy else math.nan,
    )


def _forward_and_backward(
    model: nn.Module,
    window: Window,
    objective: Objective,
    scaler: torch.amp.GradScaler | None,
    grad_sync: GradSync,
) -> Sums:
    """Run each micro-batch forward and backward; gradients are of the window's loss per target."""
    mesh, device, counter = training_mesh_of(model), compute_device(model), counter_of(model)
    sums = Sums(device)
    if counter is not None:
        counter.start()
    forget_held_back(model)
    for batch in window.micro_batches:
        is_last = batch is window.micro_batches[-1]
        with gradient_sync(model, "all" if is_last else _UNTIL_THE_LAST[grad_sync]):
            with record_function("fsdp_sft.forward"):
                found = objective.of(model, batch.on_device(device, own_loss=objective.is_own))
            router = found.router
            if router is not None:
                # The router's loss of a micro-batch is a mean. Times its share of the window's tokens and
                # the window's weight it is in the unit of the summed loss, so that one scale fits both.
                router = router * (batch.tokens / max(window.tokens, 1) * window.weight)
            sums.add(found, router)
            summed = found.summed if router is None else found.summed + router
            scaled = summed / window.weight if mesh is None else scaled_for_averaging(summed, window.weight)
            with record_function("fsdp_sft.backward"):
                (scaler.scale(scaled) if scaler is not None else scaled).backward()
    return sums


def _what_is_not_finite(is_finite_here: bool, names: dict[nn.Parameter, str], mesh: DeviceMesh | None) -> str:
    """The end of the error of a gradient that is not finite: the ranks and the weights that are not.

    Collective: all ranks of the mesh.
    """
    where = ""
    if mesh is not None and mesh.size() > 1:
        ranks = [str(rank) for rank, finite in enumerate(all_gather_objects(is_finite_here)) if not finite]
        where = f" (that of rank {abridged(ranks)} is not finite)" if ranks else " (finite on every rank)"
    broken = [name for one, name in names.items() if not bool(values_of(one.detach()).isfinite().all())]
    advice = (
        f"{abridged(broken)} hold values that are not finite: load the weights again"
        if broken
        else "Look at the last batches, lower the learning rate"
    )
    return f"{where}; parameters and optimizer are unchanged. {advice}, or start from the last checkpoint"
