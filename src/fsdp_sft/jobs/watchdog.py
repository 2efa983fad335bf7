"""Name the rank that died, stopped or hangs on all ranks, instead of a silent time-out.

One thread of each rank posts a heartbeat to the store over which the process group was made, and reads those
of other ranks. It uses no collective, in which a rank that hangs cannot answer. The first four ranks read all
beats, all further ones only their neighbour's until they make no progress themselves, so that the store of
1,000 ranks serves 5,000 beats in an interval. A store that has failed to answer is not asked again: what it
still sends would be taken for the answer to another question. While its host is stopped no call of it ends,
whatever its time-out is.
"""

import faulthandler
import json
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from fsdp_sft._compat.groups import default_store
from fsdp_sft._ranks.agree import said_ranks, this_rank, world_size

STALL_EXIT_CODE = 86
"""Exit code of every rank after the watchdog has reported a stall; no shell or scheduler uses it itself."""

_PACKAGE_AND_LIBRARIES = (
    os.path.dirname(os.path.dirname(__file__)),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<frozen",
)
# Files whose functions wait for other ranks.
_WAITING = (
    *("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py"),
    *("torch/distributed/fsdp/", "fsdp_sft/_ranks/", "fsdp_sft/attention/context_parallel/group.py"),
)


class _Beat(NamedTuple):
    """What a rank posts of itself in each interval.

    Attributes:
        at: When, on its own clock. If it stays the same, the process does not run.
        name: ``"rank 1 (host n1, process 4711)"``.
        process: Its process, as ``this_process`` says it.
        slack: Seconds that the rank may still stay in its step and phase.
        has_left: Whether it has left the loop.
        doing: ``"waiting in all_reduce in step 3, phase train, at train.py:33 in main"``.
    """

    at: float
    name: str
    process: tuple[int, str, str]
    slack: float
    has_left: bool
    doing: str

    @property
    def state(self) -> str:  # of the process of a rank in the loop, if it is of this machine
        return "" if self.has_left else process_state(*self.process)


