"""What the suite starts, counted by room, and the budget that it has to keep.

Process starts and process groups are what tests of several ranks cost, and are the same on every machine.
Each worker of pytest counts its own; the process that prints the summary adds them up, shows the table, and
fails the run where a room has more than ``budget.toml`` gives it.
"""

import os
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from multiprocessing import process as processes
from typing import Any

from tests.harness.places import ROOT

# What is counted: process groups made for functions on ranks; processes started on purpose (fresh ranks,
# programs, launched ranks) or in the place of ranks that died or were left changed.
COUNTED = ("tasks", "started")

counts: dict[str, Counter[str]] = {}
running: str | None = None  # id of the test that runs


def count(what: str, number: int = 1) -> None:
    """Add to a count of the room of the test that runs: its folder below ``tests``, or its module there."""
    if running is not None:
        room = running.partition("::")[0].removeprefix("tests/").partition("/")[0]
        counts.setdefault(room, Counter())[what] += number


def watch() -> None:
    """Count every process that this one starts from now on."""
    own = os.getpid()

    def heard(event: str, started: Any) -> None:
        # Python's: torch and transformers look once for ninja and others, in whatever test that is.
        if event == "subprocess.Popen" and os.getpid() == own and str(started[0]).startswith(sys.prefix):
            count("started")

    sys.addaudithook(heard)
    start = processes.BaseProcess.start

    def counted(self: processes.BaseProcess) -> None:
        if os.getpid() == own:
            count("started")
        start(self)

    processes.BaseProcess.start = counted  # type: ignore[method-assign]


def budget() -> dict[str, dict[str, int]]:
    """What each room may use, one without a line of its own (``default``), and ``all`` together."""
    return tomllib.loads((ROOT / "tests" / "budget.toml").read_text())["runs"]


def verdict(config: Any, device: str) -> list[str]:
    """What a run has used beyond its budget; slow tests, and ranks with simulated devices, have none."""
    if device != "cpu" or not config.getoption("markexpr").startswith("not slow"):
        return []
    return exceeded(counts, budget())


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
