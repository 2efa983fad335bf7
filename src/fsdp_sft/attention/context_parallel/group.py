"""Ranks that share the tokens of a row: what each knows of whole rows, and what they exchange.

Around attention tokens are exchanged for heads, and back: DeepSpeed Ulysses.

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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_sft._compat.groups import exchange_rows
from fsdp_sft._model.blocks import find_blocks
from fsdp_sft._model.twin import rotations_by_length
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


# Rotary embeddings that depend on a row's length get whole rows where a forward has parts of them.

_HOOKED = "_fsdp_sft_whole_positions"


def show_whole_positions(model: nn.Module) -> None:
    """Let such embeddings (dynamic NTK, LongRoPE) compute all positions of a row, and keep this rank's part.

    They take the length of the row from the positions, and from its own alone each rank would take another
    length. Forwards of whole rows do not change. A second call adds nothing.

    Raises:
        UnsupportedModelError: If such an embedding lies in a block, which a recomputation may run where the
            whole rows are not known.
    """
    blocks = tuple(f"{name}." for name in find_blocks(model))
    for name, module in rotations_by_length(model).items():
        if name.startswith(blocks):
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}) computes rotary embeddings by the longest row, within a "
                "block: a rank that has a part of the row cannot"
            )
        if _HOOKED not in module.__dict__:
            module.__dict__[_HOOKED] = True
            module.register_forward_pre_hook(_with_whole_positions, with_kwargs=True)
            module.register_forward_hook(_own_part)


def _with_whole_positions(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Hook before the forward: replaces the positions by those of the whole rows."""
    rows = rows_in_forward()
    if rows is None:
        return None
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": rows.position_ids}
    return (args[0], rows.position_ids, *args[2:]), kwargs


def _own_part(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Hook after the forward: narrows the embeddings to this rank's positions."""
    rows = rows_in_forward()
    if rows is None:
        return None
    each = rows.length // rows.group.size

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(1, rows.group.rank * each, each)

    return own(output) if isinstance(output, torch.Tensor) else tuple(own(part) for part in output)
