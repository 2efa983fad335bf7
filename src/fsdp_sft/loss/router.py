"""The loss of a mixture's router: as the model computes it, or over the tokens of several ranks.

The router's loss is ``E * sum_i f_i P_i`` for ``E`` experts: ``f_i`` is how often expert i was chosen per
token, and ``P_i`` the mean probability that the router gives it (Switch Transformers, arXiv:2101.03961,
equations 4 to 6). It is a product of means. So the mean of several ranks' losses is not the loss of all their
tokens, and drives each rank to balance its own tokens (arXiv:2501.11873). Two ranks and two experts, a and b:

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
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fsdp_sft._compat.models import original_class
from fsdp_sft._model.sharded import training_mesh_of
from fsdp_sft._model.twin import text_config
from fsdp_sft._model.wrappers import base_of, unwrapped
from fsdp_sft._process.streams import travelling
from fsdp_sft._ranks.mesh import CP, device_groups_of
from fsdp_sft.errors import ModelLossError
from fsdp_sft.loss.counting import Batch, counted_tokens, num_targets as num_targets_of, weight_of
from fsdp_sft.loss.head import wide
from fsdp_sft.loss.part import BatchPart, tokens_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

RouterLoss = Literal["micro_batch", "global_micro_batch", "off"]

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # of the models and configs of transformers
WAY_OUT = (
    "Give train_step and evaluate a loss_fn that returns the loss that you mean, summed over the targets"
)


@dataclass(frozen=True)
class Additions:
    """Terms that are added to a model's cross entropy.

    Attributes:
        is_added: Whether the router's loss is added.
        inputs: Arguments of the forward that make it compute the router's loss.
        is_balanced: Whether the router's loss is the one that ``Balance`` computes.
        over_ranks: Whether it is to be computed over the tokens of all ranks.
    """

    is_added: bool
    inputs: dict[str, Any]
    is_balanced: bool = False
    over_ranks: bool = False

    def of(self, output: Any, model: nn.Module, balance: "Balance | None") -> torch.Tensor | None:
        """The router's loss in a forward's output, times its coefficient; None if it is not added.

        Raises:
            ModelLossError: If the forward returned a loss although it got no labels, or lacks the router's
                loss that is to be added, or did not let ``balance`` compute it.
        """
        if balance is not None and balance.loss is None:
            raise ModelLossError(
                f"the router's loss of {name_of(model)} was not computed where it was when the model was "
                "first asked: it has been compiled as a whole since (compile_blocks compiles its blocks), or "
                "its forward was replaced"
            )
        if isinstance(getattr(output, "loss", None), torch.Tensor):
            raise ModelLossError(
                f"{name_of(model)} returned a loss although it was given no labels: something in the batch "
                f"makes it add to its loss what is not computed here. {WAY_OUT}"
            )
        if not self.is_added:
            return None
        aux = getattr(output, "aux_loss", None)
        if not isinstance(aux, torch.Tensor):
            raise ModelLossError(
                f"{name_of(model)} returned no router's loss (aux_loss) in this forward, although it did "
                "when it was asked on a tiny batch: its blocks may be compiled in a way that drops what "
                "routers say. Compile it otherwise, or take router_loss='off'"
            )
        return coefficient_of(model)[1] * aux


def coefficient_of(model: nn.Module) -> tuple[str, float]:
    """Name and value of the router's coefficient, read where the model reads it; ("", 0.0) without one."""
    inner = base_of(unwrapped(model))
    for holder in (inner, getattr(inner, "config", None), text_config(inner)):
        for name in _COEFFICIENTS:
            value = getattr(holder, name, None)
            if isinstance(value, (int, float)):
                return name, float(value)
    return "", 0.0


def name_of(model: nn.Module) -> str:
    """Class name of a model, without wrappers and as it was before it was sharded."""
    return original_class(unwrapped(model)).__name__


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
            once = torch.ones_like(choices[::top_k]) if counted is None else counted.to(torch.int64)
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


# What computes the router's loss of a forward of a model whose own loss was compared; None leaves it to it.
BALANCE: ContextVar[Balance | None] = ContextVar("fsdp_sft_balance", default=None)


def _intercepted(original: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of transformers' function that calls ``Balance`` where the context asks for it."""

    @functools.wraps(original)
    def balance_loss(
        gate_logits: Any = None, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None
    ) -> Any:
        # A compiled graph cannot read context variables.
        balance = None if torch.compiler.is_compiling() else BALANCE.get()
        if balance is None or not isinstance(gate_logits, tuple) or not gate_logits:
            return original(gate_logits, num_experts, top_k, attention_mask)
        computed = balance.of(gate_logits, num_experts, top_k)
        return computed if balance.replaces else original(gate_logits, num_experts, top_k, attention_mask)

    return balance_loss


def counted_of(batch: Batch) -> torch.Tensor | None:
    """Mask of the tokens of a batch that are neither padding nor filler; None if all count."""
    return batch.counted if isinstance(batch, BatchPart) else counted_tokens(batch)


def balance_of(model: nn.Module, batch: Batch, additions: Additions) -> Balance | None:
    """Replacement of the model's own router loss; None takes the model's own.

    Raises:
        ModelLossError: If only the model's own can be taken, and it is not the loss that is asked for.
    """
    if not additions.is_added:
        return None
    counted, mesh = counted_of(batch), training_mesh_of(model)
    groups: tuple[dist.ProcessGroup, ...] = ()
    if additions.over_ranks:
        groups = device_groups_of(mesh)
    elif isinstance(batch, BatchPart) and mesh is not None:
        groups = (mesh.get_group(CP),)
    if additions.is_balanced:
        return Balance(counted, groups)
    is_filled = counted is not None and batch.get("attention_mask") is None and not bool(counted.all())
    if additions.over_ranks or isinstance(batch, BatchPart) or is_filled:
        raise ModelLossError(
            f"the router's loss of {name_of(model)} is not computed by transformers' usual function in "
            "an uncompiled forward, so that it cannot be that of several ranks' tokens, nor leave out what "
            "fills this pack up: take prepare_loss(model, router_loss='off')"
        )
    return None


def share_of_tokens(batch: Batch, num_targets: int, mesh: "DeviceMesh | None") -> float:
    """A batch's share of the window's tokens."""
    tokens = getattr(num_targets, "num_tokens", 0)
    if tokens:
        return tokens_of(batch) / tokens
    if num_targets == num_targets_of(batch) and (mesh is None or mesh.size() == 1):
        return 1.0  # the batch is the window
    raise ValueError(
        "the router's loss of a micro-batch weighs by its tokens over those of the window, which are not "
        "known: take num_targets from count_targets, which counts them too, or pass router_loss='off'"
    )


def weight_of_router(
    batch: Batch, groups: tuple[dist.ProcessGroup, ...], device: torch.device
) -> torch.Tensor | float:
    """Factor that brings this rank's router loss, a mean, into the unit of the summed loss.

    It is the weight of the batch's targets. Over several ranks it is their total weight, times this rank's
    share of their tokens.
    """
    weight = weight_of(batch)
    if not groups:
        return weight
    own = float(tokens_of(batch))
    total = travelling(torch.tensor([weight, own], dtype=torch.float64), device)
    for group in groups:
        dist.all_reduce(total, group=group)
    return total[0] * own / total[1].clamp(min=1)
