"""Adapters of experts that ranks share out: each rank takes those of its own experts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.adapters import parameter_adapters


def adapt_placed(experts: nn.Module, adapters: list[Any], rank: int) -> None:
    """Make placed experts add their adapters themselves; to be called before they are placed.

    peft's wrappers around the experts add them before FSDP2 gathers the experts, which then are a group of
    their own, and would add those of all experts to this rank's. Adapters stay whole parameters of their
    block: a rank's gradients are zero for the experts of others, so that the average over ranks is right.

    Args:
        experts: Module of experts, whose ``forward`` is replaced.
        adapters: peft's wrappers around it, the outermost first.
        rank: This rank's place among those that share out the experts, which have equal parts.
    """
    if not adapters:
        return
    experts.forward = partial(_forward, adapters, rank, experts.forward)
    for wrapper in adapters:
        wrapper.forward = partial(_pass_on, wrapper)


def placed_adapters(model: nn.Module, placed: Mapping[str, nn.Module]) -> dict[str, list[Any]]:
    """Peft's wrappers around each of the experts of a model, by the experts' FQN in the base model."""
    wrappers = parameter_adapters(model)
    return {fqn: [w for w in wrappers if w.get_base_layer() is experts] for fqn, experts in placed.items()}


def _pass_on(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    return wrapper.base_layer(*args, **kwargs)


def _forward(adapters: list[Any], rank: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The experts' own forward, with adapters added to their parameters, which are this rank's here."""
    with ExitStack() as added:
        for wrapper in adapters:
            added.enter_context(_added(wrapper, rank))
        return forward(*args, **kwargs)


@contextmanager
def _added(wrapper: Any, rank: int) -> Iterator[None]:
    """Context in which a parameter of the experts is the sum of itself and the active adapters."""
    experts, name = wrapper.get_base_layer(), wrapper.parameter_name
    own = total = getattr(experts, name)
    if not wrapper.disable_adapters and not wrapper.merged:
        for adapter in wrapper.active_adapters:
            if adapter in wrapper.lora_A:
                total = _sum(total, wrapper, adapter, rank * len(own))
    experts._parameters[name] = total
    try:
        yield
    finally:
        experts._parameters[name] = own


def _sum(own: torch.Tensor, wrapper: Any, adapter: str, first: int) -> torch.Tensor:
    """Rows of a parameter and of one adapter: ``(experts, in, out)``, or ``(experts, out)`` for biases."""
    mine = slice(first, first + len(own))
    if own.ndim == 2:
        delta: torch.Tensor = wrapper.get_delta_weight(adapter)
        return own + delta[mine]
    left, right, scale = wrapper.get_delta_factors(adapter)
    return torch.baddbmm(own, left[mine].to(own.dtype), right[mine].to(own.dtype), alpha=scale)
