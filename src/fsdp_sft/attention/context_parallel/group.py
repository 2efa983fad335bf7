"""Ranks that share the tokens of a row: what each knows of whole rows, what they exchange, how they attend.

Around transformers' own attention tokens are exchanged for heads, and back: DeepSpeed Ulysses.

Attention of one head needs all tokens of that head and nothing of the others. So each of n ranks exchanges
its S/n tokens of all H heads for all S tokens of H/n heads, computes what one process would compute for those
heads, and exchanges the result back (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509). With 2 ranks, 4
tokens and 2 heads a and b, an entry is the rank that holds it::

                  layers          attention          layers
                   a  b             a  b              a  b
    token 0        0  0             0  1              0  0
    token 1        0  0   to_heads  0  1   to_tokens  0  0
    token 2        1  1   ------->  0  1   -------->  1  1
    token 3        1  1             0  1              1  1

Each exchange is one all-to-all: in the first, rank 0 sends its tokens 0 and 1 of head b to rank 1 and gets
tokens 2 and 3 of head a. Queries, keys and values travel in the same one. With a single collective in flight,
ranks cannot start several in different orders.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_sft._compat.attention import eager_attention_of, keep_rows_apart
from fsdp_sft._compat.groups import exchange_rows
from fsdp_sft._ranks.mesh import row_group
from fsdp_sft.errors import UnsupportedModelError

PREFIX = "cp_"  # put before the name of the wrapped attention


@dataclass(frozen=True)
class SequenceGroup:
    """Ranks that share the tokens of a row.

    Attributes:
        name: Name of their process group.
        size: Number of ranks in the group.
        rank: Index of this rank in the group, and so of its part of the tokens and, in attention, of the
            heads.
    """

    name: str
    size: int
    rank: int

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        """Differentiable all-to-all: row i of ``rows`` goes to rank i, row i of the result is from rank i.

        Collective: all ranks of the group.
        """
        return exchange_rows(rows, self.name)


def sequence_group_in(mesh: DeviceMesh | None) -> SequenceGroup | None:
    """This rank's group along the ``cp`` axis of a mesh; None if no ranks share rows along it."""
    group = row_group(mesh)
    return None if group is None else SequenceGroup(group.group_name, group.size(), group.rank())


@dataclass(frozen=True, eq=False)
class WholeRows:
    """Facts about whole rows that every rank of a group knows.

    Attributes:
        group: Ranks that share the rows.
        length: Number of tokens of a sequence, a multiple of the number of ranks.
        position_ids: Positions of all tokens, ``(B, length)``.
        rows: Index of the packed row of each token, ``(B, length)``; None if no sequence has several rows.
        padding: Mask of the tokens that are not padding, bool ``(B, length)``; None if there is no padding.
        filler: Number of tokens at the end that only make the length a multiple of the ranks.
    """

    group: SequenceGroup
    length: int
    position_ids: torch.Tensor
    rows: torch.Tensor | None
    padding: torch.Tensor | None
    filler: int = 0


_whole: ContextVar[WholeRows | None] = ContextVar("fsdp_sft_whole_rows", default=None)


@contextmanager
def part_of_rows(whole: WholeRows) -> Iterator[None]:
    """Tell forwards within the block that their inputs are this rank's part of ``whole``."""
    token = _whole.set(whole)
    try:
        yield
    finally:
        _whole.reset(token)


def rows_in_forward() -> WholeRows | None:
    """The whole rows of which the present forward has a part; None in a plain forward."""
    return _whole.get()


def not_divisible(whose: str, heads: int, ranks: int) -> str:
    """Error message for a number of query heads that the number of ranks does not divide."""
    divisors = [number for number in range(2, heads + 1) if heads % number == 0]
    return (
        f"{whose} {heads} query heads, which cp={ranks} does not divide: use cp of {divisors}, and give the "
        "other ranks to dp_shard"
    )


@dataclass(frozen=True)
class KeyHeads:
    """The key heads that each rank gets for its query heads.

    Attributes:
        repeats: Number of copies that are made of each key head before the exchange.
        groups: Number of a rank's query heads for each key head that it gets.
    """

    repeats: int
    groups: int


def key_heads(num_query: int, num_key: int, ranks: int) -> KeyHeads:
    """The fewest key heads with which each rank can compute its query heads.

    As in transformers, query head i uses key head ``i // (num_query // num_key)``. If the number of ranks
    does not divide that of key heads, these are repeated: to one per rank if all query heads of a rank use
    the same key head, and if not, to one per query head::

        12 query heads, 4 key heads, 3 ranks:  queries 0 1 2 3 | 4 5 6 7 | 8 9 10 11
                                               keys    0 0 0 1 | 1 1 2 2 | 2 3  3  3
    """
    each, shared = num_query // ranks, num_query // num_key
    if num_key % ranks == 0:
        return KeyHeads(1, shared)
    if shared % each == 0:
        return KeyHeads(ranks // num_key, each)
    return KeyHeads(shared, 1)


def to_heads(tensors: Sequence[torch.Tensor], group: SequenceGroup) -> list[torch.Tensor]:
    """Exchange ``(B, heads, S / n, D)`` of all heads for ``(B, heads / n, S, D)`` of this rank's heads.

    Collective: all ranks of the group.
    """
    if len({tensor.dtype for tensor in tensors}) > 1:
        return [to_heads([tensor], group)[0] for tensor in tensors]
    ranks = group.size
    # (n, B, heads / n, S / n, D): entry r is the part of the heads that rank r computes
    sent = [tensor.unflatten(1, (ranks, -1)).movedim(1, 0) for tensor in tensors]
    flat = torch.cat([part.flatten(1) for part in sent], 1)
    received = group.exchange(flat.contiguous()).split([part[0].numel() for part in sent], 1)
    whole = []
    for got, part in zip(received, sent, strict=True):
        # Entry r has the tokens of rank r, so n comes before the tokens: (B, heads / n, n, S / n, D).
        whole.append(got.reshape(part.shape).movedim(0, 2).flatten(2, 3))
    return whole


def to_tokens(out: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Exchange ``(B, S, heads / n, D)`` of this rank's heads for ``(B, S / n, heads, D)`` of all heads.

    Collective: all ranks of the group.
    """
    # (n, B, S / n, heads / n, D): entry r is the part of the tokens that rank r has in the layers
    sent = out.unflatten(1, (group.size, -1)).movedim(1, 0)
    received = group.exchange(sent.flatten(1).contiguous()).reshape(sent.shape)
    # Entry r has the heads of rank r, so n comes before the heads: (B, S / n, n, heads / n, D).
    return received.movedim(0, 2).flatten(2, 3)


# Attention over a sequence of which each rank has a part.


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
    from transformers import AttentionInterface, AttentionMaskInterface

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
    from transformers import AttentionMaskInterface

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
        from transformers import AttentionInterface

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
