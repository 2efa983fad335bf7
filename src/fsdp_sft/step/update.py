"""What gradients go through: the collectives that reduce them, their norm, and the optimizers that step."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.fsdp import allow_unused_groups, forget_failed_iteration, reduce_what_is_thawed
from fsdp_sft._compat.modules import found_infs, keep_scale_on_host
from fsdp_sft._model.view import is_a, parameter_names, replicated_by, reshard, unwrapped
from fsdp_sft._tensors.boxes import local_of
from fsdp_sft.dcp_io.optimizers import Optimizers, as_list
from fsdp_sft.errors import OptimizerError, abridged

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

SyncMode = Literal["all", "reduce_scatter", "none"]
_PIECE = 1 << 16  # elements whose squares have a sum in float32 that is right to some 1e-7


@contextmanager
def gradient_sync(model: nn.Module, mode: SyncMode) -> Iterator[None]:
    """Context manager that chooses the gradient collectives of the backwards inside it.

    Args:
        model: Sharded model, or one inside DistributedDataParallel; nothing changes for any other model.
        mode: ``"all"`` reduce-scatters and, under HSDP, all-reduces. ``"reduce_scatter"`` leaves out the
            all-reduce between replicas. ``"none"`` runs no collective: each rank keeps unsharded gradients,
            to which later backwards add, until the first backward under ``"all"`` reduces them.
            DistributedDataParallel has one all-reduce only. It runs under ``"all"``, and for a static graph
            in every mode; the forward must be inside the context too.

    Raises:
        ValueError: If ``mode`` is none of these.

    Example:
        >>> targets = fs.count_targets(window)
        >>> for index, batch in enumerate(window):
        ...     with fs.gradient_sync(model, "all" if index == len(window) - 1 else "none"):
        ...         fs.causal_lm_loss(model, batch, num_targets=targets).backward()
    """
    if mode not in ("all", "reduce_scatter", "none"):
        raise ValueError(f"mode must be 'all', 'reduce_scatter' or 'none', got {mode!r}")
    replicated = replicated_by(model)
    if replicated is not None:
        # DistributedDataParallel(static_graph=True) fails an assertion in torch if the first backward runs
        # under no_sync.
        with replicated.no_sync() if mode != "all" and not replicated.static_graph else nullcontext():
            yield
        return
    model = unwrapped(model)
    if not isinstance(model, FSDPModule):
        yield
        return
    # Of torch 2.15: the last backward of a window finalizes it.
    getattr(model, "set_manual_backward_finalization", bool)(False)
    model.set_requires_gradient_sync(mode != "none")
    if mode == "none":
        allow_unused_groups(model)
    else:
        reduce_what_is_thawed(model)
    model.set_requires_all_reduce(mode == "all")
    model.set_is_last_backward(mode == "all")
    try:
        yield
    except BaseException:
        forget_failed_iteration(model)  # what was held back would go into the next window
        raise
    finally:
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
        model.set_is_last_backward(True)


def clip_gradients(model: nn.Module, max_grad_norm: float | None) -> torch.Tensor:
    """Clip the gradients in place; return their 2-norm over all ranks, a 0-dim tensor on their device.

    Under tensor and expert parallelism gradients lie on several meshes, and some on none. Each kind has its
    norm, and the norm of these norms is that of the whole gradient.
    """
    reshard(model)  # parameters that stay gathered after a backward, as FSDP2 can be told, have no gradients
    kinds: dict[Any, list[torch.Tensor]] = {}
    for gradient in (parameter.grad for parameter in model.parameters() if parameter.grad is not None):
        kind = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        kinds.setdefault(kind, []).append(gradient)
    norms = [_norm(gradients) for gradients in kinds.values()]
    norm = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)
    if max_grad_norm is None:
        return norm
    for gradients in kinds.values():
        # Of the shards themselves: the first operation on DTensors takes as long as a small model's forward.
        shards = [local_of(gradient) for gradient in gradients]
        factor = torch.clamp(max_grad_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils clips
        torch._foreach_mul_(shards, factor.to(shards[0].device))
    return norm


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Norm of gradients with the same mesh and placements."""
    first, shards = gradients[0], [local_of(gradient) for gradient in gradients]
    if first.device.type == "cpu":  # where torch adds squares up one by one: 50 million are 0.4 % off
        shards = [piece for shard in shards for piece in shard.reshape(-1).split(_PIECE)]
    norm = torch.nn.utils.get_total_norm(shards)
    placements = first.placements if isinstance(first, DTensor) else ()
    cuts = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    if not cuts:
        return norm
    squared = norm.square()
    for axis in cuts:
        dist.all_reduce(squared, group=first.device_mesh.get_group(axis))  # type: ignore[attr-defined]
    return squared.sqrt()


