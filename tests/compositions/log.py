"""What has been tried, a line of JSON each, and the table of pairs made of it."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.compositions.axes import AXES, Draw, Pair, full, pairs
from tests.compositions.drawing import allowed_pairs
from tests.compositions.judge import Outcome, judge

ENDINGS = {"equal": "equal", "refused": "refused", "fault": "faults"}


@dataclass(frozen=True)
class Entry:
    """A draw and how it ended."""

    number: int
    draw: dict[str, str]
    outcome: Outcome
    seconds: float


def tried(task: tuple[int, Draw, int]) -> Entry:
    """Judge a (number, draw, seed)."""
    number, draw, seed = task
    start = time.monotonic()
    outcome = judge(draw, seed)
    return Entry(number, dict(draw), outcome, time.monotonic() - start)


class Log:
    """A file that a run goes on from.

    Args:
        path: Of the file; made if need be.
        seed: Of the draws; a log of another seed is refused.
    """

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.entries = list(self._read(seed)) if path.exists() else []
        if not self.entries:
            path.write_text(json.dumps({"seed": seed, "axes": AXES}) + "\n")

    def _read(self, seed: int) -> Iterator[Entry]:
        head, *lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        if head != {"seed": seed, "axes": {axis: list(options) for axis, options in AXES.items()}}:
            raise SystemExit(f"{self.path} is of another seed or of other axes; delete it, or name another")
        for line in lines:
            yield Entry(line["number"], full(line["draw"]), Outcome(*line["outcome"]), line["seconds"])

    def add(self, entry: Entry) -> None:
        """Keep one, at once."""
        self.entries.append(entry)
        line = {
            "number": entry.number,
            "draw": {axis: option for axis, option in entry.draw.items() if option != AXES[axis][0]},
            "outcome": [entry.outcome.kind, entry.outcome.reason],
            "seconds": round(entry.seconds, 1),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def counted(entries: list[Entry]) -> dict[str, Counter[Pair]]:
    """How often each pair was drawn, and how often it ended in which way."""
    found: dict[str, Counter[Pair]] = {kind: Counter() for kind in ("drawn", "equal", "refused", "fault")}
    for entry in entries:
        for kind in ("drawn", entry.outcome.kind):
            found[kind].update(pairs(entry.draw))
    return found


def table(entries: list[Entry]) -> str:
    """By option how often it was drawn, equal and refused; and allowed pairs that never came out equal."""
    found = counted(entries)
    kinds = Counter(entry.outcome.kind for entry in entries)
    lines = [
        f"{len(entries)} draws: {kinds['equal']} equal, {kinds['refused']} refused, {kinds['fault']} faults"
    ]
    lines += ["", f"{'option':52}{'drawn':>7}{'equal':>7}{'refused':>9}"]
    for axis, options in AXES.items():
        for option in options:
            own = [entry.outcome.kind for entry in entries if entry.draw[axis] == option]
            lines.append(
                f"{axis + ': ' + option:52}{len(own):7}{own.count('equal'):7}{own.count('refused'):9}"
            )
    refusals = Counter(entry.outcome.reason for entry in entries if entry.outcome.kind == "refused")
    lines += ["", "refused because", *(f"{count:7}  {reason}" for reason, count in refusals.most_common())]
    allowed = allowed_pairs()
    never = sorted(pair for pair in allowed if not found["equal"][pair])
    lines += ["", f"{len(allowed) - len(never)} of {len(allowed)} allowed pairs were equal at least once"]
    lines += [f"  never: {a[0]}: {a[1]} with {b[0]}: {b[1]}" for a, b in never[:20]]
    return "\n".join(lines)
