"""Experts on the meta device, where no router can choose: each expert gets an equal share of the tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from fsdp_sft._compat.experts import experts_forward, experts_to_place, switchable_experts
from fsdp_sft.planner.ledger import Ledger
from fsdp_sft.planner.sharing import exchange_on_paper

ExpertsImpl = Literal["grouped_mm", "eager"]


_SETTINGS = ("forward", "num_experts", "_is_expert_parallel", "_parameters")  # what is changed and put back


@contextmanager
def computed_by(model: nn.Module, impl: ExpertsImpl, ep_size: int, ledger: Ledger) -> Iterator[None]:
    """Context in which a model on the meta device computes its experts by ``impl``, on ``ep_size`` ranks.

    ``"grouped_mm"`` is transformers' own function. Its eager function asks which experts have tokens, and its
    exchange between ranks asks how many tokens go where; a meta tensor can answer neither, so the operations
    of both are reproduced here with equal shares. All changes to the model are undone at the end.
    """
    changed: list[Any] = list(switchable_experts(model).values())
    shared = [model.get_submodule(name) for name in experts_to_place(model)] if ep_size > 1 else []
    before = [{key: module.__dict__[key] for key in _SETTINGS if key in vars(module)} for module in changed]
    try:
        for module in changed:
            compute = _one_by_one if impl == "eager" else experts_forward(module, impl)
            module.__dict__["forward"] = partial(compute, module)
            if module in shared:
                _share_out(module, ep_size, ledger)
        yield
    finally:
        for module, settings in zip(changed, before, strict=True):
            del module.__dict__["forward"]
            vars(module).update(settings)


def _share_out(experts: Any, ep_size: int, ledger: Ledger) -> None:
    """Cut a module down to one rank's experts and send tokens to theirs, as ``_expert_parallel`` does."""
    own = {
        name: nn.Parameter(p.new_empty(len(p) // ep_size, *p.shape[1:]), requires_grad=p.requires_grad)
        for name, p in experts._parameters.items()
        if p is not None
    }
    ledger.ignore(own.values())
    total, compute = experts.num_experts, experts.__dict__["forward"]
    vars(experts).update(_parameters=own, num_experts=total // ep_size, _is_expert_parallel=True)
    experts.__dict__["forward"] = partial(_by_travelling, compute, total, ledger)


def _by_travelling(
    compute: Callable[..., torch.Tensor],
    num_experts: int,
    ledger: Ledger,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The operations of transformers' exchange of tokens, if each rank gets as many tokens as it sends."""
    expert_ids = top_k_index.reshape(-1)
    order = torch.argsort(expert_ids)
    sent = hidden_states[order // top_k_index.shape[-1]]
    torch.zeros(num_experts, dtype=torch.int64, device=sent.device).scatter_add_(
        0, expert_ids, torch.ones_like(expert_ids)
    )
    received = exchange_on_paper(sent, ledger)
    del sent
    # Named, because transformers' code holds on to each of them until it has combined the results.
    ids = torch.empty_like(expert_ids).unsqueeze(-1)
    weights = torch.ones_like(ids, dtype=received.dtype)
    computed = compute(received, ids, weights)
    result = exchange_on_paper(computed, ledger)
    by_token = torch.empty_like(result)
    by_token[order] = result
    by_token = by_token.view(*top_k_weights.shape, hidden_states.shape[-1])
    return (by_token * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


def _one_by_one(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The operations of eager experts, in their order, with equally many tokens for each expert."""
    total = torch.zeros_like(hidden_states)
    with torch.no_grad():
        # Held until the end, as in transformers: 8 bytes for each token, choice and expert.
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
    """Rows times the weight of one expert, by which bias and layout transformers gives it."""
    weight = getattr(experts, name)[index]
    bias = getattr(experts, f"{name}_bias", None)
    weight = weight.T if experts.is_transposed else weight
    return F.linear(rows, weight, None if bias is None else bias[index])
