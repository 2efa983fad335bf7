"""Functions on several ranks: their results, or the traceback of the rank that failed first.

Ranks are forks that serve one test after the other. They meet over a file, and their process group lasts for
as long as the same ranks are asked for, so that a further case costs no store and no connections; the groups
that a test has made besides end with it. A rank is ended with the test that failed on it or left something
changed that cannot be put back (see ``leftovers``). Each leaves its traceback in a file with the time, and
the earliest is raised: the ranks that only lost their peer do not take the blame. What all this costs is
counted (see ``budget``).

A rank computes on the CPU, or on a simulated device that it keeps (see ``device``), and then fails if it has
used any other.
"""

import faulthandler
import functools
import gc
import os
import pickle
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from fsdp_sft._compat import careful_gloo, forget_meshes
from fsdp_sft.dcp_io import in_use
from tests.harness import budget, device, forks, leftovers
from tests.harness.poison import is_poisoned, poisoned
from tests.simulated.device import Simulated

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
    return run_task(Task(function, args, kwargs, timeout), device.for_ranks(world_size), fresh=fresh)


@dataclass(frozen=True)
class Task:
    """What ranks are to do.

    Attributes:
        function: To call.
        args: Its arguments.
        kwargs: Its keyword arguments.
        timeout: Of the process group and of the whole, in seconds.
        poisoned: Whether fresh memory holds NaN while it runs: as where the task was made.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout: float
    poisoned: bool = field(default_factory=is_poisoned)


def run_task(task: Task, devices: Sequence[Simulated | None], *, fresh: bool) -> list[Any]:
    """Run a task on a rank for each device: on ranks that have served before, or ``fresh`` ones for once."""
    world_size = len(devices)
    ranks = _taken(devices, fresh=fresh)
    meeting = _meeting_of(ranks, task.timeout)
    budget.count("cases")
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        try:
            for rank, member in enumerate(ranks):
                member.start(task, folder, meeting.store, rank, world_size)
            _wait(ranks, task.timeout)
            _raise_earliest(folder, ranks, task.timeout)
            results = [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]
        finally:
            budget.count("cpu", sum(member.done.cpu for member in ranks))
            # Groups are named by their number, so ranks that have counted differently must meet anew.
            if (
                not all(member.done.is_in_group for member in ranks)
                or len({m.done.groups for m in ranks}) > 1
            ):
                meeting.end()
            for member in ranks:
                if member.is_clean and not fresh:
                    _idle[member.device].append(member)
                else:
                    meeting.end()
                    member.end()
                    if not fresh:
                        budget.count_replaced(member.done.changed)
    return results


def _taken(devices: Sequence[Simulated | None], *, fresh: bool) -> "list[_Rank]":
    """A rank for each device: those that are in a group already, if they can serve."""
    if fresh:
        budget.count("purpose", len(devices))
        return [_Rank(own) for own in devices]
    if _meeting is not None and [member.device for member in _meeting.ranks] == list(devices):
        for member in _meeting.ranks:
            _idle[member.device].remove(member)
        return list(_meeting.ranks)
    ranks = []
    for own in devices:
        budget.count("pool", not _idle[own])
        ranks.append(_idle[own].pop(0) if _idle[own] else _Rank(own))
    return ranks


class _Meeting:
    """Ranks that are in one process group, in their order, for as long as nothing happens to them."""

    def __init__(self, ranks: "list[_Rank]", timeout: float) -> None:
        self.ranks, self.timeout = ranks, timeout
        self._folder = tempfile.TemporaryDirectory(prefix="meeting-")
        self.store = Path(self._folder.name) / "store"

    def end(self) -> None:
        """The ranks will not be in this group any more."""
        global _meeting
        if _meeting is self:
            _meeting = None
        self._folder.cleanup()


_meeting: _Meeting | None = None


def _meeting_of(ranks: "list[_Rank]", timeout: float) -> _Meeting:
    """The group of these ranks; a new one unless they are in one with that time-out."""
    global _meeting
    if _meeting is None or _meeting.ranks != ranks or _meeting.timeout != timeout:
        if _meeting is not None:
            _meeting.end()
        budget.count("tasks")
        _meeting = _Meeting(ranks, timeout)
    return _meeting


@dataclass(frozen=True)
class _Done:
    """What a rank says of a task that it has done.

    Attributes:
        changed: What is not as it was before.
        launches: On its simulated device.
        cpu: Seconds of it.
        is_in_group: Whether it is still in the process group.
        groups: How many groups it has made.
    """

    changed: tuple[str, ...] = ("died",)
    launches: int = 0
    cpu: float = 0.0
    is_in_group: bool = False
    groups: int = -1


class _Rank:
    """A process that serves tasks until it has failed or something was left changed in it."""

    def __init__(self, own: Simulated | None) -> None:
        self.device = own
        self.connection, other = Pipe()
        self.process = forks.process(_serve, other, own)
        with budget.counted_already():
            self.process.start()
        _end_all_at_exit()
        other.close()
        self.is_clean = self.is_running = False
        self.done = _Done()

    def start(self, task: Task, folder: Path, store: Path, rank: int, world_size: int) -> None:
        """Begin a task."""
        # By value: a connection would share the memory of tensors, and start a thread in this process for it.
        self.connection.send_bytes(pickle.dumps((task, folder, store, rank, world_size)))
        self.is_clean, self.is_running, self.done = False, True, _Done()

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


_idle: defaultdict[Simulated | None, list[_Rank]] = defaultdict(list)


@functools.cache
def _end_all_at_exit() -> None:
    # Not with atexit: a worker of multiprocessing, which has ranks of its own, leaves without it, and would
    # wait for them.
    Finalize(None, _end_all, exitpriority=100)


def _end_all() -> None:
    if _meeting is not None:
        _meeting.end()
    for members in _idle.values():
        while members:
            members.pop().end()
    forks.end_server()


def _wait(ranks: list[_Rank], timeout: float) -> None:
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


def _raise_earliest(folder: Path, ranks: list[_Rank], timeout: float) -> None:
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


def _serve(connection: Connection, own: Simulated | None) -> None:
    import torch

    torch.set_num_threads(1)
    device.become(own)
    served = _Served(own)
    while True:
        try:
            task, folder, store, rank, world_size = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send(served.run(task, folder, store, rank, world_size))


class _Served:
    """The tasks of one rank, in its process: its process group, and its state from one task to the next."""

    def __init__(self, own: Simulated | None) -> None:
        self._own = own
        self._store: Path | None = None
        self._world: Any = None
        self._state: leftovers.State | None = None

    def run(self, task: Task, folder: Path, store: Path, rank: int, world_size: int) -> _Done:
        """Do one task."""
        import torch
        import torch.distributed as dist

        own, started = self._own, time.process_time()
        launched = 0 if own is None else own.launches()
        os.environ.update(
            LOCAL_RANK=str(rank if own is None else own.index), LOCAL_WORLD_SIZE=str(world_size)
        )
        before = self._state or leftovers.State()
        before.renew()
        torch.manual_seed(0)
        faulthandler.enable(open(folder / f"fault-{rank}", "w"))  # noqa: SIM115  needed until there is another
        try:
            self._meet(store, rank, world_size, task.timeout)
            with poisoned() if task.poisoned else nullcontext():
                result = task.function(*task.args, **task.kwargs)
            (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
            del result
            if own is not None:
                own.check()
            is_in_group = dist.is_initialized() and dist.group.WORLD is self._world
            if dist.is_initialized():
                dist.barrier()
                self._end_groups(all_of_them=not is_in_group)
            forget_meshes()
            in_use.release_all()  # as at the end of a process
        except BaseException:
            (folder / f"error-{rank}").write_text(f"{time.time()}\n{traceback.format_exc()}")
            os._exit(1)
        gc.collect()
        after = leftovers.State()
        changed = leftovers.changes(before.found, after.found)
        if changed:
            leftovers.put_back(before, changed)
            after = leftovers.State()
            changed = leftovers.changes(before.found, after.found)
        self._state = after
        launches = 0 if own is None else own.launches() - launched
        groups = dist.distributed_c10d._world.group_count
        return _Done(tuple(changed), launches, time.process_time() - started, is_in_group, groups)

    def _meet(self, store: Path, rank: int, world_size: int, timeout: float) -> None:
        """Be in the process group that meets over a file: the present one, or a new one in its place."""
        import torch.distributed as dist

        if store == self._store and dist.group.WORLD is self._world:
            return
        if dist.is_initialized():
            self._end_groups(all_of_them=True)
            forget_meshes()
        with careful_gloo():
            dist.init_process_group(
                device.backend_here(),
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
        self._store, self._world = store, dist.group.WORLD

    def _end_groups(self, *, all_of_them: bool) -> None:
        """End the groups that a task has made, or the default group as well."""
        import torch.distributed as dist

        if all_of_them:
            dist.destroy_process_group()
            self._store = self._world = None
            return
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not self._world:
                dist.destroy_process_group(group)
