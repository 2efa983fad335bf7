"""A model's own loss, held once against the one computed here, and the loss of a mixture's router.

A model may add terms to its loss (a router's loss, a z-loss, heads that predict further tokens), smooth the
labels, ignore another label than -100, or not shift. So its own loss on a tiny batch is compared with the
cross entropy of its logits: equal, or refused with both numbers. A router's loss is the one term that is
added here too.

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
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fsdp_sft._compat.models import intercept_balance_loss, original_class
from fsdp_sft._model.adapters import forward_parameters
from fsdp_sft._model.inputs import no_cache
from fsdp_sft._model.record import record_of
from fsdp_sft._model.sharded import compute_device, training_mesh_of
from fsdp_sft._model.twin import text_config
from fsdp_sft._model.wrappers import base_of, unwrapped
from fsdp_sft._process.generators import unmoved
from fsdp_sft._ranks.mesh import sum_over_mesh
from fsdp_sft.errors import ModelLossError
from fsdp_sft.loss.head import ProbeError, trying, wide
from fsdp_sft.targets import IGNORE_INDEX, shifted

RouterLoss = Literal["micro_batch", "global_micro_batch", "off"]

_FLAG = "output_router_logits"
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # of the models and configs of transformers
_WAY_OUT = (
    "Give train_step and evaluate a loss_fn that returns the loss that you mean, summed over the targets"
)
# Largest relative difference of equal losses. Losses of narrower dtypes have been rounded.
_TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5}
_logger = logging.getLogger("fsdp_sft.loss")


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

    def of(self, output: Any, model: nn.Module) -> torch.Tensor | None:
        """The router's loss in a forward's output, times its coefficient; None if it is not added.

        Raises:
            ModelLossError: If the forward returned a loss although it got no labels, or lacks the router's
                loss that is to be added.
        """
        if isinstance(getattr(output, "loss", None), torch.Tensor):
            raise ModelLossError(
                f"{_name(model)} returned a loss although it was given no labels: something in the batch "
                f"makes it add to its loss what is not computed here. {_WAY_OUT}"
            )
        if not self.is_added:
            return None
        aux = getattr(output, "aux_loss", None)
        if not isinstance(aux, torch.Tensor):
            raise ModelLossError(
                f"{_name(model)} returned no router's loss (aux_loss) in this forward, although it did when "
                "it was asked on a tiny batch: its blocks may be compiled in a way that drops what "
                "routers say. Compile it otherwise, or take router_loss='off'"
            )
        return _coefficient(model)[1] * aux


@dataclass
class LossSettings:
    """What was said of a model's loss by ``prepare_loss``, and found out about it.

    Attributes:
        compare: Whether its own loss has to be the cross entropy.
        router_loss: What to do with the router's loss where a call does not say.
        found: Terms that it adds, by the value of the forward's argument ``output_router_logits``.
        has_warned: Whether the warning of a router's loss that is left out was given.
    """

    compare: bool = True
    router_loss: RouterLoss | None = None
    found: dict[bool | None, Additions] = field(default_factory=dict)
    has_warned: bool = False


def check_router_loss(router_loss: str | None) -> None:
    """Raise for an unknown ``router_loss``."""
    if router_loss not in (None, *get_args(RouterLoss)):
        allowed = ", ".join(map(repr, get_args(RouterLoss)))
        raise ValueError(f"router_loss must be None or one of {allowed}, got {router_loss!r}")


def additions_to(model: nn.Module, router_loss: RouterLoss | None) -> Additions:
    """What the loss of ``model`` has beside the cross entropy, found once and the same on all ranks.

    Args:
        model: Model with its weights.
        router_loss: ``"off"`` does not add the router's loss, the other names do. None is what
            ``prepare_loss`` was told; without that, the router's loss is added if the config has
            ``output_router_logits``, and if not, a warning says once that it is left out.

    Raises:
        ModelLossError: If the model's own loss is not the cross entropy, or if a router's loss is asked for
            that it does not have or that ``prepare_loss(compare=False)`` has excluded.

    Collective: all ranks of the model's mesh, the first time.
    """
    check_router_loss(router_loss)
    settings = record_of(model).kept_or_new(LossSettings)
    router_loss = router_loss or settings.router_loss
    takes_flag = _FLAG in forward_parameters(model)
    configs = [getattr(unwrapped(model), "config", None), text_config(model)]
    configured = any(getattr(each, _FLAG, None) is True for each in configs)
    wanted = configured if router_loss is None else router_loss != "off"
    if wanted and router_loss is not None and not (takes_flag and settings.compare):
        why = (
            f"the forward of {_name(model)} takes no {_FLAG}, so there is no router's loss to add. {_WAY_OUT}"
            if not takes_flag
            else "prepare_loss(compare=False) took the cross entropy alone for the loss of this model"
        )
        raise ModelLossError(f"router_loss={router_loss!r}: {why}")
    if router_loss is None and not configured and takes_flag and not settings.has_warned:
        settings.has_warned = True
        _say_what_is_left_out(model)
    # The argument is passed only if it differs from the config: dense models of a family that also has
    # experts take it too.
    flag = wanted if takes_flag and wanted != configured else None
    inputs = {} if flag is None else {_FLAG: flag}
    if not settings.compare:
        return Additions(False, inputs)
    if flag not in settings.found:
        settings.found[flag] = _compared(model, inputs, wanted, router_loss)
    return replace(settings.found[flag], over_ranks=router_loss == "global_micro_batch")


def _compared(
    model: nn.Module, inputs: dict[str, Any], wanted: bool, router_loss: RouterLoss | None
) -> Additions:
    """The model's own loss, explained; all ranks of the mesh agree on the outcome."""
    if any(p.is_meta for p in model.parameters()):
        raise ValueError(f"{_name(model)} has parameters on the meta device: load its weights first")
    try:
        has_aux, balanced, reason = own_loss_is_ours(model, inputs)
        if wanted and not has_aux and not reason and router_loss is not None:
            reason = f"has no router's loss (aux_loss) for router_loss={router_loss!r}"
    except ProbeError as error:
        has_aux, balanced = False, False
        reason = (
            f"cannot be compared, because {error}: if a forward without labels works, call "
            "prepare_loss(model, compare=False) to train the cross entropy alone"
        )
    failed, differ = sum_over_mesh([bool(reason), not balanced], training_mesh_of(model))
    if failed:
        reason = reason or "is another than what is computed here on another rank of the mesh"
        raise ModelLossError(f"the own loss of {_name(model)} {reason}. {_WAY_OUT}")
    return Additions(wanted and has_aux, inputs, not differ)


