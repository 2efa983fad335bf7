"""What the suite starts, counted by room, and the budget that it has to keep.

Process starts and process groups are what tests of several ranks cost, and are the same on every machine.
Each worker of pytest counts its own; the process that prints the summary adds them up, shows the table, and
fails the run where a room has more than ``budget.toml`` gives it.
"""

import os
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import process as processes
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "budget.toml"
# What is counted: process groups made for functions on ranks; processes started on purpose (fresh ranks,
# programs, launched ranks) or in the place of ranks that died or were left changed.
COUNTED = ("tasks", "started")

counts: dict[str, Counter[str]] = {}
running: str | None = None  # id of the test that runs
_is_expected = False  # whether the processes that are started now have been counted


def count(what: str, number: int = 1) -> None:
    """Add to a count of the room of the test that runs: its folder below ``tests``, or its module there."""
    if running is not None:
        room = running.partition("::")[0].removeprefix("tests/").partition("/")[0]
        counts.setdefault(room, Counter())[what] += number


@contextmanager
def counting_for(test: str) -> Iterator[None]:
    """What is started within the block is started by a test."""
    global running
    running = test
    try:
        yield
    finally:
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
            count("started")

    sys.addaudithook(heard)
    start = processes.BaseProcess.start

    def counted(self: processes.BaseProcess) -> None:
        if os.getpid() == own and not _is_expected:
            count("started")
        start(self)

    processes.BaseProcess.start = counted  # type: ignore[method-assign]


def told() -> dict[str, dict[str, int]]:
    """This process's counts, as data."""
    return {room: dict(counter) for room, counter in counts.items()}


def add(other: Mapping[str, Mapping[str, int]]) -> None:
    """Add another process's counts."""
    for room, counter in other.items():
        counts.setdefault(room, Counter()).update(counter)


def budget() -> dict[str, dict[str, int]]:
    """What each room may use, one without a line of its own (``default``), and ``all`` together."""
    return tomllib.loads(_FILE.read_text())["runs"]


def is_judged(config: Any, device: str) -> bool:
    """Whether a run has to keep the budget: not one of slow tests, or of ranks with simulated devices."""
    return device == "cpu" and "not slow" in config.getoption("markexpr")


def summed(used: Mapping[str, Mapping[str, int]]) -> dict[str, Mapping[str, int]]:
    """The counts of rooms in their order, and ``all`` together."""
    total: Counter[str] = Counter()
    for counter in used.values():
        total.update(counter)
    return {**dict(sorted(used.items())), "all": total}


def exceeded(used: Mapping[str, Mapping[str, int]], allowed: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What rooms, or all together, have used beyond their budget, in words."""
    found = []
    for room, counter in summed(used).items():
        limits = allowed.get(room, allowed["default"])
        for what in COUNTED:
            if counter.get(what, 0) > limits[what]:
                found.append(
                    f"{room} has {counter.get(what, 0)} {what} and a budget of {limits[what]}: share ranks "
                    "and process groups, or raise the number in tests/budget.toml and say there what it buys"
                )
    return found


def table() -> list[str]:
    """The counts of all rooms as lines."""
    head = f"{'':26s}" + "".join(f"{what:>10s}" for what in COUNTED)
    rows = summed(counts).items()
    return [head, *(f"{room:26s}" + "".join(f"{c.get(what, 0):10d}" for what in COUNTED) for room, c in rows)]
