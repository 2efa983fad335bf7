"""Load-balancing loss of a mixture's router in the model's forward, over the tokens of one or several ranks.

The loss is ``E * sum_i f_i P_i`` for ``E`` experts: ``f_i`` is how often expert i was chosen per token, and
``P_i`` the mean probability that the router gives it (Switch Transformers, arXiv:2101.03961, equations 4 to
6). It is a product of means. So the mean of several ranks' losses is not the loss of all their tokens, and
drives each rank to balance its own tokens (arXiv:2501.11873). Two ranks and two experts, a and b:

            chosen       f          P        E sum f P
    rank 0  a a a a     1   0      1   0        2
    rank 1  b b b b     0   1      0   1        2          mean 2
    both                .5  .5     .5  .5       1          balanced

Only ``f`` needs the other ranks. It has no gradient, and the loss is linear in ``P``. So ranks sum up how
often each expert was chosen, and each rank computes the loss with that ``f`` and the ``P`` of its own tokens.
Weighted by tokens and added up, as the losses of a window are anyway, these give the loss of all tokens and
its gradient.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_sft._compat.models import intercept_balance_loss
from fsdp_sft._model.wrappers import base_of, unwrapped
from fsdp_sft.errors import ModelLossError
from fsdp_sft.loss.transform import wide


class Balance:
    """Computes the router's loss in one forward.

    Args:
        counted: Mask of the tokens that count, bool ``(B, S)``; None if all do.
        groups: Process groups to sum over, one after the other, for the tokens of their ranks to be balanced
            together. Without any, this rank's tokens are balanced alone.
        replaces: Whether the forward gets this loss; if not, it gets the model's own.

    Attributes:
        loss: The computed loss; None before the forward.
    """

    def __init__(
        self,
        counted: torch.Tensor | None = None,
        groups: tuple[dist.ProcessGroup, ...] = (),
        *,
        replaces: bool = True,
    ) -> None:
        self.counted, self.groups, self.replaces = counted, groups, replaces
        self.loss: torch.Tensor | None = None

    def of(self, routers: tuple[torch.Tensor, ...], num_experts: int, top_k: int) -> torch.Tensor:
        """This rank's share of the loss: ``f`` of all ranks with the ``P`` of its own tokens.

        Args:
            routers: Router logits of each layer, ``(tokens, num_experts)``.
            num_experts: Number of experts in a layer.
            top_k: Number of experts that a token is sent to.

        Collective: all ranks of the groups.
        """
        device = routers[0].device
        counted = None if self.counted is None else self.counted.reshape(-1).to(device)
        # Integers, whose sum does not depend on the order in which ranks are added. The last entry counts
        # the tokens.
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
    """1 for each token that counts and 0 for the others, int64."""
    if counted is None:
        return torch.ones(tokens, dtype=torch.int64, device=device)
    if len(counted) != tokens:
        raise ModelLossError(
            f"a router of this model saw {tokens} of {len(counted)} tokens, so that it is not known which of "
            "them are padding; take router_loss='off'"
        )
    return counted.to(torch.int64)


_active: ContextVar[Balance | None] = ContextVar("fsdp_sft_balance", default=None)


@contextmanager
def balanced_by(balance: Balance | None) -> Iterator[None]:
    """Let ``balance`` compute the router's loss of forwards within the block; None leaves it to the model.

    ``intercept`` must have been called for the model before.
    """
    token = _active.set(balance)
    try:
        yield
    finally:
        _active.reset(token)


def intercept(model: nn.Module) -> None:
    """Let ``balanced_by`` reach the function with which a model computes its router's loss, if it has one."""
    intercept_balance_loss(base_of(unwrapped(model)), _intercepted)


def _intercepted(original: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of transformers' function that calls ``Balance`` where the context asks for it."""

    @functools.wraps(original)
    def balance_loss(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a compiled graph cannot read context variables
            return original(*args, **kwargs)
        balance, given = _active.get(), _read(*args, **kwargs)
        if balance is None or given is None:
            return original(*args, **kwargs)
        computed = balance.of(*given)
        return computed if balance.replaces else original(*args, **kwargs)

    return balance_loss


def _read(
    gate_logits: Any = None, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None
) -> tuple[tuple[torch.Tensor, ...], int, int] | None:
    """The arguments of ``Balance.of``, read from those of transformers' function; None without routers."""
    if not isinstance(gate_logits, tuple) or not gate_logits or not isinstance(num_experts, int):
        return None
    return gate_logits, num_experts, top_k
