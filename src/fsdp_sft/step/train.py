"""One optimizer step over a window of micro-batches."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from fsdp_sft._expert_parallel import refuse_divided_twice
from fsdp_sft._late import keep, settle, taken
from fsdp_sft._meshes import copies_of_rows
from fsdp_sft._streams import LateValues
from fsdp_sft.context_parallel import sequence_group_of
from fsdp_sft.distributed import compute_device, whole_mesh_of
from fsdp_sft.experts import counter_of
from fsdp_sft.loss import (
    HeadChecks,
    LossImpl,
    RouterLoss,
    Terms,
    checked_later,
    forget_choice,
    needs_choice,
    scale_for_backward,
    tokens_of,
)
from fsdp_sft.packing import Verify, check_verify, verify_at_first_use
from fsdp_sft.step.acceptable import check_of, refuse_noise_on_same_rows
from fsdp_sft.step.first import state_problem
from fsdp_sft.step.gradients import SyncMode, clip_gradients, gradient_sync
from fsdp_sft.step.keys import may_be_packs
from fsdp_sft.step.labels import is_to_be_looked_at, say_what_was_seen
from fsdp_sft.step.optimizers import (
    Optimizers,
    check_left_out_on_device,
    checked_optimizers,
    checked_schedulers,
    prepare_scaler,
    seeds_of,
    step_all,
    step_if_finite,
    unscale,
)
from fsdp_sft.step.own_loss import LossFn, Objective, refuse_own_loss
from fsdp_sft.step.queued import NothingQueued, QueuedStep, StepResult, late_result, without_step
from fsdp_sft.step.summed import refuse_mean
from fsdp_sft.step.window import CountFn, agree_on_window, on_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim.lr_scheduler import LRScheduler

GradSync = Literal["each", "last", "reduce_scatter"]
Sync = Literal["step", "late"]


def train_step(
    model: nn.Module,
    micro_batches: list[Any],
    optimizer: Optimizers,
    *,
    mesh: "DeviceMesh | None" = None,
    max_grad_norm: float | None = 1.0,
    scheduler: "LRScheduler | Sequence[LRScheduler] | None" = None,
    scaler: torch.amp.GradScaler | None = None,
    grad_sync: GradSync = "each",
    loss_impl: LossImpl = "auto",
    loss_fn: LossFn | None = None,
    count_fn: CountFn | None = None,
    verify: Verify = "first",
    router_loss: RouterLoss | None = None,
    check_labels: bool = True,
    sync: Sync = "step",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> StepResult:
    """Forward, backward and optimizer step over one window; gradients are zeroed afterwards.

    Every target of the window, over ranks and micro-batches, weighs the same, or by the ``loss_weights`` of
    its batch, floating point ``(B, S)`` and aligned with the labels: the loss is then ``sum(weight * loss) /
    sum(weight)``. A window without a target on any rank, or whose targets weigh nothing, changes nothing and
    does not advance the scheduler.

    Args:
        model: A decoder-only language model in ``train()`` mode, sharded or not; any model with ``loss_fn``.
        micro_batches: The window: batches with ``input_ids`` and ``labels``, int64 ``(B, S)``; the same
            number on every rank. They are moved to the model's device.
        optimizer: Over the model's (sharded) parameters: one, or a list, such as ``torch.optim.Muon`` for the
            matrices and AdamW for the rest. Several must have every parameter that is trained, each once.
        mesh: Ranks that share the window; None takes the mesh of the model's parameters, or a single
            process if it has none.
        max_grad_norm: Clip the gradient's 2-norm to this; None only measures it.
        scheduler: One or a list, each stepped once if the optimizers were. One that needs a metric
            (``ReduceLROnPlateau``) is yours to step.
        scaler: ``torch.amp.GradScaler`` for float16 compute; an inf on any rank skips the step of every
            optimizer on all.
        grad_sync: ``"each"`` reduces gradients after every micro-batch (least memory), ``"last"`` only
            after the last (least communication; holds unsharded gradients), ``"reduce_scatter"`` shards
            them each time but, under HSDP, defers the all-reduce between replicas to the last.
        loss_impl: As ``impl`` of ``loss_sum``.
        loss_fn: ``loss_fn(model, batch)`` returns the loss of one batch, on the model's device, **summed**
            over its targets: a scalar tensor, connected to the parameters even where there is no target.
            None is ``loss_sum``. For encoder-decoders, classifiers, models that are not transformers',
            another ignored label, losses of one's own. Before the model's first step it is asked for the loss
            of one row and of that row twice, which tells a sum from a mean. While it runs, ``use_cache`` is
            off in the model's configs: transformers tells the rows of a pack apart only without a cache.
        count_fn: ``count_fn(batch)`` returns the number of targets of one batch as the loader gave it, before
            the first forward. None counts the labels, after the shift, that are not -100. With both given a
            batch may be anything; tensors in dicts, lists and tuples are moved to the device.
        verify: ``"first"`` verifies with the first pack that the model keeps its rows apart, as
            ``verify_packing`` does, unless that has been called; ``"off"`` does not look.
        router_loss: As for ``loss_sum``, but a micro-batch's router loss weighs by its tokens, without
            padding, over those of the window. ``"global_micro_batch"`` looks at the micro-batches of the same
            position on all ranks of ``mesh`` together; the same argument on every rank.
        check_labels: Whether the model's first three windows are looked at, unless ``loss_fn`` or
            ``count_fn`` gives labels a meaning of their own. Labels that have been shifted already, or that
            are the attention mask, are an error; one warning each is given for labels that differ from the
            id at their place, and, in the first window, for ranks with the same rows. Of a ``loss_fn``:
            whether it is asked if it returns a sum.
        sync: When the host learns what came of the step. ``"step"``: it waits for the device once, between
            the backwards and the optimizer. ``"late"``: not at all, for models so small that the device would
            wait for the host then. What is returned is the result of the step **before**, whole (at first
            one that was skipped for ``"no step before"``); ``late_result`` returns the last. Where the
            gradient is not finite the optimizers leave the step out on the device, and the next call raises,
            or ``evaluate``, or whatever saves or exports the model. It needs ``fused=True`` of torch's Adam
            or AdamW (or SGD or Adagrad, whose fused forms torch does not shard), and no ``scaler``.
        label_smoothing: As for ``loss_sum``.
        z_loss: As for ``loss_sum``.

    Returns:
        The same ``StepResult`` on every rank.

    Raises:
        BatchError: If labels show a recognised mistake, or the numbers of micro-batches, the keys of a
            micro-batch or the options of this call differ between ranks.
        UnsupportedModelError: If torch would divide the gradients of experts twice, or ranks that compute the
            same rows (tensor parallelism) would draw different random numbers.
        VocabularyError: If a batch has an id, or a label, that the model has no row for.
        ValueError: If a rank's batches are not usable; like ``BatchError`` raised on all ranks, before the
            forward. If ``loss_fn`` and ``loss_impl`` are both given.
        ModelLossError: If the model's own loss is not the cross entropy, as ``loss_sum`` says, or
            ``loss_fn`` returns a mean.
        OptimizerError: If an optimizer was made before the model was sharded, two share a parameter or leave
            one out, or one of them or a scheduler needs more than ``step()``.
        TypeError: If an optimizer or a scheduler is none, or ``loss_fn`` or ``count_fn`` is not a function or
            does not return what it should.
        PackingError: If the model does not keep the rows of a pack apart, or a pack has an attention mask.
        UnstorableStateError: After its first step, if the optimizer keeps state in tensors that do not say
            what is inside them: no checkpoint could hold it.
        NonFiniteGradientError: If the gradient norm is not finite and no scaler handles it. Parameters and
            optimizer are as before the step; gradients are zeroed. With ``sync="late"`` it is raised one call
            later: parameters and optimizer are as before the step that it speaks of, the scheduler one ahead.

    Collective: all ranks of the mesh.
    """
    if grad_sync not in ("each", "last", "reduce_scatter"):
        raise ValueError(f"grad_sync must be 'each', 'last' or 'reduce_scatter', got {grad_sync!r}")
    objective = Objective(loss_impl, loss_fn, router_loss, Terms(label_smoothing, z_loss))
    objective.check(count_fn)
    check_verify(verify)
    if sync not in ("step", "late"):
        raise ValueError(f"sync must be 'step' or 'late', got {sync!r}")
    optimizers = checked_optimizers(model, optimizer)
    schedulers = checked_schedulers(scheduler, optimizers)
    scaler = prepare_scaler(optimizers, scaler)
    if sync == "late":
        check_left_out_on_device(optimizers, scaler)
    else:
        settle(model)
        taken(model)
    mesh = mesh if mesh is not None else whole_mesh_of(model)
    refuse_divided_twice(model)
    refuse_noise_on_same_rows(model, mesh)
    group = sequence_group_of(model, mesh)
    refuse_own_loss(group, loss_fn, count_fn)
    check = check_of(model, own_loss=loss_fn is not None)
    look = check_labels and loss_fn is None and count_fn is None and is_to_be_looked_at(model)
    stale = loss_fn is None and needs_choice(model, loss_impl)
    window = agree_on_window(
        micro_batches,
        mesh,
        count_fn=count_fn,
        needs_ids=loss_fn is None,
        check=check,
        look=look,
        stale=stale,
        own_loss=loss_fn is not None,
        group=group,
        options={
            "max_grad_norm": float(max_grad_norm) if isinstance(max_grad_norm, (int, float)) else None,
            "grad_sync": grad_sync,
            "verify": verify,
            "check_labels": check_labels,
            "sync": sync,
            "seeds": seeds_of(optimizers),
            **objective.options(),
        },
    )
    if window.stale:  # choosing is collective, and what asks for it may be seen on one rank alone
        forget_choice(model, loss_impl)
    if look:
        say_what_was_seen(model, list(window.on_host), window.differences, mesh)
    targets, tokens, weight = window.targets, window.tokens, window.weight
    if weight == 0:
        nothing = without_step("no weight" if targets else "no targets", tokens)
        if sync == "step":
            return nothing
        before = late_result(model)
        keep(model, NothingQueued(nothing))
        return before or without_step("no step before")
    if verify == "first" and any(map(may_be_packs, window.keys)):
        verify_at_first_use(model, window.on_host, mesh, own_loss=loss_fn is not None)
    if check_labels:
        refuse_mean(model, micro_batches, objective, count_fn, mesh)
    copies = copies_of_rows(mesh)
    device = compute_device(model)
    deferred: SyncMode = {"each": "all", "last": "none", "reduce_scatter": "reduce_scatter"}[grad_sync]  # type: ignore[assignment]
    total = added = torch.zeros((), dtype=torch.float64, device=device)
    checks = HeadChecks()
    counter = counter_of(model)
    if counter is not None:
        counter.start()
    for index, batch in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        with gradient_sync(model, "all" if last else deferred), checked_later(checks):
            seen = window.parts[index]
            moved = on_device(batch, seen, device, own_loss=loss_fn is not None)
            summed, router = objective.of(model, moved, mesh)
            if router is not None:
                # In targets, so that what scales the loss scales it too.
                router = router * (tokens_of(seen, needs_ids=False) / max(tokens, 1) * weight)
                added = added + router.detach()
            total = total + summed.detach()
            summed = summed if router is None else summed + router
            loss = (
                scale_for_backward(summed, num_targets=weight * copies, mesh=mesh)
                if mesh
                else summed / weight
            )
            (scaler.scale(loss) if scaler is not None else loss).backward()
    infs = unscale(optimizers, scaler)
    norm = clip_gradients(model, max_grad_norm)
    load = None if counter is None else counter.finish(mesh, device)
    values = LateValues([norm, total, added, *infs])
    step = QueuedStep(values, targets, tokens, weight, mesh, checks, expert_load=load, copies=copies)
    try:
        if sync == "late":
            before = late_result(model)  # raises before this step is taken, if that one was not
            step.is_late, step.undo = True, step_if_finite(optimizers, norm)
            keep(model, step)
        else:  # the host waits for the device here and nowhere else
            step_all(optimizers, scaler, skipped=step.has_infs or not step.is_finite)
    finally:
        for one in optimizers:
            one.zero_grad(set_to_none=True)
        model.zero_grad(set_to_none=True)  # also what the optimizers were not given
    step.problem = state_problem(optimizers)
    result = (before or without_step("no step before")) if sync == "late" else step.result()
    for each in schedulers if sync == "late" or not result.skipped else ():
        each.step()
    return result
