"""The rules that turn beats into a finding: which rank is dead, silent, absent or overdue.

One rule per method, from the surest to the least sure:

- **dead**: the process is gone from its machine, and the store has since shown no final beat of it.
- **absent**: the rank has posted no beat within ``timeout``: it never entered its watchdog.
- **silent**: its beats stopped for ``timeout``: the process is stopped, or its host is gone.
- **overdue**: its beats continue, but its ``progress`` has stayed the same for longer than its limit. Ranks
  that wait for a rank with a longer limit (it saves, say) get that time too.

All times are on this rank's own clock. Silence is judged by what the store has answered: while the store
itself does not answer, no rank counts as silent.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fsdp_sft.jobs.watchdog.beat import RUNNING, Beat


@dataclass(frozen=True)
class Finding:
    """A problem, and the ranks that have it.

    Attributes:
        kind: Rule that was broken: ``"dead"``, ``"silent"``, ``"absent"`` or ``"overdue"``.
        ranks: Ranks on which the problem was first seen.
    """

    kind: str
    ranks: tuple[int, ...]


@dataclass
class Stamps:
    """Times of one watched rank, in seconds on this rank's own clock; clocks of machines are not compared.

    Attributes:
        heard: When the rank's beat last changed.
        moved: When its progress last changed.
        counts: When its limit began to count: ``moved``, or later if another rank was allowed to take longer.
        dead: When its process was first found to be gone; infinite if it is there.
    """

    heard: float
    moved: float
    counts: float
    dead: float = math.inf


class Judge:
    """Watches some ranks; ``look`` says what is wrong with them.

    Args:
        rank: This rank.
        watched: Ranks that are watched, this rank among them.
        thorough: Whether ``watched`` are all ranks. Only a rank that sees all can tell a rank that hangs from
            one that waits for a rank with a longer limit. Others find only dead, absent and silent ranks.
        timeout: Seconds after which a rank counts as absent or silent.
        now: Current time in seconds, of any clock that does not jump.
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
        """Exclude a time in which this process itself did not run, and so could not see the others."""
        for stamps in self.stamps.values():
            stamps.heard += seconds
            stamps.moved += seconds
            stamps.counts += seconds

    def look(
        self, beats: Mapping[int, Beat], *, now: float, answered: float, states: Mapping[int, str]
    ) -> Finding | None:
        """Take in new beats and return the surest finding, or None if nothing is wrong.

        Args:
            beats: The latest beat of each watched rank that has begun; this rank's own is up to date.
            now: Current time.
            answered: Start of the last query that the store has answered. What others have posted is known up
                to this time.
            states: State of each rank's process, as ``process_state`` gives it.
        """
        self._take_in(beats, now, states)
        running = {r: b for r, b in beats.items() if b.state == RUNNING and r in self.stamps}
        found = [
            Finding("dead", self._dead(running, answered)),
            Finding("absent", self._absent(beats, answered)),
            Finding("silent", self._silent(running, answered)),
            Finding("overdue", self._overdue(beats, running, now, answered)),
        ]
        return next((finding for finding in found if finding.ranks), None)

    def _take_in(self, beats: Mapping[int, Beat], now: float, states: Mapping[int, str]) -> None:
        """Note when each rank was heard of and when it moved, and from when its limit counts."""
        for rank, beat in beats.items():
            stamps, known = self.stamps[rank], self._known.get(rank)
            if known is None or known.number != beat.number:
                stamps.heard = now
            if known is None or known.progress != beat.progress:
                stamps.moved = stamps.counts = now
            dead = states.get(rank) == "dead" and beat.state == RUNNING
            stamps.dead = min(stamps.dead, now) if dead else math.inf
            self._known[rank] = beat
        # While a rank is within a longer limit (it saves, say), other ranks may wait for it: their limits
        # begin to count when it is done.
        running = [b for b in beats.values() if b.state == RUNNING]
        allowed = [b.limit for b in running if now - self.stamps[b.rank].moved <= b.limit]
        longest = max(allowed, default=0.0)
        for beat in running:
            if longest > beat.limit:
                self.stamps[beat.rank].counts = now

    def _dead(self, running: Mapping[int, Beat], answered: float) -> tuple[int, ...]:
        """Ranks whose process is gone, although their last beat says that they run."""
        # A rank that ends normally says so in its last beat, which may still be on its way. So wait for one
        # reply of the store to a query made after the process disappeared.
        return tuple(r for r in running if r != self.rank and answered > self.stamps[r].dead)

    def _absent(self, beats: Mapping[int, Beat], answered: float) -> tuple[int, ...]:
        """Ranks that have posted no beat at all within the time-out."""
        late = [r for r in self.stamps if r not in beats and answered - self.stamps[r].heard > self.timeout]
        return tuple(late)

    def _silent(self, running: Mapping[int, Beat], answered: float) -> tuple[int, ...]:
        """Ranks whose beats have stopped for longer than the time-out."""
        # Compared with `answered` and not with the current time: only the store knows of newer beats.
        others = [r for r in running if r != self.rank]
        return tuple(r for r in others if answered - self.stamps[r].heard > self.timeout)

    def _overdue(
        self, beats: Mapping[int, Beat], running: Mapping[int, Beat], now: float, answered: float
    ) -> tuple[int, ...]:
        """Ranks that have made no progress for longer than their limit."""
        # A rank without a store, or whose lookouts have all left, judges itself alone. Otherwise only
        # lookouts, which see all ranks, judge.
        lost = now - answered > self.timeout
        unwatched = lost or (not self.thorough and self._lookouts_are_gone(beats, answered))
        if not (self.thorough or unwatched):
            return ()
        judged = {r: b for r, b in running.items() if r == self.rank or not unwatched}
        times = {r: (now if r == self.rank else answered) for r in judged}
        return tuple(r for r, b in judged.items() if times[r] - self.stamps[r].counts > b.limit)

    def _lookouts_are_gone(self, beats: Mapping[int, Beat], answered: float) -> bool:
        """Whether all lookouts have left the loop, with or without an exception, and no longer watch."""
        return bool(self.lookouts) and all(
            r in beats and beats[r].state != RUNNING and answered - self.stamps[r].heard > self.timeout
            for r in self.lookouts
        )
