"""What ends the checks before their end: a rank that hangs or dies, or a launcher that ends the job."""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fsdp_sft.jobs.watchdog import Watchdog
from fsdp_sft.jobs.watchdog.report import standing_out

_TO_HEAR = 10.0  # seconds in which ranks hear of an error by themselves
_TOLD_TO_END = 8.0  # seconds from a launcher's SIGTERM to the end, in which a lost rank is found and named
WRONG = 1


class CheckWatchdog(Watchdog):
    """A watchdog that ends the checks with their table on rank 0, and not with a stack from each rank.

    Args:
        report: Prints what is known; called with why the checks end.
        told: What a rank has raised and others do not know yet; "" without.
        timeout: As for ``Watchdog``.
    """

    def __init__(self, report: Callable[[str], None], told: Callable[[], str], *, timeout: float) -> None:
        super().__init__(timeout=timeout, interval=1.0)
        self._report, self._told = report, told
        self._told_since = math.inf

    def _look(self) -> str:
        """As for ``Watchdog``; also if a rank has raised and the others wait where they do not hear of it."""
        told = self._told()
        self._told_since = min(self._told_since, time.monotonic()) if told else math.inf
        return told if time.monotonic() - self._told_since > _TO_HEAR else super()._look()

    def _announce(self, verdict: str) -> int:
        odd = standing_out(verdict)
        if self._rank in odd:
            super()._announce(verdict)  # with the place at which it stands
        # What the others do is no news: they wait.
        self._report("; ".join(odd.values()) or verdict.splitlines()[0])
        return WRONG

    def _show(self, error: Exception) -> None:
        """Nothing: which rank was lost is in the table, and others need no traceback each."""


@contextmanager
def ended_with_words(report: Callable[[str], None]) -> Iterator[None]:
    """Context in which SIGTERM and SIGINT end the process with ``report``.

    A launcher sends SIGTERM when a rank has died: the checks get some seconds to find out which. ``report``
    is called in a thread, since the main thread may wait in a collective for a rank that is gone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return
    done = threading.Event()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def watch() -> None:
        while came := ours.recv(1):  # one byte for each signal that Python handles
            if came[0] == signal.SIGINT:
                report("interrupted (SIGINT)")
                os._exit(128 + signal.SIGINT)
            if came[0] == signal.SIGTERM and not done.wait(_TOLD_TO_END):
                report("the launcher has ended the job (SIGTERM): it was cancelled, or another rank has died")
                os._exit(WRONG)

    # A shell starts what runs in the background with SIGINT ignored.
    heard = [one for one in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(one) is not signal.SIG_IGN]
    before: Any = {one: signal.signal(one, lambda *_: None) for one in heard}
    fd_before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=watch, name="fsdp_sft-check", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(fd_before)
        for one, handler in before.items():
            signal.signal(one, handler)
        theirs.close()  # the thread reads the end of it
