"""Functions on several ranks: their results, or the traceback of the rank that failed first.

Ranks are forks that serve one test after the other, each time in a new process group that meets over a file.
A rank is ended with the test that failed on it or left something changed behind (see ``leftovers``). Each
leaves its traceback in a file with the time, and the earliest is raised: the ranks that only lost their peer
do not take the blame.

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
from tests.harness import device, forks, leftovers
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
    ranks = [_idle[own].pop() if _idle[own] and not fresh else _Rank(own) for own in devices]
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        try:
            for rank, member in enumerate(ranks):
                member.start(task, folder, rank, world_size)
            _wait(ranks, task.timeout)
            _raise_earliest(folder, ranks, task.timeout)
            results = [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]
        finally:
            for member in ranks:
                if member.is_clean and not fresh:
                    _idle[member.device].append(member)
                else:
                    member.end()
    return results


class _Rank:
    """A process that serves tasks until it has failed or something was left changed in it."""

    def __init__(self, own: Simulated | None) -> None:
        self.device = own
        self.connection, other = Pipe()
        self.process = forks.process(_serve, other, own)
        self.process.start()
        _end_all_at_exit()
        other.close()
        self.is_clean = self.is_running = False

    def start(self, task: Task, folder: Path, rank: int, world_size: int) -> None:
        """Begin a task."""
        # By value: a connection would share the memory of tensors, and start a thread in this process for it.
        self.connection.send_bytes(pickle.dumps((task, folder, rank, world_size)))
        self.is_clean, self.is_running = False, True

    def look(self) -> None:
        """Take note of what it has said, or of its end."""
        try:
            if self.is_running and self.connection.poll():
                changed, launches = self.connection.recv()
                self.is_clean, self.is_running = not changed, False
                device.note_launches(launches)
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
    for members in _idle.values():
        while members:
            members.pop().end()


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
    while True:
        try:
            task, folder, rank, world_size = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        before = 0 if own is None else own.launches()
        changed = _run(task, own, folder, rank, world_size)
        connection.send((changed, 0 if own is None else own.launches() - before))


def _run(task: Task, own: Simulated | None, folder: Path, rank: int, world_size: int) -> list[str]:
    """Do one task; what it has left changed."""
    import torch
    import torch.distributed as dist

    os.environ.update(LOCAL_RANK=str(rank if own is None else own.index), LOCAL_WORLD_SIZE=str(world_size))
    before = leftovers.state()
    torch.manual_seed(0)
    faulthandler.enable(open(folder / f"fault-{rank}", "w"))  # noqa: SIM115  needed until there is another
    try:
        with careful_gloo():
            dist.init_process_group(
                device.backend_here(),
                init_method=f"file://{folder / 'store'}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=task.timeout),
            )
        with poisoned() if task.poisoned else nullcontext():
            result = task.function(*task.args, **task.kwargs)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
        del result
        if own is not None:
            own.check()
        dist.barrier()
        dist.destroy_process_group()
        forget_meshes()
        in_use.release_all()  # as at the end of a process
    except BaseException:
        (folder / f"error-{rank}").write_text(f"{time.time()}\n{traceback.format_exc()}")
        os._exit(1)
    gc.collect()
    return leftovers.changes(before, leftovers.state())
