"""A router's loss over the tokens that count, on one rank or several, where the model computes its own.

The loss of a mixture's router is ``E * sum_i f_i P_i``: ``f_i`` is how often expert i was chosen per token,
and ``P_i`` the mean probability that the router gives it (Switch Transformers, arXiv:2101.03961, equations 4
to 6). It is a product of means. Where ranks have a micro-batch's tokens together, the mean of the ranks'
losses is another number, and drives the tokens of each rank to balance by themselves
(arXiv:2501.11873):

            chosen       f          P        E sum f P
    rank 0  a a a a     1   0      1   0        2
    rank 1  b b b b     0   1      0   1        2          mean 2
    both                .5  .5     .5  .5       1          balanced

Only ``f`` needs the other ranks: it has no gradient, and in ``P`` the loss is linear. So ranks sum up how
often each expert was chosen, and each returns the share of its own tokens. Weighed by tokens and added up, as
the losses of a window are anyway, these are the loss of all, with its gradient.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_sft._compat import intercept_balance_loss
from fsdp_sft._wrappers import unwrapped
from fsdp_sft.errors import ModelLossError
from fsdp_sft.loss.transform import wide


class Balance:
    """How the router's loss of one forward is computed.

    Args:
        counted: Which tokens count, bool ``(B, S)``; None where all do.
        groups: Ranks whose tokens are looked at together: process groups that connect them, taken one after
            the other.

    Attributes:
        loss: What came of it; None before.
    """

    def __init__(
        self, counted: torch.Tensor | None = None, groups: tuple[dist.ProcessGroup, ...] = ()
    ) -> None:
        self.counted = counted
        self.groups = groups
        self.loss: torch.Tensor | None = None

    def of(self, routers: tuple[torch.Tensor, ...], num_experts: int, top_k: int) -> torch.Tensor:
        """This rank's share of the loss: the mean over its own tokens of what it is linear in.

        Args:
            routers: What each layer's router says of each token, ``(tokens, num_experts)``.
            num_experts: Of a layer.
            top_k: How many of them a token is sent to.

        Collective: all ranks of the groups.
        """
        device = routers[0].device
        counted = None if self.counted is None else self.counted.reshape(-1).to(device)
        # Whole numbers, which are added up to the same sum in any order.
        chosen = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        given: torch.Tensor | None = None
        for layer in routers:
            probabilities = torch.softmax(layer.to(device).reshape(-1, num_experts), dim=-1)
            choices = probabilities.topk(top_k, dim=-1).indices.reshape(-1)
            once = _ones(counted, len(probabilities), device)
            chosen[:num_experts].scatter_add_(0, choices, once.repeat_interleave(top_k))
            chosen[num_experts] += once.sum()
            summed = wide(probabilities)
            summed = (summed if counted is None else summed * counted.unsqueeze(-1)).sum(0)
            given = summed if given is None else given + summed
        assert given is not None
        own = chosen[num_experts].clamp(min=1)
        for group in self.groups:
            dist.all_reduce(chosen, group=group)
        fractions = chosen[:num_experts].to(given.dtype) / chosen[num_experts].clamp(min=1)
        self.loss = num_experts * (fractions * (given / own)).sum()
        return self.loss


def _ones(counted: torch.Tensor | None, tokens: int, device: torch.device) -> torch.Tensor:
    if counted is None:
        return torch.ones(tokens, dtype=torch.int64, device=device)
    if len(counted) != tokens:
        raise ModelLossError(
            f"a router of this model saw {tokens} of {len(counted)} tokens, so that it is not known which of "
            "them are padding; take router_loss='off'"
        )
    return counted.to(torch.int64)


_active: ContextVar[Balance | None] = ContextVar("fsdp_sft_balance", default=None)
_beside: ContextVar[Balance | None] = ContextVar("fsdp_sft_balance_beside", default=None)


@contextmanager
def balanced_by(balance: Balance | None) -> Iterator[None]:
    """Let forwards within the block compute their router's loss by ``balance``; None leaves it to them."""
    token = _active.set(balance)
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def balanced_beside(model: nn.Module, balance: Balance) -> Iterator[None]:
    """Let ``balance`` compute the router's loss beside the model's own, which forwards return as always."""
    inner: Any = unwrapped(model)
    base = getattr(inner, "get_base_model", None)
    intercept_balance_loss(base() if base is not None else inner, _intercepted)
    token = _beside.set(balance)
    try:
        yield
    finally:
        _beside.reset(token)


def _intercepted(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function of transformers, or in a forward that is to be balanced what stands in for it."""

    @functools.wraps(original)
    def balance_loss(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph cannot read what this thread's forward is for
            return original(*args, **kwargs)
        balance, beside = _active.get(), _beside.get()
        given = _read(*args, **kwargs)
        if balance is not None and given is not None:
            return balance.of(*given)
        own = original(*args, **kwargs)
        if beside is not None and given is not None:
            beside.of(*given)
        return own

    return balance_loss


def _read(
    gate_logits: Any = None, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None
) -> tuple[tuple[torch.Tensor, ...], int, int] | None:
    """What ``Balance.of`` takes; None where the function is called with nothing to balance."""
    if not isinstance(gate_logits, tuple) or not gate_logits or not isinstance(num_experts, int):
        return None
    return gate_logits, num_experts, top_k
