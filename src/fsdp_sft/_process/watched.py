"""A limit on the time and memory of pure Python code, such as a template's loops.

A thread looks at the code that runs, and raises an error in its thread. It can do so between two operations
of Python only, not within one.
"""

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_PERIOD_SECONDS = 0.1
_IDLE_SECONDS = 1.0  # then the thread ends
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class OverLimitError(Exception):
    """Code takes longer, or more memory, than it may."""


@dataclass(eq=False)
class _WatchedCode:
    """Code that runs: its thread, when it began, and the memory of the process then."""

    thread: int
    seconds: float
    grown_bytes: int
    started: float
    resident: int | None = None  # looked up when it has run for a while
    is_over: bool = False


_lock = threading.Lock()
_runs: set[_WatchedCode] = set()
_watcher: threading.Event | None = None  # wakes the thread that looks; None if there is none


def _begin_anew() -> None:
    """In a forked process: its parent's thread is not there, and may have held the lock."""
    global _lock, _watcher
    _lock, _watcher = threading.Lock(), None
    _runs.clear()


os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def watched(seconds: float, grown_bytes: int) -> Iterator[None]:
    """Raise ``OverLimitError`` in the block if it takes longer, or the process grows by more.

    Args:
        seconds: Limit of the time, of the clock.
        grown_bytes: Limit of the growth of the process's memory meanwhile, whatever thread takes it.

    Raises:
        OverLimitError: At a limit.
    """
    run = _WatchedCode(threading.get_ident(), seconds, grown_bytes, time.monotonic())
    with _lock:
        _runs.add(run)
        _awake().set()
    try:
        yield
    finally:
        with _lock:
            _runs.discard(run)
            if run.is_over:  # raised already, or else it would be in code that is not watched
                _raise_in(run.thread, None)


def _awake() -> threading.Event:
    """The event that wakes the thread that looks, which is started if there is none."""
    global _watcher
    if _watcher is None:
        _watcher = threading.Event()
        threading.Thread(target=_watch, args=(_watcher,), name="watched", daemon=True).start()
    return _watcher


def _watch(wake: threading.Event) -> None:
    global _watcher
    while True:
        in_use = wake.wait(_IDLE_SECONDS)
        time.sleep(_PERIOD_SECONDS if in_use else 0)
        with _lock:
            if not in_use and not _runs:
                _watcher = None
                return
            if not _runs:
                wake.clear()
            for run in _runs:
                if not run.is_over and _is_over(run):
                    run.is_over = True
                    _raise_in(run.thread, OverLimitError)


def _is_over(run: _WatchedCode) -> bool:
    seconds = time.monotonic() - run.started
    if seconds < _PERIOD_SECONDS:
        return False
    resident = _resident_bytes()
    run.resident = resident if run.resident is None else run.resident
    return seconds > run.seconds or resident - run.resident > run.grown_bytes


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    """Raise an error in a thread at its next operation; None takes back one that is not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error and ctypes.py_object(error))
