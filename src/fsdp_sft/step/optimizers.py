"""The optimizers and schedulers of a step: one or several, looked at before anything is computed."""

import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_sft._compat import found_inf, schedulers_within
from fsdp_sft._model import parameter_names
from fsdp_sft.dcp_io.optimizer_content import Optimizers, as_list
from fsdp_sft.distributed import reshard
from fsdp_sft.errors import OptimizerError, abridged
from fsdp_sft.step.gradients import clip_gradients

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


def checked_optimizers(model: nn.Module, optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """The optimizers as a list.

    Raises:
        TypeError: If one of them is no optimizer.
        ValueError: If there is none.
        OptimizerError: If one needs a closure, if they are over tensors that sharding has replaced, if two of
            them have a parameter, or if none of several has one that is trained.
    """
    optimizers = as_list(optimizer)
    for one in optimizers:
        needed = _needed(one.step)
        if needed:
            raise OptimizerError(
                f"{type(one).__name__}.step needs {needed[0]!r}, which train_step has not; use "
                "causal_lm_loss and step it in a loop of your own"
            )
    _refuse_replaced(model, optimizers)
    if len(optimizers) > 1:
        _refuse_shared_or_left_out(model, optimizers)
    return optimizers


def checked_schedulers(scheduler: Any, optimizers: list[torch.optim.Optimizer]) -> "list[LRScheduler]":
    """The schedulers as a list, which may be empty.

    Raises:
        OptimizerError: If one needs more than ``step()``, as ``ReduceLROnPlateau`` does, is there twice, or
            is of another optimizer.
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


def clip_and_step(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    max_grad_norm: float | None,
    scaler: torch.amp.GradScaler | None,
) -> tuple[float, str | None]:
    """Step all optimizers, or none of them where a gradient is not finite.

    Returns:
        (2-norm of the gradient before clipping, why no optimizer has stepped if the scaler found an inf).
    """
    for optimizer in optimizers if scaler is not None else ():
        scaler.unscale_(optimizer)  # type: ignore[union-attr]
    norm = clip_gradients(model, max_grad_norm)
    # The scaler itself would leave out only the optimizer whose gradients have an inf.
    skipped = scaler is not None and found_inf(scaler, optimizers)
    for optimizer in optimizers if math.isfinite(norm) and not skipped else ():
        if scaler is not None:
            scaler.step(optimizer)
        else:
            optimizer.step()
    if scaler is not None:
        scaler.update()
    return norm, "inf gradients" if skipped else None


def _needed(function: Any) -> list[str]:
    """Names of the arguments without which ``function`` cannot be called."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    # A scheduler puts a function of its own around an optimizer's step, whose signature has self.
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
    return [name for name in needed if name != "self"]


def _stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _refuse_replaced(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Refuse what is over tensors that the model does not have: it would step, and train nothing.

    An optimizer made before the model was sharded has none of its parameters; one made while they were
    gathered, as a forward without a backward leaves the root's, lacks those.
    """
    reshard(model)  # gathered parameters are other tensors
    trained = {id(p): name for p, name in parameter_names(model).items() if p.requires_grad}
    stepped = {id(parameter) for optimizer in optimizers for parameter in _stepped(optimizer)}
    left_out = [name for identity, name in trained.items() if identity not in stepped]
    foreign = stepped - {id(parameter) for parameter in model.parameters()}
    if foreign and left_out:
        raise OptimizerError(
            f"the optimizer has {len(foreign)} tensors that are none of the model's parameters, and lacks "
            f"{len(left_out)} that require gradients ({abridged(left_out)}): sharding has "
            "replaced what it was made over, or that was gathered. Make it after shard_model or "
            "load_pretrained, before any forward"
        )


def _refuse_shared_or_left_out(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    names = {id(parameter): name for parameter, name in parameter_names(model).items()}
    found: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for identity in {id(parameter) for parameter in _stepped(optimizer)}:
            other = found.setdefault(identity, number)
            if other != number:
                raise OptimizerError(
                    f"{names.get(identity, 'a parameter')} is in two of the optimizers ({other} and "
                    f"{number}): each would step it"
                )
    trained = [(id(p), name) for p, name in parameter_names(model).items() if p.requires_grad]
    missing = [name for identity, name in trained if identity not in found]
    if missing:
        raise OptimizerError(
            f"{len(missing)} parameters that require gradients are in none of the {len(optimizers)} "
            f"optimizers: {abridged(missing)}. Give them to one, or freeze them with requires_grad_(False)"
        )
