"""Best-fit-decreasing bin packing of sequence lengths."""

import operator
from collections.abc import Iterable
from typing import Any

_WORD_BITS = 1024


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
        TypeError: If a length or the capacity is no integer.
        ValueError: If a length is not in [1, capacity].

    Memory: About 100 bytes a row.
    Source: D. S. Johnson, Near-optimal bin packing algorithms, 1973; rows of one length are placed together.

    Example:
        >>> fs.pack_lengths([700, 300, 500, 400, 100], capacity=1000)
        [[0, 1], [2, 3, 4]]
    """
    sizes = check_lengths(lengths, capacity)
    rows_of: dict[int, list[int]] = {}
    for row, size in enumerate(sizes):
        rows_of.setdefault(size, []).append(row)
    packs: list[list[int]] = []
    # Packs with room left, by their free tokens, and the set of those numbers: the smallest that is at least
    # a row's length belongs to the fullest pack that can take the row.
    with_free: dict[int, list[list[int]]] = {}
    free_sizes = IntegerSet(capacity)
    for size in sorted(rows_of, reverse=True):
        rows, taken = rows_of[size], 0
        while taken < len(rows):
            free = free_sizes.first_at_least(size)
            if free is None:
                free = capacity
                pack: list[int] = []
                packs.append(pack)
            else:
                candidates = with_free[free]
                pack = candidates.pop()
                if not candidates:
                    free_sizes.remove(free)
            # Of all packs with room for this length, this one is the fullest even after it has taken a row,
            # so it takes all further rows of the same length that fit.
            fitting = rows[taken : taken + free // size]
            taken += len(fitting)
            pack += fitting
            left = free - size * len(fitting)
            if left:
                same = with_free.setdefault(left, [])
                if not same:
                    free_sizes.add(left)
                same.append(pack)
    return packs


def check_lengths(lengths: Iterable[int], capacity: int) -> list[int]:
    """``lengths`` as a list of ints, or an error if one is not in [1, capacity]."""
    capacity = check_count("capacity", capacity)
    sizes = as_ints("lengths", lengths)
    if sizes and not 1 <= min(sizes) <= max(sizes) <= capacity:
        row = next(i for i, size in enumerate(sizes) if not 1 <= size <= capacity)
        way_out = "drop empty rows" if sizes[row] < 1 else "truncate it first (encode_chat has max_length)"
        raise ValueError(f"row {row} has {sizes[row]} tokens, a pack holds 1 to {capacity}; {way_out}")
    return sizes


def check_count(name: str, value: Any) -> int:
    """``value`` as an int, or an error if it is no positive integer."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a positive integer, got {value!r}")
    if operator.index(value) < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return operator.index(value)


def as_ints(name: str, values: Any) -> list[int]:
    """``values`` as a list of ints, or an error that names the first that is no integer."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of integers, got {values!r}")
    listed: list[Any] = list(values)
    if set(map(type, listed)) <= {int}:
        return listed
    for row, value in enumerate(listed):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}[{row}] must be an integer, got {value!r}")
    return [operator.index(value) for value in listed]


class IntegerSet:
    """A set of integers from 1 to ``largest`` that finds the smallest at or above a bound quickly.

    A two-level bitmap: bit v % 1024 of word v // 1024 is set if v is a member, and one more mask marks the
    words that are not 0. So a capacity of a million costs little more than one of a thousand.
    """

    def __init__(self, largest: int) -> None:
        self._words = [0] * (largest // _WORD_BITS + 1)
        self._used = 0

    def add(self, value: int) -> None:
        """Add an integer."""
        word, bit = divmod(value, _WORD_BITS)
        self._words[word] |= 1 << bit
        self._used |= 1 << word

    def remove(self, value: int) -> None:
        """Remove an integer that is in the set."""
        word, bit = divmod(value, _WORD_BITS)
        self._words[word] &= ~(1 << bit)
        if not self._words[word]:
            self._used &= ~(1 << word)

    def first_at_least(self, bound: int) -> int | None:
        """The smallest member that is at least ``bound``; None if there is none."""
        # x & -x keeps the lowest set bit of x, and its bit_length() - 1 is that bit's index.
        word, bit = divmod(bound, _WORD_BITS)
        above = self._words[word] >> bit
        if above:
            return bound + (above & -above).bit_length() - 1
        used = self._used >> (word + 1)
        if not used:
            return None
        word += (used & -used).bit_length()
        bits = self._words[word]
        return word * _WORD_BITS + (bits & -bits).bit_length() - 1
