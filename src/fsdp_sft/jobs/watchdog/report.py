"""A finding in words: first the ranks that stand out, then what all other ranks do."""

from collections import Counter
from collections.abc import Callable, Mapping

from fsdp_sft._ranks.words import said_ranks
from fsdp_sft.jobs.watchdog.beat import ENDED, FAILED, RUNNING, Beat
from fsdp_sft.jobs.watchdog.judge import Finding, Stamps

_MOST_LINES = 16
_NOT_RUNNING = {
    "dead": "is dead: its process ended without leaving the watchdog",
    "stopped": "is stopped (SIGSTOP, a debugger or a suspended job)",
}


class Report:
    """Describes all watched ranks at one moment.

    Args:
        beats: The latest beat of each rank.
        stamps: Times at which each rank was last heard of and moved.
        states: State of each process that does not run: ``"dead"`` or ``"stopped"``.
        now: Current time on the clock of ``stamps``.
        timeout: Seconds without a beat after which a rank is called silent.
    """

    def __init__(
        self,
        beats: Mapping[int, Beat],
        stamps: Mapping[int, Stamps],
        states: Mapping[int, str],
        *,
        now: float,
        timeout: float,
    ) -> None:
        self.beats, self.stamps, self.states = beats, stamps, states
        self.now, self.timeout = now, timeout
        # The last beat of a rank that does not run may be older than its last step, so it is left out.
        runs = [b for r, b in beats.items() if not (b.state == RUNNING and self._is_silent(r))]
        steps = Counter(b.step for b in runs if b.step is not None)
        self.usual = steps.most_common(1)[0][0] if steps else None
        ties = [
            step for step, count in steps.items() if self.usual is not None and count == steps[self.usual]
        ]
        self.is_tie = len(ties) > 1
        self.spread = sorted(steps)

    def text(self, finding: Finding) -> str:
        """The finding, a line for each rank that stands out, and a line for each group of others."""
        odd = {rank: self.oddity(rank) for rank in self.stamps}
        lines = [self.heading(finding)]
        order = sorted((r for r in odd if odd[r]), key=lambda r: (not self._is_silent(r), r))
        shown = [f"  rank {r}{self._whose(r)} {odd[r]}{self._at(r)}" for r in order]
        lines += shown[:_MOST_LINES]
        if len(shown) > _MOST_LINES:
            lines.append(f"  and {len(shown) - _MOST_LINES} more: {said_ranks(order[_MOST_LINES:])}")
        groups: dict[str, list[int]] = {}
        for rank in sorted(r for r in odd if not odd[r]):
            groups.setdefault(self.doing(rank), []).append(rank)
        lines += [f"  {said_ranks(ranks)} {doing}" for doing, ranks in list(groups.items())[:_MOST_LINES]]
        return "\n".join(lines)

    def heading(self, finding: Finding) -> str:
        """The finding in one line."""
        who = said_ranks(finding.ranks)
        failed = [rank for rank, beat in self.beats.items() if beat.state == FAILED]
        after = f"{said_ranks(failed)} failed, and " if failed else ""
        says: dict[str, Callable[[], str]] = {
            "dead": lambda: f"{who} died",
            "absent": lambda: f"{who} did not enter the watchdog within {self.timeout:g} s",
            "silent": lambda: f"{who} sent no heartbeat for {self.timeout:g} s",
            "overdue": lambda: f"{after}no progress for {self._limit(finding):g} s on {who}",
        }
        return says[finding.kind]()

    def oddity(self, rank: int) -> str:
        """What distinguishes a rank from one that runs and waits for others; "" if nothing does."""
        beat = self.beats.get(rank)
        if beat is None:
            return "has not entered its watchdog"
        if beat.state == FAILED:
            return f"failed with {beat.error}"
        if beat.state == ENDED:
            return "left the loop"
        if rank in self.states:
            return _NOT_RUNNING[self.states[rank]]
        if self._is_silent(rank):
            silence = self.now - self.stamps[rank].heard
            return f"has been silent for {silence:.0f} s: dead, stopped, or its host cannot be reached"
        return self._out_of_step(beat) or self._not_waiting(beat)

    def doing(self, rank: int) -> str:
        """Step, phase and place of a rank."""
        beat = self.beats[rank]
        if beat.state != RUNNING:
            return "before the first step" if beat.step is None else f"after step {beat.step}"
        step = "before the first step" if beat.step is None else f"in step {beat.step}"
        waits = f", waiting in {beat.collective}" if beat.collective else ""
        return f"{step}, phase {beat.phase}{waits}{f', at {beat.where}' if beat.where else ''}"

    def _is_silent(self, rank: int) -> bool:
        """Whether a rank does not run or has not been heard of for the time-out."""
        unheard = self.now - self.stamps[rank].heard > self.timeout
        return rank in self.states or rank not in self.beats or unheard

    def _at(self, rank: int) -> str:
        """Step, phase and place of a rank that stands out, and for how long."""
        if rank not in self.beats:
            return ""
        age = self.now - self.stamps[rank].moved
        return f": {self.doing(rank)}, for {age:.0f} s"

    def _whose(self, rank: int) -> str:
        """Host and process of a rank."""
        beat = self.beats.get(rank)
        return f" (host {beat.host}, process {beat.process.pid})" if beat else ""

    def _out_of_step(self, beat: Beat) -> str:
        """How many steps a rank is ahead of the others or behind them, in words; "" if it is neither."""
        if beat.step is None or self.usual is None or len(self.spread) < 2:
            return ""
        # Without a majority, ranks in the last step are compared with the first step, and others with the
        # last: of two ranks in neighbouring steps one is "ahead" and one "behind".
        reference = self.usual if not self.is_tie else _other_end(self.spread, beat.step)
        ahead = beat.step - reference
        if ahead == 0:
            return ""
        return f"is {abs(ahead)} step{'s' * (abs(ahead) > 1)} {'ahead' if ahead > 0 else 'behind'}"

    def _not_waiting(self, beat: Beat) -> str:
        """Words for a rank that is overdue outside a collective while others wait in one; else ""."""
        # Ranks that wait for this one may become overdue a little earlier, hence half a limit.
        late = self.now - self.stamps[beat.rank].counts > beat.limit / 2
        others = any(b.collective for r, b in self.beats.items() if r != beat.rank)
        return "hangs outside of a collective" if late and others and not beat.collective else ""

    def _limit(self, finding: Finding) -> float:
        """Limit of the finding's ranks, in seconds."""
        return min(self.beats[rank].limit for rank in finding.ranks)


def _other_end(steps: list[int], step: int) -> int:
    return steps[0] if step == steps[-1] else steps[-1]