def checked_optimizers(
    model: nn.Module, optimizer: Optimizers
) -> tuple[list[torch.optim.Optimizer], dict[nn.Parameter, str], list[str]]:
    """Check the optimizers of a model, which is resharded.

    An optimizer made before the model was sharded holds none of the model's parameters, and would train
    nothing. One made while some were gathered lacks those; a forward without a backward leaves the root's
    parameters gathered.

    Returns:
        (optimizers, the model's parameters with their names, names of those that require gradients and are
        in no optimizer).

    Raises:
        TypeError: If one of them is not an optimizer.
        ValueError: If the list is empty.
        OptimizerError: If they hold tensors that sharding has replaced, or two hold the same.
    """
    optimizers = as_list(optimizer)
    reshard(model)  # a gathered parameter is another tensor than its shard
    names = parameter_names(model)
    stepped = set(all_stepped := stepped_by(*optimizers))
    if len(stepped) < len(all_stepped):  # within one group torch only warns
        raise OptimizerError(
            f"{len(all_stepped) - len(stepped)} parameters are held more than once, by one optimizer or by "
            "two, and would be stepped as often: give each to one, once"
        )
    left_out = [name for p, name in names.items() if p.requires_grad and p not in stepped]
    if (foreign := stepped - names.keys()) and left_out:
        raise OptimizerError(
            f"the optimizer has {len(foreign)} tensors that are none of the model's parameters, and lacks "
            f"{len(left_out)} that require gradients ({abridged(left_out)}): sharding has "
            "replaced what it was made over, or that was gathered. Make it after shard_model or "
            "load_pretrained, before any forward"
        )
    return optimizers, names, left_out


def checked_schedulers(scheduler: Any, optimizers: list[torch.optim.Optimizer]) -> "list[LRScheduler]":
    """The schedulers as a list, which may be empty.

    Raises:
        OptimizerError: If one belongs to another optimizer, as to one that was made before sharding.
        TypeError: If one has no ``step()`` without arguments.
    """
    schedulers = [
        one.scheduler if is_a(one, "AcceleratedScheduler", "accelerate") else one
        for one in (scheduler if isinstance(scheduler, Sequence) else [scheduler])
        if one is not None
    ]
    for one in schedulers:
        if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau) or not hasattr(one, "step"):
            raise TypeError(
                f"train_step calls step() of a scheduler; {type(one).__name__} has none, or one that takes a "
                "metric: leave it out here, and step it with the loss of an evaluation"
            )
        groups = getattr(getattr(one, "optimizer", None), "param_groups", None)
        if groups is not None and not any(groups is each.param_groups for each in optimizers):
            raise OptimizerError(
                f"the {type(one).__name__} schedules an optimizer that train_step was not given; its rates "
                "would change nothing here"
            )
    return schedulers


def prepare_scaler(
    optimizers: list[torch.optim.Optimizer], scaler: torch.amp.GradScaler | None
) -> torch.amp.GradScaler | None:
    """The scaler, ready for these optimizers' gradients; None if it is not enabled."""
    if scaler is None or not scaler.is_enabled():
        return None  # a disabled scaler skips no step, so gradients that are not finite have to raise
    if any(parameter.is_cpu for parameter in stepped_by(*optimizers)):
        keep_scale_on_host(scaler)
    return scaler


def options_of(optimizers: list[torch.optim.Optimizer]) -> tuple[str, ...]:
    """Options of the optimizers' groups, which must be the same on every rank, as text."""
    return tuple(
        f"{name}={_plain(value)} of group {number} of {type(optimizer).__name__}"
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in ("params", "initial_lr") and _plain(value) is not None
    )


def _plain(value: Any) -> Any:
    """An option that can be compared; None for any other: for a tensor on a device the host would wait."""
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (bool, int, float, str)) else None


def unscale(
    optimizers: list[torch.optim.Optimizer], scaler: torch.amp.GradScaler | None
) -> list[torch.Tensor]:
    """Divide the gradients by the scale; return 0-dim tensors that are not 0 where there was an inf.

    If any of them is not 0, all optimizers must skip the step. The scaler alone would skip only the optimizer
    whose gradients have the inf.
    """
    if scaler is None:
        return []
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    return found_infs(scaler, optimizers)


def step_all(
    optimizers: list[torch.optim.Optimizer], scaler: torch.amp.GradScaler | None, *, skipped: bool
) -> None:
    """Step the optimizers, unless the step is ``skipped``, and update the scaler.

    Raises:
        OptimizerError: If one computes what torch cannot compute of shards, after it may have stepped some.
    """
    for optimizer in () if skipped else optimizers:
        try:
            if scaler is None:
                optimizer.step()
            elif any(p.grad is not None for p in stepped_by(optimizer)):
                scaler.step(optimizer)  # which raises for lack of a gradient if all that it holds is frozen
        except (NotImplementedError, RuntimeError) as error:
            text = "".join(traceback.format_exception(error))
            if "DTensor" not in text and "distributed/tensor" not in text:
                raise
            raise OptimizerError(
                f"{type(optimizer).__name__} cannot step sharded parameters, and may have stepped some: "
                f"torch lacks an operation for shards ({error!s:.200}). Take AdamW, SGD or another one, "
                "without fused=True if that is the cause, and begin anew"
            ) from error
    if scaler is not None:
        scaler.update()


def stepped_by(*optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors of the optimizers' groups."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
