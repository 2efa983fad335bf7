"""Attention over a sequence of which each rank has a part, wrapped around transformers' own."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from fsdp_sft._compat.attention import eager_attention_of, keep_rows_apart
from fsdp_sft.attention.context_parallel.group import (
    PREFIX,
    SequenceGroup,
    key_heads,
    not_divisible,
    rows_in_forward,
    to_heads,
    to_tokens,
)
from fsdp_sft.errors import UnsupportedModelError


@dataclass(frozen=True, eq=False)
class SequenceMask:
    """Stand-in for the attention mask that tells attention that it sees a part of the tokens.

    As an argument of the layers it also reaches a recomputation, which another thread may run.

    Attributes:
        group: Ranks that have the parts of the sequence.
        inner: Mask of the whole sequence, in the form that the wrapped attention takes.
        position_ids: Positions of the whole sequence, ``(B, S)``.
    """

    group: SequenceGroup
    inner: Any
    position_ids: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the model looks at {name!r} of its attention mask, which under context parallelism is that of "
            "tokens which other ranks have"
        )


def register(implementation: str) -> str:
    """Register attention over parts of a sequence, wrapped around ``implementation``; returns its name."""
    name = PREFIX + implementation
    AttentionInterface.register(name, functools.partial(attend, implementation))
    AttentionMaskInterface.register(name, functools.partial(make_mask, implementation))
    return name


def make_mask(
    implementation: str,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **others: Any,
) -> Any:
    """Function for transformers' mask interface: the mask of the whole sequence, in a ``SequenceMask``."""
    whole = rows_in_forward()
    plain = functools.partial(AttentionMaskInterface()[implementation], batch_size=batch_size, **others)
    if whole is None:
        return plain(
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
        )
    part = whole.length // whole.group.size
    # A model that makes a cache although none is asked for takes the number of keys from the cache.
    if q_length != part or kv_length not in (part, whole.length):
        raise UnsupportedModelError(
            f"the model makes a mask of {q_length} queries and {kv_length} keys, where this rank has "
            f"{part} of {whole.length} tokens: it attends to something beside the text, which context "
            "parallelism cannot cut"
        )
    if whole.rows is not None:
        mask_function = keep_rows_apart(mask_function, whole.position_ids, whole.rows)
    inner = plain(
        q_length=whole.length,
        kv_length=whole.length,
        mask_function=mask_function,
        attention_mask=whole.padding,
        allow_is_causal_skip=allow_is_causal_skip and whole.rows is None,
    )
    if whole.filler and isinstance(inner, torch.Tensor) and inner.is_floating_point():
        # A token that may see no key (left padding) attends to all keys equally in such a mask. Filler must
        # not be among them.
        inner[..., -whole.filler :] = -math.inf
    return SequenceMask(whole.group, inner, whole.position_ids)


def attend(
    implementation: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Function for transformers' attention interface; tensors are ``(B, heads, S / n, head size)``."""
    function = _attention(implementation, module)
    if not isinstance(attention_mask, SequenceMask):
        _refuse_alone(module)
        return function(module, query, key, value, attention_mask, **others)  # type: ignore[no-any-return]
    group, inner = attention_mask.group, attention_mask.inner
    heads = query.shape[1]
    if heads % group.size:
        raise UnsupportedModelError(not_divisible(f"{type(module).__name__} has", heads, group.size))
    keys = key_heads(heads, key.shape[1], group.size)
    if keys.repeats > 1:
        key, value = key.repeat_interleave(keys.repeats, 1), value.repeat_interleave(keys.repeats, 1)
    own = _OwnHeads(heads, group)
    query, key, value = to_heads((query, key, value), group)
    others = {name: own.of(argument) for name, argument in others.items()}
    if others.get("position_ids") is not None:
        others["position_ids"] = attention_mask.position_ids
    seen: Any = module
    if keys.repeats > 1 or any(own.has(tensor) for tensor in module.parameters(recurse=False)):
        seen = _ModuleOfRank(module, own, keys.groups)
    out, _ = function(seen, query, key, value, own.of(inner), **others)
    return to_tokens(out, group), None


@dataclass(frozen=True)
class _OwnHeads:
    """Narrows tensors with an entry per query head, such as sinks and biases, to this rank's heads."""

    heads: int
    group: SequenceGroup

    def has(self, value: Any) -> bool:
        """Whether ``value`` has one entry per query head: ``(heads,)`` or ``(B, heads, S, S)``."""
        if not isinstance(value, torch.Tensor) or value.ndim not in (1, 4) or not value.is_floating_point():
            return False
        return bool(value.shape[0 if value.ndim == 1 else 1] == self.heads)

    def of(self, value: Any) -> Any:
        """The entries of this rank's heads; anything without an entry per head is returned as it is."""
        if not self.has(value):
            return value
        each = self.heads // self.group.size
        return value.narrow(0 if value.ndim == 1 else 1, self.group.rank * each, each)


class _ModuleOfRank:
    """An attention module as the wrapped attention function sees it: with this rank's heads only."""

    def __init__(self, module: nn.Module, own: _OwnHeads, groups: int) -> None:
        self.module, self.own, self.num_key_value_groups = module, own, groups

    def __getattr__(self, name: str) -> Any:
        return self.own.of(getattr(self.module, name))


def _attention(implementation: str, module: nn.Module) -> Callable[..., Any]:
    """The wrapped attention function; that of ``"eager"`` is in the file of the module's class."""
    if implementation != "eager":
        return AttentionInterface()[implementation]  # type: ignore[no-any-return]
    function: Callable[..., Any] | None = eager_attention_of(module)
    if function is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} has no eager attention of its own to run within context parallelism"
        )
    return function


def _refuse_alone(module: nn.Module) -> None:
    """Refuse a plain forward in training: every rank of a group would compute the whole rows.

    For generation that is right, and it is allowed.
    """
    if rows_in_forward() is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends without the mask that transformers made for the model, "
            "which says what other ranks have"
        )
    if module.training and torch.is_grad_enabled():
        raise UnsupportedModelError(
            "a model under context parallelism was called by itself in training: every rank of a group would "
            "compute the whole rows. Call train_step, causal_lm_loss or loss_sum, which cut them; a loss_fn "
            "is made of token_losses or loss_sum"
        )