def own_loss_is_ours(model: nn.Module, inputs: dict[str, Any]) -> tuple[bool, bool, str]:
    """Compare a model's own loss in training mode with the cross entropy of its logits, on a tiny batch.

    Returns:
        (whether the model adds a router's loss, whether that is what ``Balance`` computes, why its loss is
        another one or "").

    Raises:
        ProbeError: If the model raises.

    Collective: all ranks of the model's mesh, by one forward or two.
    """
    kinds = forward_parameters(model)
    if "labels" not in kinds and not any(each.kind is each.VAR_KEYWORD for each in kinds.values()):
        return False, False, ""
    device, inner = compute_device(model), unwrapped(model)
    balance = Balance(replaces=False)
    intercept_balance_loss(base_of(inner), _intercepted)
    with trying(model), balanced_by(balance):
        embedding = getattr(inner, "get_input_embeddings", lambda: None)()
        rows = getattr(embedding, "num_embeddings", None) or 19
        ids = torch.arange(3, 19, device=device).view(2, 8) % rows
        # Labels in which losses may differ: unequal numbers of targets a row, special tokens, -100.
        labels = ids.roll(1, dims=0)
        for column, special in enumerate(("pad", "bos", "eos"), start=2):
            token = getattr(getattr(inner, "config", None), f"{special}_token_id", None)
            if isinstance(token, int) and 0 <= token < rows:
                labels[0, column] = token
        labels[0, 6] = labels[1, 1:5] = IGNORE_INDEX
        given = {"input_ids": ids, **no_cache(model), **inputs}
        model.train()
        with unmoved([device]):
            output = model(**given, labels=labels)
        logits: Any = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.shape[:2] != labels.shape:
            logits = model(**given).logits  # a fused kernel returns a loss or logits
        loss: Any = getattr(output, "loss", None)
        aux: Any = getattr(output, "aux_loss", None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            _logger.info("loss of %s: its forward with labels returns none to compare with", _name(model))
            return False, False, ""
        targets = shifted(labels).flatten().to(logits.device)
        expected = float(F.cross_entropy(wide(logits).flatten(0, 1), targets, ignore_index=IGNORE_INDEX))
        name, coefficient = _coefficient(model)
        has_aux = isinstance(aux, torch.Tensor) and bool(name)
        if has_aux:
            expected += coefficient * float(aux)
        own, near = float(loss), _TOLERANCE.get(loss.dtype, 2 * torch.finfo(loss.dtype).eps)
    is_balanced = (
        has_aux and balance.loss is not None and math.isclose(float(balance.loss), float(aux), rel_tol=near)
    )
    broken = not math.isfinite(own) and not math.isfinite(expected)  # which a step says in its own words
    if broken or math.isclose(own, expected, rel_tol=near, abs_tol=1e-3 * near):
        return has_aux, is_balanced, ""
    also = f" and {name} times aux_loss" * has_aux
    return (
        has_aux,
        is_balanced,
        f"is not what is computed here: on a tiny batch it is {own:.6g}, and the cross entropy{also} "
        f"{expected:.6g}",
    )


def _coefficient(model: nn.Module) -> tuple[str, float]:
    """Name and value of the router's coefficient, read where the model reads it; ("", 0.0) without one."""
    inner = base_of(unwrapped(model))
    for holder in (inner, getattr(inner, "config", None), text_config(inner)):
        for name in _COEFFICIENTS:
            value = getattr(holder, name, None)
            if isinstance(value, (int, float)):
                return name, float(value)
    return "", 0.0


def _say_what_is_left_out(model: nn.Module) -> None:
    """Warn that a router's loss with a positive coefficient is not added."""
    name, value = _coefficient(model)
    mesh = training_mesh_of(model)
    if value > 0 and (mesh is None or mesh.get_rank() == 0):
        _logger.warning(
            "%s has %s=%g, and its router's loss is not trained, because its config has no "
            "output_router_logits: prepare_loss(model, router_loss='micro_batch') adds it, 'off' leaves it "
            "out without a word",
            *(_name(model), name, value),
        )


def _name(model: nn.Module) -> str:
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

    ``own_loss_is_ours`` must have been called for the model before.
    """
    token = _active.set(balance)
    try:
        yield
    finally:
        _active.reset(token)


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