class Watchdog:
    """Reports on all ranks which rank a job hangs on, and ends the job.

    A collective that one rank does not enter leaves the others waiting in C++ until the group's time-out, and
    no exception reaches them there. A report is due when

    - a process is gone;
    - a process sends no heartbeat for ``timeout`` seconds (it is stopped, or its host is lost);
    - no rank makes progress for that long (one hangs, and the others wait for it);
    - a process has not entered the block for that long.

    Then every rank that still runs writes the same report to stderr: rank, host, process, step, phase and
    place of the rank that stands out, and what the others do; then the stacks of its own threads. It exits
    with ``STALL_EXIT_CODE``, whatever its main thread waits in. This takes ``timeout`` and at most four
    intervals (of a tenth of ``timeout``, at most 5 seconds). A process that is gone is found within three, by
    ranks of its own machine.

    An exception that leaves the block is raised as without a watchdog, unless there is a report, mostly
    that a rank has died. If the store (in rank 0 or torchrun's agent) does not answer, each rank judges by
    its own progress and by what it has heard last.

    A single process only watches its own progress.

    Args:
        timeout: Seconds that may pass between two calls of ``step`` on any rank: more than the longest step,
            less than the time-out of the process group.

    Raises:
        RuntimeError: If the same watchdog is entered twice.
        ValueError: For a time-out that is not above 0, or not finite.

    Collective: all ranks, in the same order if there are several watchdogs; they do not wait for each other.

    Example:
        >>> with fs.Watchdog(timeout=300) as watchdog:
        ...     for step, window in enumerate(fs.windows(loader, 2), start=1):
        ...         watchdog.step(step)
        ...         result = fs.train_step(model, window, optimizer)
        ...         if step % 2 == 0:
        ...             with watchdog.phase("save", timeout=1800):
        ...                 saved = fs.save_checkpoint(
        ...                     "ckpt", step, model=model, optimizer=optimizer
        ...                 )
    """

    def __init__(self, *, timeout: float = 600.0) -> None:
        if not 0 < timeout < math.inf:  # with another one it would watch nobody, and not say so
            raise ValueError(
                f"timeout must be seconds, above 0 and finite, got {timeout!r}; what may take any time is a "
                'phase: `with watchdog.phase("compile", timeout=math.inf):`'
            )
        self.timeout, self.interval = timeout, min(timeout / 10, 5.0)
        self._step: int | None = None
        self._phases = [("train", timeout)]
        self._beats: dict[int, _Beat] = {}
        self._end = self._verdict = self._lost = ""
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._rank, self._world_size = this_rank(), world_size()
        self._name = f"rank {self._rank} (host {os.uname().nodename}, process {os.getpid()})"
        self._store: Any = dist.HashStore()
        if world_size() > 1:
            store = default_store().clone()  # calls of one client would wait for each other
            store.set_timeout(timedelta(seconds=max(self.timeout / 3, 1.0)))
            # Watchdogs are counted, so that all ranks give one the same number.
            count = store.add(f"fsdp_sft/watchdogs-of-{self._rank}", 1)
            self._store = dist.PrefixStore(f"fsdp_sft/watchdog/{count}", store)
        self._moved = self._woke = time.monotonic()
        # When the beat of each rank last changed, on the clock of this machine.
        self._heard = dict.fromkeys(range(self._world_size), self._moved)
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._end = f"failed with {error!r:.200}" if isinstance(error, Exception) else "left the loop"
        self._leaving.set()
        self._thread.join(5.0)
        if self._verdict:
            if error is not None:
                sys.excepthook(kind, error, trace)  # not raised: the exit code is to be the watchdog's
            self._thread.join()

    def step(self, step: int) -> None:
        """Report that the loop begins ``step``.

        Args:
            step: Number of the step; the same on all ranks for steps that belong together.
        """
        self._step, self._moved = step, time.monotonic()

    @contextmanager
    def phase(self, name: str, *, timeout: float | None = None) -> Iterator[None]:
        """Name what the block does in reports, and give it another limit.

        While a rank is in a phase with a longer limit, the other ranks may wait for it that long.

        Args:
            name: Name of the phase, such as ``"save"``.
            timeout: Seconds without progress that are allowed inside, ``math.inf`` for any time while the
                process runs; None keeps the limit from outside.
        """
        self._moved = time.monotonic()  # before the limit, which may be shorter than what has passed
        self._phases.append((name, self._phases[-1][1] if timeout is None else timeout))
        try:
            yield
        finally:
            self._moved = time.monotonic()
            self._phases.pop()

    def _watch(self) -> None:
        """Look at the ranks once per interval, until the loop ends, or by a verdict the process."""
        leaving = False
        while not (leaving or self._verdict):
            leaving = self._rest(self._leaving.wait)
            # No call of a store ends while its host is stopped, so a thread of its own makes them.
            looking = threading.Thread(target=self._look, args=(self._woke,), daemon=True)
            looking.start()
            for _ in range(math.ceil(max(self.timeout / 3, 1.0) / self.interval)):
                self._rest(looking.join)
            self._lost = self._lost or ("; the store does not answer" if looking.is_alive() else "")
            if self._lost:
                self._store = dist.HashStore()
                self._look(self._woke)
        if self._verdict:
            # Not by sys.stderr, whose lock the main thread may hold for ever.
            os.write(2, f"[watchdog, {self._name}] {self._verdict}\n{self._name} was here:\n".encode())
            faulthandler.dump_traceback(2)
            threading.Thread(target=sys.stdout.flush, daemon=True).start()
            # The store may be in this process: the others fetch the verdict.
            time.sleep(2 * self.interval + 1)
            os._exit(STALL_EXIT_CODE)

    def _rest(self, wait: Callable[[float], Any]) -> Any:
        """Wait for an interval; who wakes late was stopped, or got no processor, and saw nobody meanwhile.

        It is late by the time since the last wait, so that a stop in between two of them is told as well.
        """
        woken, now = wait(self.interval), time.monotonic()
        late, self._woke = now - self._woke - self.interval, now
        if late > self.interval + 1:
            self._moved += late
            self._heard = {rank: heard + late for rank, heard in self._heard.items()}
        return woken

    def _look(self, now: float) -> None:
        """Post this rank's beat, fetch those of others, and set the verdict if something is wrong `now`.

        A process that is stopped during its look judges nobody by the time that it has missed.
        """
        own, everyone = self._beat(now), set(range(self._world_size))
        has_failed = own.doing.startswith("failed")
        # Four ranks look at all others, and so do those that make no progress.
        watched = {self._rank, (self._rank + 1) % self._world_size}
        watched |= everyone if self._rank < 4 or own.slack < 0 or has_failed else set()
        try:
            self._store.set(str(self._rank), json.dumps(own))
            if has_failed:
                self._fetch(everyone)  # whose processes they are
                time.sleep(min(self.interval, 1.0))  # until a process that has ended shows
            if self._store.check(["verdict"]):
                self._verdict = self._store.get("verdict").decode()
            elif finding := self._finding(self._fetch(watched), watched, now):
                self._fetch(everyone)
                # All ranks show the report of the first to have one.
                self._verdict = self._store.compare_set("verdict", "", self._report(finding)).decode()
        except RuntimeError as error:  # what the stores of torch raise
            self._lost = f"; the store does not answer: {error!r:.200}"

    def _fetch(self, ranks: Iterable[int]) -> list[int]:
        """Fetch the beats of ranks that have posted one; returns the ranks that have died."""
        # A rank that ends normally says so in its last beat. So it died if its process is gone, and a store
        # that is asked after that still has a beat of the loop.
        gone = [rank for rank, beat in self._beats.items() if beat.state == "dead"]
        there = [rank for rank in {*ranks, *gone} if self._store.check([str(rank)])]
        for rank, value in zip(there, self._store.multi_get(list(map(str, there))), strict=True):
            beat = _Beat(*json.loads(value))
            if rank not in self._beats or self._beats[rank].at != beat.at:
                self._heard[rank] = time.monotonic()
            self._beats[rank] = beat
        return [rank for rank in gone if rank in there and not self._beats[rank].has_left]

    def _finding(self, dead: list[int], watched: set[int], now: float) -> str:
        """What is wrong, the surest first; "" if nothing is."""
        if dead:
            return f"{said_ranks(dead)} died"
        silence = {rank: now - heard for rank, heard in self._heard.items()}
        left = {rank for rank, beat in self._beats.items() if beat.has_left}
        running = self._beats.keys() - left
        silent = [rank for rank in watched - left if silence[rank] > self.timeout]
        if silent and not self._lost:
            return f"{said_ranks(silent)} sent no heartbeat for {self.timeout:g} s"
        if running and all(silence[rank] > self._beats[rank].slack for rank in running):
            return f"no progress for {self._phases[-1][1]:g} s on {said_ranks(running)}"
        return ""

    def _beat(self, now: float) -> _Beat:
        """This rank's beat."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        state = "outside of a collective"
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE_AND_LIBRARIES):
            if any(part in frame.f_code.co_filename for part in _WAITING):
                state = (
                    f"waiting in {frame.f_code.co_name}"  # the outermost: "all_reduce_sum", not its "recv"
                )
            frame = frame.f_back
        phase, limit = self._phases[-1]
        doing = (
            f"{self._end or state} in step {self._step}, phase {phase}, at "
            f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
        )
        return _Beat(now, self._name, this_process(), self._moved + limit - now, bool(self._end), doing)

    def _report(self, finding: str) -> str:
        """A finding, and below it what each rank does: first those that stand out."""
        groups: dict[str, list[int]] = {}
        for rank in range(self._world_size):
            groups.setdefault(self._doing(rank), []).append(rank)
        lines = [finding + self._lost]
        for doing, ranks in sorted(
            groups.items(), key=lambda one: (one[0].startswith("waiting"), len(one[1]))
        )[:16]:
            alone = self._beats.get(ranks[0]) if len(ranks) == 1 else None
            lines.append(f"  {alone.name if alone else said_ranks(ranks)}: {doing}")
        return "\n".join(lines)

    def _doing(self, rank: int) -> str:
        """What a rank does, as far as it is known."""
        if rank not in self._beats:
            return "not heard of: it has not entered its watchdog"
        beat = self._beats[rank]
        if beat.state in ("dead", "stopped"):
            return f"{beat.state}, was {beat.doing}"
        if not beat.has_left and time.monotonic() - self._heard[rank] > self.timeout:
            return f"silent (dead, stopped, or its host cannot be reached), was {beat.doing}"
        return beat.doing


# The identity of a process among those of all machines, and whether it still runs.


def this_process() -> tuple[int, str, str]:
    """The identity of the calling process, which no other process ever has.

    Returns:
        Its number; the time at which it started, in ticks since the machine booted; and the id of the
        machine's boot with the namespace of process numbers, since two machines may have the same host name,
        and most have the same number of the namespace. The last two are "" without /proc.
    """
    pid = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return pid, _stat(pid)[19], f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return pid, "", ""


def process_state(pid: int, born: str, machine: str) -> str:
    """``"dead"``, ``"stopped"`` or ``"running"`` for a process of this machine; "" for another machine's."""
    if not born or machine != this_process()[2]:
        return ""
    try:
        stat = _stat(pid)
    except FileNotFoundError:
        return "dead"
    except OSError:
        return ""
    # A process that started at another time has only inherited the number; Z and X are zombie and dead.
    if stat[19] != born or stat[0] in ("Z", "X"):
        return "dead"
    return "stopped" if stat[0] in ("T", "t") else "running"


def _stat(pid: int) -> list[str]:
    # Fields from the third of proc_pid_stat(5) on, since the second, a name, may contain blanks and brackets:
    # entry 0 is the state and entry 19 the start time.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
