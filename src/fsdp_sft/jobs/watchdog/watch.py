"""The watchdog: its interface to the training loop, and the thread that watches the ranks."""

import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import TracebackType
from typing import Any

from fsdp_sft._compat.groups import default_store
from fsdp_sft._process.identity import process_state, this_process
from fsdp_sft._ranks.agree import is_distributed, this_rank, world_size
from fsdp_sft.jobs.watchdog.beat import ENDED, FAILED, RUNNING, Beat, place_of_main_thread
from fsdp_sft.jobs.watchdog.exchange import Exchange, address_of
from fsdp_sft.jobs.watchdog.judge import Finding, Judge
from fsdp_sft.jobs.watchdog.report import Report

STALL_EXIT_CODE = 86
"""Exit code of every rank after the watchdog has reported a stall; no shell or scheduler uses it itself."""

# Ranks that watch all others; all further ranks watch these and one neighbour. One lookout would do. With
# 1,000 ranks each lookout asks the store for 300 kB at each look.
_LOOKOUTS = 4
_TO_FIND_OUT = 0.2  # seconds that a rank which has lost a peer takes to tell the others which peer


class Watchdog:
    """Reports on all ranks which rank a job hangs on, and ends the job.

    A collective that one rank does not enter leaves the others waiting in C++ until the group's time-out, and
    no exception reaches them there. So a thread of each rank posts heartbeats to the store over which the
    process group was made, and reads those of other ranks. It uses no collective.

    A report is due when

    - a process is gone;
    - a process sends no heartbeat for ``timeout`` seconds (it is stopped, or its host is lost);
    - a process makes no progress for that long (its loop hangs, or waits for a rank that is behind or has
      left);
    - a process never enters the block.

    Then every rank that still runs writes the same report to stderr: rank, host, process, step, phase and
    place of each rank that stands out, and what the others do; then the stack of its own main thread. It
    exits with ``STALL_EXIT_CODE``, whatever its main thread waits in. This takes ``timeout`` and at most four
    intervals; a process that is gone is found by ranks of its own machine within three intervals.

    A rank that reaches the end of the block waits there until all ranks have left the loop, as long as the
    others make progress. A rank that leaves with an exception does not wait: it is reported only once another
    rank has waited for it for too long, and a note on its exception says which rank failed or died first. If
    the store (in rank 0 or torchrun's agent) cannot be reached, each rank judges by its own progress alone,
    and reports where the store was and what it heard last.

    A single process only watches its own progress.

    Args:
        timeout: Seconds that may pass between two calls of ``step`` on any rank: more than the longest step,
            less than the time-out of the process group.
        interval: Seconds between two heartbeats; None takes a tenth of ``timeout``, at most 5.

    Raises:
        ValueError: If a time is not positive, or the interval is more than a third of ``timeout``.
        RuntimeError: If the same watchdog is entered twice.

    Collective: all ranks, in the same order if there are several watchdogs; ranks wait for each other at the
    end only.

    Memory: one beat of a few hundred bytes per watched rank. Up to 4 ranks watch all others, all further ones
    watch these and one neighbour, so that the store serves 9,000 beats per interval to 1,000 ranks.

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

    def __init__(self, *, timeout: float = 600.0, interval: float | None = None) -> None:
        _check_seconds("timeout", timeout)
        if interval is not None:
            _check_seconds("interval", interval)
            if interval > timeout / 3:
                raise ValueError(f"interval={interval:g} is more than a third of timeout={timeout:g}")
        self.timeout = float(timeout)
        self.interval = float(interval) if interval is not None else min(self.timeout / 10, 5.0)
        self._host, self._process = socket.gethostname(), this_process()
        self._rank, self._world_size = 0, 1
        self._step: int | None = None
        self._phases: list[tuple[str, float]] = [("train", self.timeout)]
        self._progress = count(1)
        self._state: dict[str, Any] = {"progress": 0, "step": None, "phase": "train", "limit": self.timeout}
        self._numbers = count(1)
        self._ending: dict[str, Any] = {"state": RUNNING}
        self._saw: dict[int, str] = {}
        self._left = threading.Event()  # set once the main thread has left the block
        self._found = threading.Event()  # set once there is a verdict; this process will exit
        self._exchange: Exchange | None = None
        self._judge: Judge | None = None
        self._thread: threading.Thread | None = None
        self._store_address = ""

    def __enter__(self) -> "Watchdog":
        if self._thread is not None:
            raise RuntimeError("this Watchdog was entered before; make another one")
        self._process = this_process()
        if is_distributed():
            self._rank, self._world_size = this_rank(), world_size()
        everyone = range(self._world_size)
        lookouts = everyone[:_LOOKOUTS]
        neighbour = (self._rank + 1) % self._world_size
        watched = everyone if self._rank in lookouts else sorted({*lookouts, self._rank, neighbour})
        self._judge = Judge(
            self._rank,
            watched,
            thorough=len(watched) == self._world_size,
            timeout=self.timeout,
            now=time.monotonic(),
            lookouts=lookouts,
        )
        if is_distributed():
            self._join(default_store(), watched)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            if self._found.is_set() and self._thread is not None:
                # The exception mostly says only that other ranks are gone. If it were raised, the process
                # would end with another exit code than the watchdog's: so show it, and wait for the end.
                self._show(error)
                self._thread.join()
            self._ending = {"state": FAILED, "error": f"{type(error).__name__}: {_first_line(error)}"}
            self._explain(error)
        else:
            self._ending = {"state": ENDED}
            if error is None:
                self._wait_for_the_others()
        self._left.set()
        if self._exchange is not None:
            self._exchange.close(min(self.timeout, 2.0))

    def step(self, step: int) -> None:
        """Report that the loop begins ``step``.

        Args:
            step: Number of the step; the same on all ranks for steps that belong together.

        Raises:
            TypeError: If the step is not an int.
        """
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"step must be an int, got {type(step).__name__}")
        self._step = step
        self._moved()

    @contextmanager
    def phase(self, name: str, *, timeout: float | None = None) -> Iterator[None]:
        """Name what the block does in reports, and give it another limit.

        While a rank is in a phase with a longer limit, the other ranks may wait for it that long.

        Args:
            name: Name of the phase, such as ``"save"``.
            timeout: Seconds without progress that are allowed inside; None keeps the limit from outside.

        Raises:
            ValueError: If the time is not positive.
        """
        if timeout is not None and timeout != math.inf:
            _check_seconds("timeout", timeout)
        self._phases.append((name, self._phases[-1][1] if timeout is None else float(timeout)))
        self._moved()
        try:
            yield
        finally:
            self._phases.pop()
            self._moved()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let the block take any time, as long as the process runs."""
        with self.phase("paused", timeout=math.inf):
            yield

    def _moved(self) -> None:
        """Count progress, and publish step, phase and limit."""
        phase, limit = self._phases[-1]
        # One assignment, so that other threads see either the old state or the new one.
        self._state = {"progress": next(self._progress), "step": self._step, "phase": phase, "limit": limit}
        if self._exchange is not None:
            self._exchange.poke()

    def _beat(self) -> Beat:
        """This rank's beat at this moment."""
        where, collective = place_of_main_thread()
        return Beat(
            rank=self._rank,
            host=self._host,
            process=self._process,
            number=next(self._numbers),
            where=where,
            collective=collective,
            saw=tuple(self._saw.items()),
            **self._state,
            **self._ending,
        )

    def _join(self, store: Any, watched: Sequence[int]) -> None:
        """Start to exchange beats."""
        self._store_address = address_of(store)
        self._exchange = Exchange(
            store,
            prefix=f"fsdp_sft/watchdog/{store.add(f'fsdp_sft/watchdogs-of-{self._rank}', 1)}/",
            rank=self._rank,
            watched=watched,
            beat=self._beat,
            interval=self.interval,
            timeout=self.timeout,
        )
        self._exchange.start()

    def _watch(self) -> None:
        """The thread: look at the ranks once per interval, until the loop has ended or there is a verdict."""
        ticked = time.monotonic()
        while not self._left.wait(self.interval):
            now = time.monotonic()
            # Woken far too late: this process was stopped or got no processor, and saw nobody meanwhile.
            if now - ticked > 3 * self.interval + 1 and self._judge is not None:
                self._judge.shift(now - ticked)
            ticked = now
            verdict = self._exchange.verdict if self._exchange is not None else ""
            verdict = verdict or self._look()
            if verdict:
                self._found.set()
                self._end(verdict)
                return

    def _look(self) -> str:
        """The report that ends the job, or "" if nothing is wrong."""
        assert self._judge is not None
        now = time.monotonic()
        answered = self._exchange.answered if self._exchange is not None else now
        beats = dict(self._exchange.beats) if self._exchange is not None else {}
        beats[self._rank] = self._beat()
        states = self._states(beats)
        finding = self._judge.look(beats, now=now, answered=answered, states=states)
        if finding is None:
            return ""
        if self._exchange is not None:
            self._exchange.refresh(self.interval)
            beats = {**self._exchange.beats, self._rank: beats[self._rank]}
        text = self._text(finding, beats, states, now)
        return self._exchange.propose(text, 2 * self.interval + 1) if self._exchange is not None else text

    def _states(self, beats: dict[int, Beat]) -> dict[int, str]:
        """State of each process that does not run, as far as this rank or another one can see."""
        own = {r: process_state(b.process) for r, b in beats.items() if b.state == RUNNING}
        self._saw = {r: state for r, state in own.items() if state in ("dead", "stopped")}
        # Left out are ranks that have left the loop: others may still report their processes as gone.
        ended = {r for r, b in beats.items() if b.state != RUNNING}
        told = {r: state for b in beats.values() for r, state in b.saw if not own.get(r) and r not in ended}
        return {**told, **self._saw}

    def _text(self, finding: Finding, beats: dict[int, Beat], states: dict[int, str], now: float) -> str:
        """The report about a finding, which mentions the store if that does not answer."""
        assert self._judge is not None
        report = Report(beats, self._judge.stamps, states, now=now, timeout=self.timeout)
        text = report.text(finding)
        exchange = self._exchange
        if exchange is not None and (exchange.error or now - exchange.answered > 3 * self.interval):
            store = f"the store{f' at {self._store_address}' if self._store_address else ''}"
            reason = f": {exchange.error}" if exchange.error else ""
            text += (
                f"\n  {store}, hosted by rank 0 or torchrun's agent, has not answered for "
                f"{now - exchange.answered:.0f} s{reason}; of the other ranks this is what was heard last"
            )
        return text

    def _end(self, verdict: str) -> None:
        """Announce the verdict, and end the process."""
        code = self._announce(verdict)
        # The store may live in this process, so wait until the others have fetched the verdict.
        self._left.wait(2 * self.interval + 1 if self._exchange is not None else 0)
        if self._left.is_set():
            return  # an exception has reached the main thread after all, and it says more than a report
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(1.0)  # the main thread may hold the stream's lock for ever
        os._exit(code)

    def _announce(self, verdict: str) -> int:
        """Write the report and the stack of the main thread; returns the exit code."""
        own = f"rank {self._rank} of {self._world_size} on {self._host}"
        frames = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frames)) if frames is not None else ""
        _write(f"[watchdog, {own}] {verdict}\n{own} was here:\n{stack}[watchdog, {own}] ")
        _write(f"exits with code {STALL_EXIT_CODE}\n")
        return STALL_EXIT_CODE

    def _show(self, error: Exception) -> None:
        """Write an exception that is not raised, since the process is about to end."""
        _write("".join(traceback.format_exception(error)))

    def _wait_for_the_others(self) -> None:
        """Wait at the end of the block until all ranks have left the loop."""
        if self._exchange is None:
            return
        self._exchange.leave()
        while self._exchange.verdict or not (
            self._exchange.num_left == self._world_size or self._exchange.error
        ):
            time.sleep(0.02)  # with a verdict, until the other thread ends the process

    def _explain(self, error: Exception) -> None:
        """Note on an exception which rank failed or died first: often it only says that a peer was lost."""
        if self._exchange is None or self._judge is None:
            return
        self._exchange.fail(min(self.interval, 2.0))
        deadline = time.monotonic() + min(3 * self.interval, 5.0)
        gone: dict[int, float] = {}  # ranks whose process has ended, and when this rank saw that
        while True:
            first = self._exchange.first_failed
            beats = {**self._exchange.beats, self._rank: self._beat()}
            told = beats if first is None else {**beats, first.rank: first}
            now = time.monotonic()
            gone = {r: gone.get(r, now) for r, state in self._states(told).items() if state == "dead"}
            # A rank that fails posts that before its process ends. So it died only if the store, queried
            # after its end, still has a running beat of it.
            answered = math.inf if self._exchange.error or now > deadline else self._exchange.answered
            dead = [r for r, seen in gone.items() if seen <= answered]
            # The rank that failed first may itself have lost a peer, and needs a moment to find out which.
            told_all = self._exchange.failed_for > _TO_FIND_OUT and not gone
            if dead or (first is not None and first.rank != self._rank and told_all) or now > deadline:
                break
            self._exchange.refresh(self.interval)
        for rank in dead:
            last = beats.get(rank)  # None if only another rank watches it
            where = f" on {last.host} died in step {last.step}, phase {last.phase}" if last else " died"
            error.add_note(f"watchdog: rank {rank}{where}")
        if not dead and first is not None and first.rank != self._rank:
            at = f"in step {first.step}, phase {first.phase}"
            error.add_note(f"watchdog: rank {first.rank} on {first.host} failed first, {at}: {first.error}")


def _check_seconds(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:200]


def _write(text: str) -> None:
    # Not through sys.stderr: the main thread may hang while it holds that stream's lock.
    try:
        os.write(2, text.encode(errors="replace"))
    except OSError:
        return


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
