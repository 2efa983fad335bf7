"""How fast ranks are, measured so that a busy machine accuses nobody.

Ranks that share the processors of a host measure in turns. While a rank is in doubt, all measure again; it is
named by the median of all trials, so that a moment in which something else ran says nothing.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from fsdp_sft._process.devices import synchronize
from fsdp_sft._ranks.agree import all_gather_objects, all_reduce_sum, raise_first
from fsdp_sft.check.cluster import Cluster

T = TypeVar("T")
_ROUNDS = 3  # measurements of a trial
# A device has a rate of its own, which healthy ones keep within 5 %:
# https://github.com/stas00/ml-engineering/tree/master/compute/accelerator. Processors that ranks share have
# none, so that only half the speed says something: a rank is in doubt below the first share, named below the
# second.
_TRIALS, _TRIALS_SHARED = 3, 7
_SHARED_DOUBTED, _SHARED_FAILS = 0.7, 0.62
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
    cluster: Cluster, work: Callable[[], object], amount: float, phase: str, *, at_least: float, warns: float
) -> tuple[list[float], list[Slow]]:
    """The rate of each rank, and those that are slow.

    Args:
        cluster: The ranks.
        work: What is timed; no collectives.
        amount: How much a call does, such as operations or bytes.
        phase: What is measured, for errors.
        at_least: Seconds of a measurement.
        warns: Share of the others' rate below which a rank with a device of its own is slow. Where ranks
            share processors it is 0.62, so that a rank of half the speed is named.

    Collective: all ranks.
    """
    doubted, fails = (warns, warns) if cluster.has_own_clock else (_SHARED_DOUBTED, _SHARED_FAILS)
    trials: list[float] = []
    rates: list[float] = []
    for _ in range(_TRIALS if cluster.has_own_clock else _TRIALS_SHARED):
        rounds = [in_turns(cluster, lambda: _timed(cluster, work, at_least), phase) for _ in range(_ROUNDS)]
        trials.append(amount * sum(calls for calls, _ in rounds) / sum(seconds for _, seconds in rounds))
        rates = all_gather_objects(statistics.median(trials))
        if not _below(rates, doubted):
            break
    return rates, _below(rates, fails)


def _timed(cluster: Cluster, work: Callable[[], object], at_least: float) -> tuple[int, float]:
    """(calls, their seconds) on this rank's device.

    On a processor that others use too, the time counts in which the system has given it to them: a rank that
    is held back is as slow as one that computes slowly.
    """
    if cluster.has_own_clock:
        return 1, seconds_of(work, cluster.device, at_least=at_least)
    work()
    synchronize(cluster.device)
    calls, start = 0, time.perf_counter()
    while True:
        work()
        synchronize(cluster.device)
        calls, spent = calls + 1, time.perf_counter() - start
        if spent >= at_least:
            return calls, spent


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
