"""What the beats of a while say about the ranks: who is silent, who is overdue, whose batch differs."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fsdp_sft.watchdog.beat import RUNNING, Beat


@dataclass(frozen=True)
class Finding:
    """What is wrong.

    Attributes:
        kind: ``"dead"``, ``"silent"``, ``"absent"``, ``"shape"``, ``"overdue"`` or ``"store"``.
        ranks: Whom it was seen at first.
    """

    kind: str
    ranks: tuple[int, ...]


@dataclass
class Stamps:
    """Moments on this rank's own clock, in seconds: other machines' clocks are not compared with it.

    Attributes:
        heard: When the rank's beat last changed.
        moved: When its progress last changed.
        counts: From when its limit counts: ``moved``, or later while others were allowed to take longer.
        dead: When its process was first missed; infinite if it was not.
    """

    heard: float
    moved: float
    counts: float
    dead: float = math.inf


class Judge:
    """Watches some ranks; ``look`` says what is wrong with them.

    Args:
        rank: The own one.
        watched: Ranks that are watched, the own one among them.
        thorough: Whether ``watched`` are all ranks. Only who sees all can tell a rank that hangs from one
            that waits for a rank with a longer limit; others only tell who is silent.
        timeout: Seconds.
        now: Seconds, of any clock that does not jump.
        lookouts: Ranks that watch all others.
    """

    def __init__(
        self,
        rank: int,
        watched: Collection[int],
        *,
        thorough: bool,
        timeout: float,
        now: float,
        lookouts: Collection[int] = (),
    ) -> None:
        self.rank = rank
        self.thorough = thorough
        self.timeout = timeout
        self.lookouts = lookouts
        self.stamps = {other: Stamps(now, now, now) for other in watched}
        self._known: dict[int, Beat] = {}

    def shift(self, seconds: float) -> None:
        """Forget a time in which this process itself did not run: it has not seen the others then."""
        for stamps in self.stamps.values():
            stamps.heard += seconds
            stamps.moved += seconds
            stamps.counts += seconds

    def look(
        self, beats: Mapping[int, Beat], *, now: float, answered: float, states: Mapping[int, str]
    ) -> Finding | None:
        """Take in new beats and say what is wrong, the surest finding first.

        Args:
            beats: The latest of each watched rank that has begun; the own one is always up to date.
            now: The time.
            answered: When the question that the store answered last was asked.
            states: What ``process_state`` says of each rank.
        """
        self._take_in(beats, now, states)
        running = {r: b for r, b in beats.items() if b.state == RUNNING and r in self.stamps}
        found = [
            Finding("dead", self._dead(running, answered)),
            Finding("absent", self._absent(beats, answered)),
            Finding("silent", self._silent(running, answered)),
            Finding("shape", self._different(beats)),
            Finding("overdue", self._overdue(beats, running, now, answered)),
        ]
        return next((finding for finding in found if finding.ranks), None)

    def _take_in(self, beats: Mapping[int, Beat], now: float, states: Mapping[int, str]) -> None:
        for rank, beat in beats.items():
            stamps, known = self.stamps[rank], self._known.get(rank)
            if known is None or known.number != beat.number:
                stamps.heard = now
            if known is None or known.progress != beat.progress:
                stamps.moved = stamps.counts = now
            dead = states.get(rank) == "dead" and beat.state == RUNNING
            stamps.dead = min(stamps.dead, now) if dead else math.inf
            self._known[rank] = beat
        running = [b for b in beats.values() if b.state == RUNNING]
        allowed = [b.limit for b in running if now - self.stamps[b.rank].moved <= b.limit]
        longest = max(allowed, default=0.0)
        for beat in running:
            if longest > beat.limit:
                self.stamps[beat.rank].counts = now

    def _dead(self, running: Mapping[int, Beat], answered: float) -> tuple[int, ...]:
        # Its last beat may still be on its way: believe it when the store, asked after, knows no better.
        return tuple(r for r in running if r != self.rank and answered > self.stamps[r].dead)

    def _absent(self, beats: Mapping[int, Beat], answered: float) -> tuple[int, ...]:
        late = [r for r in self.stamps if r not in beats and answered - self.stamps[r].heard > self.timeout]
        return tuple(late)

    def _silent(self, running: Mapping[int, Beat], answered: float) -> tuple[int, ...]:
        others = [r for r in running if r != self.rank]
        return tuple(r for r in others if answered - self.stamps[r].heard > self.timeout)

    def _different(self, beats: Mapping[int, Beat]) -> tuple[int, ...]:
        differing = differing_shapes(beats) if self.thorough and len(beats) == len(self.stamps) else {}
        # A majority is known once all are there; if one never comes, it is overdue.
        steps = [b.step if b.step is not None else -1 for b in beats.values()]
        return tuple(rank for rank, (step, _) in differing.items() if step <= min(steps))

    def _overdue(
        self, beats: Mapping[int, Beat], running: Mapping[int, Beat], now: float, answered: float
    ) -> tuple[int, ...]:
        lost = now - answered > self.timeout
        unwatched = lost or (not self.thorough and self._lookouts_are_gone(beats, answered))
        if not (self.thorough or unwatched):
            return ()
        judged = {r: b for r, b in running.items() if r == self.rank or not unwatched}
        times = {r: (now if r == self.rank else answered) for r in judged}
        return tuple(r for r, b in judged.items() if times[r] - self.stamps[r].counts > b.limit)

    def _lookouts_are_gone(self, beats: Mapping[int, Beat], answered: float) -> bool:
        """Whether all have left, with an exception or without, and have stopped to look at the others."""
        return bool(self.lookouts) and all(
            r in beats and beats[r].state != RUNNING and answered - self.stamps[r].heard > self.timeout
            for r in self.lookouts
        )


def differing_shapes(beats: Mapping[int, Beat]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Rank -> (step, shape) of those that had another shape than most in the first step where any had.

    All that gave a shape for that step, if no shape has a majority.
    """
    given = {r: b for r, b in beats.items() if b.shapes and b.step is not None}
    starts = sorted({start for b in given.values() for start, _ in b.shapes})
    for step in starts:
        shapes = {r: shape for r, b in given.items() if (shape := shape_at(b, step)) is not None}
        counts = Counter(shapes.values()).most_common()
        if len(counts) > 1:
            clear = counts[0][1] > sum(count for _, count in counts[1:])
            return {r: (step, s) for r, s in shapes.items() if not clear or s != counts[0][0]}
    return {}


def shape_at(beat: Beat, step: int) -> tuple[int, ...] | None:
    """The shape that a rank had in ``step``; None if it is not there yet, gave none or no longer says."""
    if beat.step is None or beat.step < step:
        return None
    return next((shape for start, shape in reversed(beat.shapes) if start <= step), None) or None
