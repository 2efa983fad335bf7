"""Arrange rows in rounds of packs, one pack for each rank, so that all ranks take about equally long.

All ranks of a round wait for its most expensive pack. Packs with equally many tokens may differ in cost:
attention within one row of 32,000 tokens costs far more than within 40 short ones. Three methods are
combined, each of which is the best for some data:

- *Rounds of long rows.* Some rows alone cost more than an average pack. The longest rows share rounds, and
  the longest rows that still fit fill their packs, so that expensive packs run side by side.
- *Spreading.* The other rows, the longest first, go each into the pack that costs least so far. The packs
  come out about equal, and use the room that the last round would leave empty.
- *Sorting.* If packs have to be too full for spreading, the packs of best fit decreasing are sorted by cost,
  and neighbours share a round.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from fsdp_sft.sampling.packing.bins import Sorted, pack_lengths
from fsdp_sft.sampling.packing.cost import RowCost

Pack = list[int]
T = TypeVar("T")


def balanced_rounds(
    rows: Sequence[int], lengths: Sequence[int], capacity: int, num_ranks: int, cost: RowCost
) -> list[list[Pack]]:
    """Rounds of ``num_ranks`` packs, as many rounds as best fit decreasing needs.

    Args:
        rows: Indices into ``lengths``, possibly repeated; rows of one length are taken in this order.
        lengths: Tokens of each row of the data set, none longer than ``capacity``.
        capacity: Most tokens of a pack.
        num_ranks: Number of packs in a round.
        cost: Cost of a row by its length.

    Returns:
        The rounds. With fewer rows than packs some packs are empty; the last round may have fewer packs.
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


def _halves(pack: list[T], weight: Callable[[T], float]) -> list[list[T]]:
    """The rows of a pack in two packs of about equal weight."""
    halves: list[list[T]] = [[], []]
    weights = [0.0, 0.0]
    for row in sorted(pack, key=weight, reverse=True):
        side = weights[1] < weights[0]
        halves[side].append(row)
        weights[side] += weight(row)
    return halves


def _waited_for(rounds: Iterable[list[Pack]], lengths: Sequence[int], num_ranks: int, cost: RowCost) -> float:
    """Sum of the costs of the most expensive pack of each round, for which the other ranks wait."""

    def of_row(row: int) -> float:
        return cost.of(lengths[row])

    return sum(max(sum(map(of_row, pack)) for pack in deal(packs, of_row, num_ranks)) for packs in rounds)


def _cost_of(pack: Pack, lengths: Sequence[int], cost: RowCost) -> float:
    """Cost of a pack."""
    return sum(cost.of(lengths[row]) for row in pack)


def _sorted_rounds(
    packs: list[Pack], lengths: Sequence[int], num_ranks: int, cost: RowCost
) -> list[list[Pack]]:
    """Rounds of packs of similar cost, the most expensive first."""
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
    """Rounds of long rows, and the other rows spread over the other rounds; None if rows are left over."""
    left = _Rows(rows, lengths, cost)
    rounds: list[list[Pack]] = []
    while left.numbers and len(rounds) < num_rounds:
        packs_left = (num_rounds - len(rounds)) * num_ranks
        if cost.of(left.numbers[-1]) <= left.cost / packs_left:
            break
        rounds.append(_round_of_long_rows(left, capacity, num_ranks, cost))
    packs = _spread(left.all(), lengths, capacity, (num_rounds - len(rounds)) * num_ranks, cost)
    return None if packs is None else rounds + _sorted_rounds(packs, lengths, num_ranks, cost)


def _round_of_long_rows(left: "_Rows", capacity: int, num_ranks: int, cost: RowCost) -> list[Pack]:
    """One round: the longest rows, one a pack, and further rows until each costs as much as the first."""
    most = cost.of(left.numbers[-1])
    firsts = [left.take(capacity) for _ in range(num_ranks)]
    packs: list[Pack] = []
    for first in firsts:
        tokens, row = first or (0, -1)
        packs.append([] if first is None else [row])
        spent = cost.of(tokens)
        while first and (taken := left.take(min(capacity - tokens, cost.longest(most - spent)))):
            packs[-1].append(taken[1])
            tokens, spent = tokens + taken[0], spent + cost.of(taken[0])
    return packs


def _spread(
    rows: list[int], lengths: Sequence[int], capacity: int, num_packs: int, cost: RowCost
) -> list[Pack] | None:
    """Put each row, longest first, into the cheapest pack that has room; None if one fits nowhere."""
    packs: list[Pack] = [[] for _ in range(num_packs)]
    tokens = [0] * num_packs
    # A heap of (cost so far, pack). A pack leaves it when it is the cheapest and has no room for a row, but
    # may take a shorter row later: `full` keeps it by its free tokens.
    cheapest = [(0.0, index) for index in range(num_packs)]
    full: Sorted[int] = Sorted()

    for row in rows:
        size = lengths[row]
        while cheapest and tokens[cheapest[0][1]] + size > capacity:
            index = heapq.heappop(cheapest)[1]
            full.add(capacity - tokens[index], index)
        if cheapest:
            spent, index = cheapest[0]
            heapq.heapreplace(cheapest, (spent + cost.of(size), index))
            tokens[index] += size
        else:
            found = full.pop(at_least=size)
            if found is None:
                return None
            free, index = found
            tokens[index] += size
            full.add(free - size, index)
        packs[index].append(row)
    return packs


class _Rows(Sorted[int]):
    """Rows that are in no pack yet, by their tokens, and the cost of all of them."""

    def __init__(self, rows: Sequence[int], lengths: Sequence[int], cost: RowCost) -> None:
        super().__init__()
        for row in rows:
            self.add(lengths[row], row)
        number = Counter(lengths[row] for row in rows)
        self._cost, self.cost = cost, sum(cost.of(length) * same for length, same in number.items())

    def take(self, most: int) -> tuple[int, int] | None:
        """(tokens, row) of the longest row of at most ``most`` tokens, which is removed; None without one."""
        found = self.pop(at_most=most)
        self.cost -= 0.0 if found is None else self._cost.of(found[0])
        return found
