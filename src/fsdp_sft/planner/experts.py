"""Experts of which no value is known: each is given its share of the tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from fsdp_sft._compat import experts_forward, switchable_experts

ExpertsImpl = Literal["grouped_mm", "eager"]


@contextmanager
def computed_by(model: nn.Module, impl: ExpertsImpl) -> Iterator[None]:
    """Let a model on the meta device compute its experts in a way of transformers'.

    ``"grouped_mm"`` is transformers' own; ``"eager"`` asks which experts have tokens, which no meta tensor
    can answer. Undone at the end of the block.
    """
    changed: list[Any] = list(switchable_experts(model).values())
    ways: dict[str, Callable[..., Any]] = {"grouped_mm": _grouped, "eager": _one_by_one}
    for module in changed:
        module.__dict__["forward"] = partial(ways[impl], module)
    try:
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]


def _grouped(experts: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = experts_forward(experts, "grouped_mm")(experts, *args, **kwargs)
    return result


def _one_by_one(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The operations of eager experts, in their order, each on as many tokens as the next one."""
    total = torch.zeros_like(hidden_states)
    with torch.no_grad():
        # Held until the end, as transformers does: 8 bytes for each token, choice and expert.
        mask = F.one_hot(top_k_index, num_classes=experts.num_experts + 1).permute(2, 1, 0)
    choices, number = top_k_index.numel(), experts.num_experts
    names = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    for index in range(number):
        tokens = choices * (index + 1) // number - choices * index // number
        position, token = (mask.new_empty(tokens) for _ in range(2))
        current = _linear(experts, names[0], index, hidden_states[token])
        current = experts._apply_gate(current) if experts.has_gate else experts.act_fn(current)
        current = _linear(experts, names[1], index, current)
        current = current * top_k_weights[token, position, None]
        total.index_add_(0, token, current.to(total.dtype))
    return total


def _linear(experts: Any, name: str, index: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)[index]
    bias = getattr(experts, f"{name}_bias", None)
    weight = weight.T if experts.is_transposed else weight
    return F.linear(rows, weight, None if bias is None else bias[index])
