"""How fast ranks are, measured so that a busy machine accuses nobody.

A rank is slow if it is slow beside the others each time that it is measured: rates are taken in rounds, the
suspects of one round are measured again, and only those that stay suspect are named. Ranks that share the
processors of a host measure in turns.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from fsdp_sft._process.devices import synchronize
from fsdp_sft._ranks.agree import all_gather_objects, all_reduce_sum, raise_first, share
from fsdp_sft.check.cluster import Cluster

T = TypeVar("T")
_ROUNDS = 3  # measurements of a rank before anybody is suspected
_TRIALS, _TRIALS_SHARED = 3, 6  # times that a rank must be suspect
_FEWEST_CALLS = 5
# Shares of the others' rate. A device has a rate of its own, which healthy ones keep within 5 %:
# https://github.com/stas00/ml-engineering/tree/master/compute/accelerator. Processors that ranks share have
# none, so that only half the speed says something.
_SHARED_FAILS = 0.62
_MOST_RUNS = 10_000


@dataclass(frozen=True)
class Slow:
    """A rank that is slow beside the others.

    Attributes:
        rank: The rank.
        share: Its rate as a share of the others'.
    """

    rank: int
    share: float


def seconds_of(work: Callable[[], object], device: torch.device, *, at_least: float) -> float:
    """Seconds that ``work`` takes, as the mean of so many calls that they take ``at_least`` seconds."""
    work()  # the first call compiles, allocates and chooses
    runs, spent = 1, 0.0
    while True:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(runs):
            work()
        synchronize(device)
        spent = time.perf_counter() - start
        if spent >= at_least or runs >= _MOST_RUNS:
            return spent / runs
        runs = min(_MOST_RUNS, max(runs + 1, int(runs * 1.2 * at_least / max(spent, 1e-6))))


def own_seconds_of(cluster: Cluster, work: Callable[[], object], *, at_least: float) -> float:
    """Seconds that ``work`` takes on this rank's device, whatever else the machine does.

    A device of its own is timed over many calls. On a processor that others use the fastest of many single
    calls counts: it is shorter than the time after which the system hands the processor on.
    """
    if cluster.has_own_clock:
        return seconds_of(work, cluster.device, at_least=at_least)
    work()
    least, begun, calls = math.inf, time.perf_counter(), 0
    while calls < _FEWEST_CALLS or time.perf_counter() - begun < at_least:
        synchronize(cluster.device)
        start = time.perf_counter()
        work()
        synchronize(cluster.device)
        least, calls = min(least, time.perf_counter() - start), calls + 1
    return least


def all_at_once(measure: Callable[[], T], phase: str) -> T:
    """``measure()`` on all ranks at the same time.

    Raises:
        Exception: The first that any rank has raised, on all ranks.

    Collective: all ranks.
    """
    all_reduce_sum([0.0])  # nobody begins before all are there
    return _finished(measure, phase)


def in_turns(cluster: Cluster, measure: Callable[[], T], phase: str, *, always: bool = False) -> T:
    """``measure()`` while no other rank of this host measures; at once where each has a device of its own.

    Args:
        cluster: The ranks.
        measure: What each rank does; no collectives.
        phase: What is measured, for errors.
        always: Whether ranks with devices of their own take turns too.

    Raises:
        Exception: The first that any rank has raised, on all ranks.

    Collective: all ranks.
    """
    if cluster.has_own_clock and not always:
        return all_at_once(measure, phase)
    found: list[T] = []
    error: Exception | None = None
    for turn in range(cluster.turns):
        all_reduce_sum([0.0])
        if turn == cluster.turn:
            try:
                found.append(measure())
            except Exception as caught:
                error = caught
    raise_first(error, phase)
    return found[0]


def slow_ranks(
    cluster: Cluster, measure: Callable[[], float], phase: str, *, warns: float
) -> tuple[list[float], list[Slow]]:
    """The rate of each rank, and those that are slow.

    Args:
        cluster: The ranks.
        measure: Returns this rank's rate; larger is faster. No collectives.
        phase: What is measured, for errors.
        warns: Share of the others' rate below which a rank with a device of its own is slow. Where ranks
            share processors it is 0.62, so that a rank of half the speed is named.

    Collective: all ranks.
    """
    limit = warns if cluster.has_own_clock else _SHARED_FAILS
    own: list[float] = []
    rates: list[float] = []
    suspects: list[Slow] | None = None
    for _ in range(_TRIALS if cluster.has_own_clock else _TRIALS_SHARED):
        own += [in_turns(cluster, measure, phase) for _ in range(_ROUNDS)]
        # What else runs on a shared processor only slows: the best of the rounds is the rank's own speed.
        rates = all_gather_objects(statistics.median(own) if cluster.has_own_clock else max(own))
        now = share(_below(rates, limit))
        suspects = now if suspects is None else [one for one in now if one.rank in {s.rank for s in suspects}]
        if not suspects:
            break
    return rates, suspects or []


def _below(rates: list[float], limit: float) -> list[Slow]:
    """The ranks below a share of the median rate; of two ranks the slower is held against the faster."""
    usual = statistics.median_high(rates)
    return [Slow(rank, rate / usual) for rank, rate in enumerate(rates) if rate < limit * usual]


def _finished(measure: Callable[[], T], phase: str) -> T:
    found: list[T] = []
    error: Exception | None = None
    try:
        found.append(measure())
    except Exception as caught:
        error = caught
    raise_first(error, phase)
    return found[0]
