"""The optimizers and schedulers of a step, one or several, checked before anything is computed."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_sft._compat.optim import found_infs, keep_scale_on_host, schedulers_within
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

    Returns:
        (optimizers, the model's parameters with their names, names of those that require gradients and are
        in no optimizer).

    Raises:
        TypeError: If one of them is not an optimizer.
        ValueError: If the list is empty.
        OptimizerError: If one needs a closure, if they hold tensors that sharding has replaced, if two of
            them hold the same parameter, or if none of several holds one that is trained.
    """
    optimizers = as_list(optimizer)
    for one in optimizers:
        needed = _needed(one.step)
        if needed:
            raise OptimizerError(
                f"{type(one).__name__}.step needs {needed[0]!r}, which train_step has not; use "
                "causal_lm_loss and step it in a loop of your own"
            )
    reshard(model)  # a gathered parameter is another tensor than its shard
    names = parameter_names(model)
    left_out = _refuse_replaced(names, optimizers)
    if len(optimizers) > 1:
        _refuse_shared_or_left_out(names, optimizers, left_out)
    return optimizers, names, left_out


def checked_schedulers(scheduler: Any, optimizers: list[torch.optim.Optimizer]) -> "list[LRScheduler]":
    """The schedulers as a list, which may be empty.

    Raises:
        TypeError: If one of them is not a scheduler.
        OptimizerError: If one needs more than ``step()``, as ``ReduceLROnPlateau`` does, if one is in the
            list twice, or if it belongs to another optimizer.
    """
    if scheduler is None:
        return []
    schedulers: list[Any] = list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]
    if len({id(one) for one in schedulers}) < len(schedulers):
        raise OptimizerError("a scheduler is in the list twice: it would be stepped twice")
    for one in schedulers:
        if not callable(getattr(one, "step", None)):
            raise TypeError(f"scheduler must be a scheduler or a list of them, got {type(one).__name__}")
        for inside in schedulers_within(one):
            needed = _needed(inside.step)
            if needed:
                raise OptimizerError(
                    f"{type(inside).__name__}.step needs {needed[0]!r}, which train_step has not: leave it "
                    "out of train_step and step it yourself, for instance scheduler.step(evaluate(...).loss)"
                )
        groups = getattr(getattr(one, "optimizer", None), "param_groups", None)
        if groups is not None and not any(groups is o.param_groups for o in optimizers):
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
        if scaler is not None:
            scaler.step(optimizer)
        else:
            optimizer.step()
    if scaler is not None:
        scaler.update()


def _needed(function: Any) -> list[str]:
    """Names of the arguments that ``function`` requires."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    # A scheduler wraps an optimizer's step in a function whose signature includes self.
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
    return [name for name in needed if name != "self"]


def stepped_by(*optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors of the optimizers' groups."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _refuse_replaced(given: dict[nn.Parameter, str], optimizers: list[torch.optim.Optimizer]) -> list[str]:
    """Refuse optimizers of tensors that the model does not have: they would step and train nothing.

    Returns the names of the model's trained parameters that they do not hold.

    An optimizer made before the model was sharded holds none of the model's parameters. One made while some
    were gathered lacks those; a forward without a backward leaves the root's parameters gathered.
    """
    stepped = set(stepped_by(*optimizers))
    left_out = [name for p, name in given.items() if p.requires_grad and p not in stepped]
    foreign = stepped - given.keys()
    if foreign and left_out:
        raise OptimizerError(
            f"the optimizer has {len(foreign)} tensors that are none of the model's parameters, and lacks "
            f"{len(left_out)} that require gradients ({abridged(left_out)}): sharding has "
            "replaced what it was made over, or that was gathered. Make it after shard_model or "
            "load_pretrained, before any forward"
        )
    return left_out


def _refuse_shared_or_left_out(
    given: Mapping[Any, str], optimizers: list[torch.optim.Optimizer], missing: list[str]
) -> None:
    """Refuse several optimizers unless each trained parameter is in exactly one of them."""
    found: dict[Any, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in stepped_by(optimizer):
            other = found.setdefault(parameter, number)
            if other != number:
                raise OptimizerError(
                    f"{given.get(parameter, 'a parameter')} is in two of the optimizers ({other} and "
                    f"{number}): each would step it"
                )
    if missing:
        raise OptimizerError(
            f"{len(missing)} parameters that require gradients are in none of the {len(optimizers)} "
            f"optimizers: {abridged(missing)}. Give them to one, or freeze them with requires_grad_(False)"
        )
