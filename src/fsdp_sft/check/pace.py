"""How fast ranks are, measured so that a busy machine accuses nobody.

Ranks that share the processors of a host measure in turns. While a rank is in doubt, all measure again; it is
named by the median of all trials, or by its fastest call, so that a moment in which something else ran says
nothing.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from fsdp_sft._process.devices import synchronize
from fsdp_sft._ranks.agree import all_gather_objects, all_reduce_sum, raise_first
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.mechanism import Trouble

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


def in_turns(cluster: Cluster, measure: Callable[[], T], phase: str) -> T:
    """``measure()`` while no other rank of this host measures; at once where each has a device of its own.

    Args:
        cluster: The ranks.
        measure: What each rank does; no collectives.
        phase: What is measured, for errors.

    Raises:
        Exception: The first that any rank has raised, on all ranks.

    Collective: all ranks.
    """
    if cluster.has_own_clock:
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
    means: list[float] = []
    fastest = math.inf
    slow: list[Slow] = []
    rates: list[float] = []
    for _ in range(_TRIALS if cluster.has_own_clock else _TRIALS_SHARED):
        rounds = [in_turns(cluster, lambda: _timed(cluster, work, at_least), phase) for _ in range(_ROUNDS)]
        means.append(amount * sum(one.calls for one in rounds) / sum(one.seconds for one in rounds))
        fastest = min(fastest, *(one.fastest for one in rounds))
        found: list[tuple[float, float]] = all_gather_objects((statistics.median(means), amount / fastest))
        rates = [mean for mean, _ in found]
        shares = _shares(rates)
        if not cluster.has_own_clock:  # slow at its best is slow, whatever else has run
            shares = list(map(min, shares, _shares([best for _, best in found])))
        slow = [Slow(rank, share) for rank, share in enumerate(shares) if share < fails]
        if min(shares) >= doubted:
            break
    return rates, slow


def slow_troubles(cluster: Cluster, slow: list[Slow], what: str, *, fails: float) -> tuple[Trouble, ...]:
    """Slow ranks in words.

    Args:
        cluster: The ranks.
        slow: Those that are slow.
        what: What is slow, with its verb.
        fails: Share below which a rank with a device of its own is a failure, and not a warning.
    """
    return tuple(
        Trouble(
            "warn" if cluster.has_own_clock and one.share >= fails else "fail",
            (one.rank,),
            f"{what} at {one.share:.2f} of the others' rate: look at clocks, heat, power and what else runs "
            "there, or leave the node out",
            leave_out=True,
        )
        for one in slow
    )


@dataclass(frozen=True)
class _Timed:
    calls: int
    seconds: float
    fastest: float  # seconds of a call


def _timed(cluster: Cluster, work: Callable[[], object], at_least: float) -> _Timed:
    """Seconds of calls on this rank's device.

    On a processor that others use too, all time counts: a rank that is held back is as slow as one that
    computes slowly. There the fastest call is shorter than what the system gives a process at once.
    """
    if cluster.has_own_clock:
        seconds = seconds_of(work, cluster.device, at_least=at_least)
        return _Timed(1, seconds, seconds)
    work()
    synchronize(cluster.device)
    times: list[float] = []
    while sum(times) < at_least:
        start = time.perf_counter()
        work()
        synchronize(cluster.device)
        times.append(time.perf_counter() - start)
    return _Timed(len(times), sum(times), min(times))


def _shares(rates: list[float]) -> list[float]:
    """Rates as shares of the median; of two ranks the slower is held against the faster."""
    usual = statistics.median_high(rates)
    return [rate / usual for rate in rates]


def _finished(measure: Callable[[], T], phase: str) -> T:
    found: list[T] = []
    error: Exception | None = None
    try:
        found.append(measure())
    except Exception as caught:
        error = caught
    raise_first(error, phase)
    return found[0]
