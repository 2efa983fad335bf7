"""The ranks of this process: forks that serve one task after the other, in the process group they are in.

A group of ranks that have done a task stands until as many are asked for again. It is ended with a task that
fails on one of its ranks, leaves the process group, or leaves something changed that cannot be put back (see
``leftovers``). What all this costs is counted (see ``budget``).
"""

import functools
import pickle
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from tests.harness import budget, forks
from tests.harness.poison import is_poisoned
from tests.harness.serving import Done, serve
from tests.simulated.device import Simulated

_MOST = 12  # ranks that may stand idle; each has some 200 MB to itself


class Rank:
    """A process that serves tasks, in one process group.

    Attributes:
        is_running: Whether it has a task.
        done: What it says of the last task.
    """

    def __init__(self, own: Simulated | None, store: Path, rank: int, world_size: int) -> None:
        self.connection, other = Pipe()
        self.process = forks.process(serve, other, own, store, rank, world_size)
        self.process.start()
        budget.count("started", -1)  # whoever asks for ranks on purpose counts them
        other.close()
        self.is_running, self.done = False, Done()

    def start(self, function: Callable[[], Any], timeout: float, folder: Path) -> None:
        """Begin to call a function; fresh memory holds NaN meanwhile if it does here."""
        # By value: a connection would share the memory of tensors, and start a thread in this process for it.
        self.connection.send_bytes(pickle.dumps((function, timeout, is_poisoned(), folder)))
        self.is_running, self.done = True, Done()

    def look(self) -> None:
        """Take note of what it has said, or of its end."""
        try:
            if self.is_running and self.connection.poll():
                self.done = self.connection.recv()
                self.is_running = False
        except EOFError:
            self.process.join()
            self.is_running = False

    @property
    def has_failed(self) -> bool:
        """Whether the process ended by itself."""
        return not self.is_running and self.process.exitcode not in (None, 0)


class Group:
    """Ranks in their order, one for each device."""

    def __init__(self, devices: Sequence[Simulated | None]) -> None:
        budget.count("tasks")
        self.devices = list(devices)
        self._folder = tempfile.TemporaryDirectory(prefix="group-")
        store = Path(self._folder.name) / "store"
        self.ranks = [Rank(own, store, rank, len(devices)) for rank, own in enumerate(devices)]
        _end_all_at_exit()

    @property
    def stands(self) -> bool:
        """Whether all are in the group still, and have counted alike: groups are named by their number."""
        said = [member.done for member in self.ranks]
        return all(one.is_in_group and not one.changed for one in said) and len({d.groups for d in said}) == 1

    def end(self) -> None:
        """Kill the ranks; they may stand in a collective."""
        for member in self.ranks:
            member.connection.close()
            member.process.kill()
            member.process.join()
        self._folder.cleanup()


_lock = threading.Lock()  # tests run several groups at once, from threads
_standing: list[Group] = []  # whose ranks are idle; the one used last comes last


def group_of(devices: Sequence[Simulated | None], *, fresh: bool) -> Group:
    """Ranks with these devices: a group that stands if there is one, or ``fresh`` ones."""
    if fresh:
        budget.count("started", len(devices))
        return Group(devices)
    with _lock:
        for group in _standing:
            if group.devices == list(devices):
                _standing.remove(group)
                return group
        _end_some(keeping=_MOST - len(devices))
    return Group(devices)


def _end_some(keeping: int) -> None:
    while _standing and sum(len(group.ranks) for group in _standing) > keeping:
        _standing.pop(0).end()


def give_back(group: Group, *, fresh: bool) -> None:
    """The ranks of a group have done their task, or failed in it."""
    if group.stands and not fresh:
        with _lock:
            _standing.append(group)
        return
    if not fresh:
        budget.count("started", sum(bool(member.done.changed) for member in group.ranks))
    group.end()


@functools.cache
def _end_all_at_exit() -> None:
    # Not with atexit: a worker of multiprocessing, which has ranks of its own, leaves without it, and would
    # wait for them.
    Finalize(None, _end_all, exitpriority=100)


def _end_all() -> None:
    _end_some(keeping=0)
    forks.end_server()
