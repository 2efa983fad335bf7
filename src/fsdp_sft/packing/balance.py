"""Rows to rounds of packs, one pack for each rank, that take every rank about as long.

A round takes as long as its most expensive pack, and all other ranks wait for that one. With rows of very
different lengths packs of equally many tokens differ: attention within one row of 32,000 tokens costs far
more than within 40 short ones. Three ways are combined, of which each is best somewhere:

- *Rounds of long rows.* Some rows cost more alone than a pack does on average. The longest rows share rounds,
  whose packs are filled up with the longest that still fit: what is expensive runs beside what is expensive.
- *Spreading.* All other rows go, from the longest to the shortest, each into the pack that has cost least so
  far. Packs come out equal, and use the room that the last round would have left empty.
- *Sorting.* Where packs have to be too full for that, those of best fit decreasing are sorted by their cost.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence

from fsdp_sft.packing.bins import IntegerSet, pack_lengths
from fsdp_sft.packing.cost import RowCost

Pack = list[int]


def balanced_rounds(
    rows: Sequence[int], lengths: Sequence[int], capacity: int, num_ranks: int, cost: RowCost
) -> list[list[Pack]]:
    """Rounds of ``num_ranks`` packs each; as many rounds as best fit decreasing needs.

    Args:
        rows: Indices into ``lengths``, possibly repeated; rows of one length are taken in this order.
        lengths: Tokens of each row of the data set, none longer than ``capacity``.
        capacity: Most tokens of a pack.
        num_ranks: Packs of a round.
        cost: Of a row.

    Returns:
        The rounds. Packs are empty where there are fewer rows than packs; the last round may be short.
    """
    if not rows:
        return []
    packs = pack_lengths([lengths[row] for row in rows], capacity)
    packs = [[rows[index] for index in pack] for pack in packs]
    rounds = _sorted_rounds(packs, lengths, num_ranks, cost)
    spread = _spread_rounds(rows, lengths, capacity, num_ranks, len(rounds), cost)
    if spread is None or _waited_for(rounds, lengths, num_ranks, cost) < _waited_for(
        spread, lengths, num_ranks, cost
    ):
        return rounds
    return spread


def deal(packs: list[list[int]], weight: Callable[[int], float], num_ranks: int) -> list[list[int]]:
    """One pack for each rank from a round that may have fewer: the largest are split until there are enough.

    Args:
        packs: A round; packs of rows.
        weight: Of a row: its tokens, or its cost.
        num_ranks: Number of packs to return.

    Returns:
        ``num_ranks`` packs of the same rows, some of them empty if there are fewer rows than ranks.
    """
    packs = list(packs)
    weights = [sum(map(weight, pack)) for pack in packs]
    while len(packs) < num_ranks:
        splittable = [i for i, pack in enumerate(packs) if len(pack) > 1]
        if not splittable:
            return packs + [[] for _ in range(num_ranks - len(packs))]
        largest = max(splittable, key=weights.__getitem__)
        halves = _halves(packs[largest], weight)
        packs[largest : largest + 1] = halves
        weights[largest : largest + 1] = [sum(map(weight, half)) for half in halves]
    return packs


def _halves(pack: list[int], weight: Callable[[int], float]) -> list[list[int]]:
    halves: list[list[int]] = [[], []]
    weights = [0.0, 0.0]
    for row in sorted(pack, key=weight, reverse=True):
        side = weights[1] < weights[0]
        halves[side].append(row)
        weights[side] += weight(row)
    return halves


def _waited_for(rounds: Iterable[list[Pack]], lengths: Sequence[int], num_ranks: int, cost: RowCost) -> float:
    """What all rounds take together."""

    def of_row(row: int) -> float:
        return cost.of(lengths[row])

    return sum(max(sum(map(of_row, pack)) for pack in deal(packs, of_row, num_ranks)) for packs in rounds)


def _cost_of(pack: Pack, lengths: Sequence[int], cost: RowCost) -> float:
    return sum(cost.of(lengths[row]) for row in pack)


def _sorted_rounds(
    packs: list[Pack], lengths: Sequence[int], num_ranks: int, cost: RowCost
) -> list[list[Pack]]:
    packs = sorted(packs, key=lambda pack: -_cost_of(pack, lengths, cost))
    return [packs[start : start + num_ranks] for start in range(0, len(packs), num_ranks)]


def _spread_rounds(
    rows: Sequence[int],
    lengths: Sequence[int],
    capacity: int,
    num_ranks: int,
    num_rounds: int,
    cost: RowCost,
) -> list[list[Pack]] | None:
    """Rounds of long rows, and the rest spread over the others; None if it does not fit into so many."""
    left = _Rows(rows, lengths, capacity, cost)
    rounds: list[list[Pack]] = []
    while left and len(rounds) < num_rounds:
        packs_left = (num_rounds - len(rounds)) * num_ranks
        if cost.of(left.longest) <= left.cost / packs_left:
            break
        rounds.append(_round_of_long_rows(left, capacity, num_ranks, cost))
    packs = _spread(left.all(), lengths, capacity, (num_rounds - len(rounds)) * num_ranks, cost)
    return None if packs is None else rounds + _sorted_rounds(packs, lengths, num_ranks, cost)


def _round_of_long_rows(left: "_Rows", capacity: int, num_ranks: int, cost: RowCost) -> list[Pack]:
    """The longest rows, one a pack, with the longest others that fit and cost no more than the first."""
    most = cost.of(left.longest)
    packs: list[tuple[Pack, int]] = []
    for _ in range(num_ranks):
        taken = left.take(capacity)
        packs.append(([], 0) if taken is None else ([taken[0]], taken[1]))
    for pack, tokens in packs:
        spent = cost.of(tokens)
        while pack and (taken := left.take(min(capacity - tokens, cost.longest(most - spent)))) is not None:
            pack.append(taken[0])
            tokens, spent = tokens + taken[1], spent + cost.of(taken[1])
    return [pack for pack, _ in packs]


def _spread(
    rows: list[int], lengths: Sequence[int], capacity: int, num_packs: int, cost: RowCost
) -> list[Pack] | None:
    """Each row, from the longest on, into the cheapest pack that has room; None if one fits nowhere."""
    packs: list[Pack] = [[] for _ in range(num_packs)]
    tokens = [0] * num_packs
    cheapest = [
        (0.0, index) for index in range(num_packs)
    ]  # a heap; without packs that were too full for a row
    full: dict[int, list[int]] = {}  # those, by what is left of them
    free_sizes = IntegerSet(capacity)

    def set_aside(index: int) -> None:
        free = capacity - tokens[index]
        if free:
            if not full.setdefault(free, []):
                free_sizes.add(free)
            full[free].append(index)

    for row in rows:
        size = lengths[row]
        while cheapest and tokens[cheapest[0][1]] + size > capacity:
            set_aside(heapq.heappop(cheapest)[1])
        if cheapest:
            spent, index = cheapest[0]
            heapq.heapreplace(cheapest, (spent + cost.of(size), index))
            tokens[index] += size
        else:
            free = free_sizes.first_at_least(size)
            if free is None:
                return None
            index = full[free].pop()
            if not full[free]:
                free_sizes.remove(free)
            tokens[index] += size
            set_aside(index)
        packs[index].append(row)
    return packs


class _Rows:
    """Rows that are not in a pack yet, of which the longest below a bound is found at once."""

    def __init__(self, rows: Iterable[int], lengths: Sequence[int], capacity: int, cost: RowCost) -> None:
        self._by_length: dict[int, list[int]] = {}
        for row in rows:
            self._by_length.setdefault(lengths[row], []).append(row)
        self._capacity, self._cost = capacity, cost
        self._missing = IntegerSet(capacity)  # for each length what it lacks to the capacity, and 1
        for length in self._by_length:
            self._missing.add(capacity - length + 1)
        self.cost = sum(cost.of(length) * len(same) for length, same in self._by_length.items())

    def __bool__(self) -> bool:
        return self._missing.first_at_least(1) is not None

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self._capacity + 1 - (self._missing.first_at_least(1) or 0)

    def take(self, most: int) -> tuple[int, int] | None:
        """(row, tokens) of the longest row of at most that many tokens; None if there is none."""
        missing = self._missing.first_at_least(self._capacity - most + 1) if most > 0 else None
        if missing is None:
            return None
        length = self._capacity + 1 - missing
        same = self._by_length[length]
        row = same.pop()
        if not same:
            self._missing.remove(missing)
        self.cost -= self._cost.of(length)
        return row, length

    def all(self) -> list[int]:
        """All rows, the longest first."""
        return [row for length in sorted(self._by_length, reverse=True) for row in self._by_length[length]]
