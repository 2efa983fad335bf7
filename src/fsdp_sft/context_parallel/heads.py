"""Each rank's part of a sequence for all heads, exchanged for the whole sequence for some heads, and back.

Ulysses (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509): with n ranks, S tokens and H heads

    before    rank r has tokens r S/n to (r+1) S/n of all H heads
    attention rank r has all S tokens of heads r H/n to (r+1) H/n, and computes what one process would
    after     as before

One exchange carries queries, keys and values together: with one collective in flight there is no order in
which ranks could start several differently.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp_sft.context_parallel.group import SequenceGroup


@dataclass(frozen=True)
class KeyHeads:
    """Which key heads each rank gets for its query heads.

    Attributes:
        repeats: How often each key head is repeated before they are dealt out.
        groups: Query heads of a rank for each key head that it gets.
    """

    repeats: int
    groups: int


def key_heads(num_query: int, num_key: int, ranks: int) -> KeyHeads:
    """The fewest key heads that let each rank compute its query heads.

    Key heads lie next to the query heads that use them, as in transformers: query head i uses key head
    ``i // (num_query // num_key)``. Where they do not divide by the ranks they are repeated: to one for each
    rank if all of its query heads use the same, and else to one for each query head.

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
    """``(B, heads, S / n, D)`` of all heads to ``(B, heads / n, S, D)`` of this rank's.

    Collective: all ranks of the group.
    """
    if len({tensor.dtype for tensor in tensors}) > 1:
        return [to_heads([tensor], group)[0] for tensor in tensors]
    ranks = group.size
    # (n, B, heads / n, S / n, D): what goes to each rank
    sent = [tensor.unflatten(1, (ranks, -1)).movedim(1, 0) for tensor in tensors]
    flat = torch.cat([part.flatten(1) for part in sent], 1)
    received = group.exchange(flat.contiguous()).split([part[0].numel() for part in sent], 1)
    whole = []
    for got, part in zip(received, sent, strict=True):
        # from each rank its tokens: (n, B, heads / n, S / n, D) to (B, heads / n, n, S / n, D)
        whole.append(got.reshape(part.shape).movedim(0, 2).flatten(2, 3))
    return whole


def to_tokens(out: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """``(B, S, heads / n, D)`` of this rank's heads to ``(B, S / n, heads, D)`` of all.

    Collective: all ranks of the group.
    """
    sent = out.unflatten(1, (group.size, -1)).movedim(1, 0)  # (n, B, S / n, heads / n, D)
    received = group.exchange(sent.flatten(1).contiguous()).reshape(sent.shape)
    return received.movedim(0, 2).flatten(2, 3)
