"""The optimizers and schedulers of a step, one or several, checked before anything is computed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_sft._compat.optim import found_infs, keep_scale_on_host
from fsdp_sft._model.named import parameter_names
from fsdp_sft._model.sharded import reshard
from fsdp_sft.dcp_io.optimizer_content import Optimizers, as_list
from fsdp_sft.errors import OptimizerError, abridged

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


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
    all_stepped = stepped_by(*optimizers)
    stepped = set(all_stepped)
    if len(stepped) < len(all_stepped):  # within one group torch only warns
        raise OptimizerError(
            f"{len(all_stepped) - len(stepped)} parameters are held more than once, by one optimizer or by "
            "two, and would be stepped as often: give each to one, once"
        )
    left_out = [name for p, name in names.items() if p.requires_grad and p not in stepped]
    foreign = stepped - names.keys()
    if foreign and left_out:
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
    """
    schedulers: list[Any] = list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]
    schedulers = [one for one in schedulers if one is not None]
    for one in schedulers:
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
    parameters = (p for o in optimizers for group in o.param_groups for p in group["params"])
    if any(parameter.device.type == "cpu" for parameter in parameters):
        keep_scale_on_host(scaler)
    return scaler


def options_of(optimizers: list[torch.optim.Optimizer]) -> tuple[str, ...]:
    """Options of the optimizers' groups, which must be the same on every rank, as text.

    A rate that is a tensor on a device is left out: the host would have to wait for it.
    """
    return tuple(
        f"{name}={_plain(value)} of group {number} of {type(optimizer).__name__}"
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in ("params", "initial_lr") and _plain(value) is not None
    )


def _plain(value: Any) -> Any:
    """An option that can be compared; None for any other."""
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
    """Step the optimizers, unless the step is ``skipped``, and update the scaler."""
    for optimizer in () if skipped else optimizers:
        if scaler is not None and not any(p.grad is not None for p in stepped_by(optimizer)):
            continue  # all that it holds is frozen: the scaler would raise for lack of a gradient
        optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None:
        scaler.update()


def stepped_by(*optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors of the optimizers' groups."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
