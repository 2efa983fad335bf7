"""Ranks that share the tokens of a row, and the facts that each knows about the whole rows in a forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_sft._compat.groups import exchange_rows
from fsdp_sft._ranks.mesh import CP, cp_rank, cp_size, data_parallel_place

PREFIX = "cp_"  # put before the name of the wrapped attention


@dataclass(frozen=True)
class SequenceGroup:
    """Ranks that share the tokens of a row.

    Attributes:
        name: Name of their process group.
        size: Number of ranks in the group.
        rank: Index of this rank in the group, and so of its part of the tokens and, in attention, of the
            heads.
        share: Index of the group, which is also the index of its share of the data.
    """

    name: str
    size: int
    rank: int
    share: int

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        """Differentiable all-to-all: row i of ``rows`` goes to rank i, row i of the result is from rank i.

        Collective: all ranks of the group.
        """
        return exchange_rows(rows, self.name)


def sequence_group_in(mesh: DeviceMesh | None) -> SequenceGroup | None:
    """This rank's group along the ``cp`` axis of a mesh; None if no ranks share rows along it."""
    if mesh is None or cp_size(mesh) == 1:
        return None
    name = mesh.get_group(CP).group_name
    return SequenceGroup(name, cp_size(mesh), cp_rank(mesh), data_parallel_place(mesh)[0])


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
