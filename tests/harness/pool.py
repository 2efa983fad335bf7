"""The ranks of this process: forks that serve one task after the other, mostly in the groups they are in.

A group of ranks that have done a task stands until as many are asked for again. A rank is ended with the task
that failed on it or left something changed that cannot be put back (see ``leftovers``); those that were in a
group with it meet others. What all this costs is counted (see ``budget``).
"""

import functools
import pickle
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.util import Finalize
from pathlib import Path

from tests.harness import budget, device, forks
from tests.harness.serving import Done, Task, serve
from tests.simulated.device import Simulated

_MOST = 12  # ranks that may stand idle; each has some 200 MB to itself


class Rank:
    """A process that serves tasks until it has failed or something was left changed in it."""

    def __init__(self, own: Simulated | None) -> None:
        self.device = own
        self.connection, other = Pipe()
        self.process = forks.process(serve, other, own)
        with budget.counted_already():
            self.process.start()
        _end_all_at_exit()
        other.close()
        self.is_clean = self.is_running = False
        self.done = Done()

    def start(self, task: Task, folder: Path, store: Path, rank: int, world_size: int) -> None:
        """Begin a task."""
        # By value: a connection would share the memory of tensors, and start a thread in this process for it.
        self.connection.send_bytes(pickle.dumps((task, folder, store, rank, world_size)))
        self.is_clean, self.is_running, self.done = False, True, Done()

    def look(self) -> None:
        """Take note of what it has said, or of its end."""
        try:
            if self.is_running and self.connection.poll():
                self.done = self.connection.recv()
                self.is_clean, self.is_running = not self.done.changed, False
                device.note_launches(self.done.launches)
        except EOFError:
            self.process.join()
            self.is_running = False

    @property
    def has_failed(self) -> bool:
        """Whether the process ended by itself."""
        return not self.is_running and self.process.exitcode not in (None, 0)

    def end(self) -> None:
        """Kill it; it may stand in a collective."""
        self.connection.close()
        self.process.kill()
        self.process.join()


class Meeting:
    """Ranks that are in one process group, in their order, or will be with their next task."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        budget.count("tasks")
        self.ranks = list(ranks)
        self._folder = tempfile.TemporaryDirectory(prefix="meeting-")
        self.store = Path(self._folder.name) / "store"

    @property
    def stands(self) -> bool:
        """Whether all are in the group still, and have counted alike: groups are named by their number."""
        said = [member.done for member in self.ranks]
        return all(done.is_in_group for done in said) and len({done.groups for done in said}) == 1

    def end(self) -> None:
        """The ranks will not be in this group any more."""
        self._folder.cleanup()


_lock = threading.Lock()  # tests run several groups at once, from threads
_standing: list[Meeting] = []  # whose ranks are idle; the one used last comes last
_alone: list[Rank] = []  # idle ranks that are in no group


def meeting_of(devices: Sequence[Simulated | None], *, fresh: bool) -> Meeting:
    """Ranks with these devices: those that are in a group together if there are, or ``fresh`` ones."""
    if fresh:
        budget.count("started", len(devices))
        return Meeting([Rank(own) for own in devices])
    with _lock:
        for meeting in _standing:
            if [member.device for member in meeting.ranks] == list(devices):
                _standing.remove(meeting)
                return meeting
        ranks = [_idle(own) for own in devices]
        _end_some(keeping=_MOST - len(ranks))
    return Meeting(ranks)


def _idle(own: Simulated | None) -> Rank:
    for member in _alone:
        if member.device == own:
            _alone.remove(member)
            return member
    return Rank(own)


def _end_some(keeping: int) -> None:
    while _alone or _standing:
        if len(_alone) + sum(len(meeting.ranks) for meeting in _standing) <= keeping:
            return
        if not _alone:
            meeting = _standing.pop(0)
            meeting.end()
            _alone.extend(meeting.ranks)
        _alone.pop(0).end()


def give_back(meeting: Meeting, *, fresh: bool) -> None:
    """The ranks of a meeting have done their task, or failed in it."""
    clean = [member for member in meeting.ranks if member.is_clean and not fresh]
    for member in meeting.ranks:
        if member not in clean:
            member.end()
            if not fresh:
                budget.count("started")
    with _lock:
        if len(clean) == len(meeting.ranks) and meeting.stands:
            _standing.append(meeting)
            return
        _alone.extend(clean)
    meeting.end()


@functools.cache
def _end_all_at_exit() -> None:
    # Not with atexit: a worker of multiprocessing, which has ranks of its own, leaves without it, and would
    # wait for them.
    Finalize(None, _end_all, exitpriority=100)


def _end_all() -> None:
    _end_some(keeping=0)
    forks.end_server()
