"""Best-fit-decreasing bin packing of sequence lengths, and a round of packs dealt to ranks."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from typing import TypeVar

from fsdp_sft.collate.options import check_count

T = TypeVar("T")


def pack_lengths(lengths: Iterable[int], capacity: int) -> list[list[int]]:
    """Put rows into packs of ``capacity`` tokens by best fit decreasing, which needs few packs.

    From the longest to the shortest, each row goes into the fullest pack that has room for it. That needs at
    most 11/9 of the fewest packs possible, plus four; packs of chat data are 99 % full or more. The result
    depends on the arguments alone.

    Args:
        lengths: Tokens of each row: integers, or a tensor or array of them.
        capacity: Most tokens of a pack.

    Returns:
        Packs of row indices, with every row in exactly one; an empty list without rows.

    Raises:
        TypeError: If a length is no integer.
        ValueError: If a length is not in [1, capacity].

    Memory: About 100 bytes a row.
    Source: D. S. Johnson, Near-optimal bin packing algorithms, 1973; rows of one length are placed together.

    Example:
        >>> fs.pack_lengths([700, 300, 500, 400, 100], capacity=1000)
        [[0, 1], [2, 3, 4]]
    """
    rows_of: dict[int, list[int]] = {}
    for row, size in enumerate(check_lengths(lengths, capacity)):
        rows_of.setdefault(size, []).append(row)
    packs: list[list[int]] = []
    # Packs with room left, by their free tokens; of several with equally many the last is found first.
    open_packs: dict[int, list[list[int]]] = {}
    free_sizes: list[int] = []  # of these packs, each number once, ascending
    for size in sorted(rows_of, reverse=True):
        rows, taken = rows_of[size], 0
        while taken < len(rows):
            # The smallest number that is at least a row's length is of the fullest pack with room for it.
            fullest = bisect_left(free_sizes, size)
            if fullest == len(free_sizes):
                free, pack = capacity, list[int]()
                packs.append(pack)
            else:
                free = free_sizes[fullest]
                pack = open_packs[free].pop()
                if not open_packs[free]:
                    del open_packs[free], free_sizes[fullest]
            # Of all packs with room for this length, this one is the fullest even after it has taken a row,
            # so it takes all further rows of the same length that fit.
            fitting = rows[taken : taken + free // size]
            taken += len(fitting)
            pack += fitting
            left = free - size * len(fitting)
            if left:
                if left not in open_packs:
                    insort(free_sizes, left)
                open_packs.setdefault(left, []).append(pack)
    return packs


def deal(packs: list[list[T]], weight: Callable[[T], float], num_ranks: int) -> list[list[T]]:
    """One pack for each rank from a round that may have fewer: the largest packs are split in two.

    Args:
        packs: The packs of a round, as lists of rows or of their indices.
        weight: Tokens or cost of a row.
        num_ranks: Number of packs to return.

    Returns:
        ``num_ranks`` packs of the same rows, some of them empty if there are fewer rows than ranks.
    """
    packs = list(packs)
    while len(packs) < num_ranks and any(len(pack) > 1 for pack in packs):
        splittable = (i for i, pack in enumerate(packs) if len(pack) > 1)
        largest = max(splittable, key=lambda i: sum(map(weight, packs[i])))
        packs[largest : largest + 1] = _halves(packs[largest], weight)
    return packs + [[] for _ in range(num_ranks - len(packs))]


def _halves(pack: list[T], weight: Callable[[T], float]) -> list[list[T]]:
    """The rows of a pack in two packs of about equal weight."""
    halves: list[list[T]] = [[], []]
    for row in sorted(pack, key=weight, reverse=True):
        min(halves, key=lambda half: sum(map(weight, half))).append(row)
    return halves


def check_lengths(lengths: Iterable[int], capacity: int) -> "array[int]":
    """``lengths`` as integers, or an error if one is not in [1, capacity]."""
    check_count("capacity", capacity)
    sizes = as_ints(lengths)
    for row, size in enumerate(sizes):
        if not 1 <= size <= capacity:
            raise ValueError(
                f"row {row} has {size} tokens, a pack holds 1 to {capacity}; truncate longer rows first "
                "(encode_chat has max_length), and drop empty rows"
            )
    return sizes


def as_ints(values: Iterable[int]) -> "array[int]":
    """The values, of a list, a tensor or an array, as 64-bit integers; TypeError if one is no integer."""
    return array("q", values.tolist() if hasattr(values, "tolist") else values)
