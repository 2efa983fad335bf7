"""Functions on several ranks: their results, or the traceback of the rank that failed first.

Each rank leaves its traceback in a file with the time, and the earliest is raised: the ranks that only lost
their peer do not take the blame. ``pool`` has the ranks, ``serving`` is what they do.
"""

import functools
import importlib
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, ParamSpec

from tests.harness import device
from tests.harness.device import device_here, device_type, mesh_here  # noqa: F401  for what ranks run
from tests.harness.pool import Rank, give_back, group_of
from tests.simulated.device import Simulated

P = ParamSpec("P")
_GRACE_SECONDS = 10  # what the other ranks get to fail by themselves once one has


class RankFailedError(AssertionError):
    """A rank failed; the message is the earliest rank's traceback."""


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` on ``world_size`` ranks and return what each returned.

    They compute on the device that the harness is set to (``device.asked``).

    Args:
        function: It, its arguments and its results must be picklable: a function at the top of its module.
        world_size: Number of ranks.
        args: Its arguments.
        timeout: In seconds, after which the ranks are killed.
        fresh: Whether the ranks must not have run anything before, as where memory is measured.
        kwargs: Its keyword arguments.
    """
    task = functools.partial(function, *args, **kwargs)
    return run_task(task, device.for_ranks(world_size), timeout=timeout, fresh=fresh)


def on_ranks(
    world_size: int = 0, *, timeout: float = 120
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """A test whose body is run by each of several ranks, with what the test is given.

    Args:
        world_size: Number of ranks; 0 for as many as the test's argument ``ranks`` says.
        timeout: In seconds, after which the ranks are killed.
    """

    def decorate(body: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(body)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            task = functools.partial(_body_of, body.__module__, body.__name__, *args, **kwargs)
            run_distributed(task, world_size or int(str(kwargs["ranks"])), timeout=timeout)

        return test

    return decorate


def _body_of(module: str, name: str, /, *args: Any, **kwargs: Any) -> None:
    """The body of a test, which a pickle finds by the test's name alone."""
    getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)


def run_task(
    task: Callable[[], Any], devices: Sequence[Simulated | None], *, timeout: float, fresh: bool
) -> list[Any]:
    """Run a task on a rank for each device: on ranks that have served before, or ``fresh`` ones for once."""
    group = group_of(devices, fresh=fresh)
    ranks = group.ranks
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        try:
            for member in ranks:
                member.start(task, timeout, folder)
            _wait(ranks, timeout)
            _raise_earliest(folder, ranks, timeout)
            return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(len(ranks))]
        finally:
            give_back(group, fresh=fresh)


def _wait(ranks: list[Rank], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while running := [rank for rank in ranks if rank.is_running]:
        if any(rank.has_failed for rank in ranks):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        left = deadline - time.monotonic()
        if left <= 0:
            for rank in running:
                rank.process.kill()
        wait([rank.connection for rank in running], max(left, 0.02))
        for rank in running:
            rank.look()


def _raise_earliest(folder: Path, ranks: list[Rank], timeout: float) -> None:
    errors = sorted(folder.glob("error-*"), key=lambda path: float(path.read_text().split("\n", 1)[0]))
    exit_codes = [rank.process.exitcode for rank in ranks]
    faults = "".join(path.read_text() for path in sorted(folder.glob("fault-*")))
    if errors:
        first = errors[0].name.removeprefix("error-")
        text = errors[0].read_text().split("\n", 1)[1]
        others = sorted(int(path.name.removeprefix("error-")) for path in errors[1:])
        raise RankFailedError(
            f"rank {first} failed first (then {others}), exit codes {exit_codes}\n{text}{faults}"
        )
    if any(exit_codes):
        raise RankFailedError(f"exit codes {exit_codes} without a traceback; time-out {timeout} s\n{faults}")
