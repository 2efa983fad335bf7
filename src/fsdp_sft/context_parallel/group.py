"""Ranks that share the tokens of a row, and what they know of the rows that a forward has a part of."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fsdp_sft._compat import exchange_rows
from fsdp_sft._meshes import CP, cp_rank, cp_size, data_parallel_place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PREFIX = "cp_"  # before the name of the attention that runs within


@dataclass(frozen=True)
class SequenceGroup:
    """Ranks that share the tokens of a row.

    Attributes:
        name: Of their process group.
        size: How many they are.
        rank: Which of them this is: it has that part of the tokens, and for attention that part of the heads.
        share: Which of such groups they are: what share of the data they have.
    """

    name: str
    size: int
    rank: int
    share: int

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        """Row i of the result is from rank i, which gets row i of ``rows``; differentiable.

        Collective: all ranks of the group.
        """
        return exchange_rows(rows, self.name)


def sequence_group_in(mesh: "DeviceMesh | None") -> SequenceGroup | None:
    """This rank's group along a mesh's ``cp``; None where each rank has rows of its own."""
    if mesh is None or cp_size(mesh) == 1:
        return None
    name = mesh.get_group(CP).group_name
    return SequenceGroup(name, cp_size(mesh), cp_rank(mesh), data_parallel_place(mesh)[0])


@dataclass(frozen=True, eq=False)
class WholeRows:
    """What every rank of a group knows of the rows that it has a part of.

    Attributes:
        group: The ranks.
        length: Tokens of the sequences, a multiple of the ranks.
        position_ids: Of all tokens ``(B, length)``.
        rows: Which row of a pack each token is in ``(B, length)``; None where no sequence has several.
        padding: Which tokens are none of padding, bool ``(B, length)``; None where all are.
        filler: Tokens at the end that only make the length such a multiple.
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
    """Let forwards within the block take their inputs for this rank's part of ``whole``."""
    token = _whole.set(whole)
    try:
        yield
    finally:
        _whole.reset(token)


def rows_in_forward() -> WholeRows | None:
    """What the forward that runs now has a part of; None in a plain one."""
    return _whole.get()


def not_divisible(whose: str, heads: int, ranks: int) -> str:
    """What to say of query heads that the ranks do not divide."""
    divisors = [number for number in range(2, heads + 1) if heads % number == 0]
    return (
        f"{whose} {heads} query heads, which cp={ranks} does not divide: use cp of {divisors}, and give the "
        "other ranks to dp_shard"
    )
