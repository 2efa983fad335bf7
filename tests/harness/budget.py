"""What the suite starts, counted by room, and the budget that it has to keep.

Process starts and process groups are what tests of several ranks cost, and are the same on every machine.
Each worker of pytest counts its own; the process that prints the summary adds them up, shows the table, and
fails the run where a room has more than ``budget.toml`` gives it.
"""

import os
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import process as processes
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "budget.toml"
# What is counted, in the order of the table.
COLUMNS = {
    "cases": "functions run on ranks",
    "tasks": "process groups made for them",
    "pool": "ranks started that serve many tests",
    "purpose": "processes started on purpose: fresh ranks, programs, launched ranks",
    "replaced": "ranks that died, or in which something was left changed",
    "cpu": "CPU seconds: the tests' own, their subprocesses' and those of their ranks' cases",
}

counts: dict[str, Counter[str]] = {}
reasons: Counter[str] = Counter()
running: str | None = None  # id of the test that runs
_is_expected = False  # whether the processes that are started now have been counted


def room_of(test: str) -> str:
    """The room of a test, by its id: its folder below ``tests``, or its module there."""
    return test.partition("::")[0].removeprefix("tests/").partition("/")[0]


def count(what: str, number: float = 1) -> None:
    """Add to a count of the room of the test that runs."""
    if running is not None:
        counts.setdefault(room_of(running), Counter())[what] += number  # type: ignore[assignment]


def count_replaced(why: Iterable[str]) -> None:
    """A rank is not used again."""
    count("replaced")
    reasons.update({name.partition("[")[0] for name in why})


@contextmanager
def counting_for(test: str) -> Iterator[None]:
    """What is started within the block is started by a test, and the CPU seconds used are its own."""
    global running
    before, running = sum(os.times()[:4]), test
    try:
        yield
    finally:
        count("cpu", sum(os.times()[:4]) - before)
        running = None


@contextmanager
def counted_already() -> Iterator[None]:
    """Within the block, processes are started that somebody has counted."""
    global _is_expected
    before, _is_expected = _is_expected, True
    try:
        yield
    finally:
        _is_expected = before


def watch() -> None:
    """Count every process that this one starts from now on."""
    own = os.getpid()

    def heard(event: str, started: Any) -> None:
        if event == "subprocess.Popen" and os.getpid() == own:
            count("purpose")

    sys.addaudithook(heard)
    start = processes.BaseProcess.start

    def counted(self: processes.BaseProcess) -> None:
        if os.getpid() == own and not _is_expected:
            count("purpose")
        start(self)

    processes.BaseProcess.start = counted  # type: ignore[method-assign]


def told() -> dict[str, Any]:
    """This process's counts, as data."""
    return {"counts": {name: dict(counter) for name, counter in counts.items()}, "reasons": dict(reasons)}


def add(other: Mapping[str, Any]) -> None:
    """Add another process's counts."""
    for name, counter in other["counts"].items():
        counts.setdefault(name, Counter()).update(counter)
    reasons.update(other["reasons"])


def started(counter: Mapping[str, float]) -> float:
    """Processes that a room pays for: started on purpose, or in the place of others."""
    return counter.get("purpose", 0) + counter.get("replaced", 0)


def budget() -> dict[str, dict[str, int]]:
    """What each room may use, one without a line of its own (``default``), and ``all`` together."""
    return tomllib.loads(_FILE.read_text())["runs"]


def is_judged(config: Any, device: str) -> bool:
    """Whether a run has to keep the budget: not one of slow tests, or of ranks with simulated devices."""
    return device == "cpu" and "not slow" in config.getoption("markexpr")


def exceeded(used: Mapping[str, Mapping[str, float]], allowed: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What rooms, or all together, have used beyond their budget, in words."""
    total: Counter[str] = Counter()
    for counter in used.values():
        total.update(counter)
    found = []
    for name, counter in [*sorted(used.items()), ("all", total)]:
        limits = allowed.get(name, allowed["default"])
        for what, number in (("tasks", counter.get("tasks", 0.0)), ("started", started(counter))):
            if number > limits[what]:
                found.append(
                    f"{name} has {number:.0f} {what} and a budget of {limits[what]}: share ranks and process "
                    f"groups, or raise the number in tests/{_FILE.name} and say there what it buys"
                )
    return found


def table() -> list[str]:
    """The counts of all rooms as lines, the costliest first."""
    total: Counter[str] = Counter()
    for counter in counts.values():
        total.update(counter)
    rows = sorted(counts.items(), key=lambda item: -item[1]["cpu"])
    lines = [f"{'':26s}" + "".join(f"{name:>10s}" for name in COLUMNS)]
    for name, counter in [*rows, ("all", total)]:
        lines.append(f"{name:26s}" + "".join(f"{counter[column]:10.0f}" for column in COLUMNS))
    lines += [f"{name}: {words}" for name, words in COLUMNS.items()]
    if reasons:
        lines.append("replaced for: " + ", ".join(f"{name} ({n})" for name, n in reasons.most_common(12)))
    return lines
