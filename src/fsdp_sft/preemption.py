"""Signals that end a job early, turned into one decision of all ranks at a step boundary."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, TypeVar

from fsdp_sft._agree import all_reduce_max

_T = TypeVar("_T")
_guarded: list[signal.Signals] = []  # what the active guards of this process note

REQUEUE_EXIT_CODE = 85
"""To exit with after saving, so that a job script knows to requeue; no shell or scheduler uses it itself."""


class PreemptionGuard:
    """Notes SIGTERM and SIGUSR1 while a loop runs; ``should_stop`` tells all ranks of it at the same step.

    A scheduler may signal one process or all, at different moments. A rank that stopped by itself would leave
    the others in their next collective, so ranks ask each other between two steps::

        with fs.PreemptionGuard() as guard:
            for step, window in enumerate(fs.windows(loader, 8), start=1):
                fs.train_step(model, window, optimizer)
                if guard.should_stop():
                    fs.save_checkpoint("ckpt", step, model=model, optimizer=optimizer)
                    raise SystemExit(fs.REQUEUE_EXIT_CODE)

    A DataLoader's worker processes must outlive such a signal, which a scheduler sends to them too:
    ``windows`` and ``evaluate`` see to that for the workers they start inside the block. A loop without them
    iterates over ``keep_workers_alive(loader)``.

    The handlers that were there before come back when the block ends; a signal that came in is not passed on
    to them. A guard inside another one tells the outer one. SIGKILL cannot be caught: schedulers send it some
    time after SIGTERM, torchrun after 30 s.

    Args:
        signals: What to note. torchrun forwards SIGTERM and SIGINT to its workers by itself, and SIGUSR1 only
            with ``--signals-to-handle=SIGTERM,SIGINT,SIGUSR1``.

    Attributes:
        signal: The signal that made ``should_stop`` True, here or in a guard inside this one, the same on all
            ranks; None before that.

    Raises:
        ValueError: For no signals, or one that cannot be caught.
        RuntimeError: On entering outside the main thread, which alone may set handlers, or twice.
    """

    def __init__(self, *, signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        self._signals = [signal.Signals(number) for number in signals]
        if not self._signals:
            raise ValueError("signals must name at least one signal, such as signal.SIGTERM")
        for number in self._signals:
            if number in (signal.SIGKILL, signal.SIGSTOP):
                raise ValueError(f"{number.name} cannot be caught; schedulers send SIGTERM or SIGUSR1 first")
        self._before: dict[signal.Signals, Any] = {}
        self._noted = 0
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "PreemptionGuard":
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("a PreemptionGuard sets signal handlers, which only the main thread may")
        if self._before:
            raise RuntimeError("this PreemptionGuard is active already; make another one")
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)
        _guarded.extend(self._signals)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
            _guarded.remove(number)
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, PreemptionGuard):
                outer._noted = outer._noted or self._noted
                outer.signal = outer.signal or self.signal  # which all ranks know already
        self._before.clear()

    def should_stop(self) -> bool:
        """Whether any rank has been signalled by now; once True, always True.

        Collective: all ranks, between two steps. One small all-reduce on the host.
        """
        if self.signal is None:
            number = all_reduce_max(self._noted)
            self.signal = signal.Signals(number) if number else None
        return self.signal is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number


def keep_workers_alive(loader: Iterable[_T]) -> Iterator[_T]:
    """``iter(loader)``, whose worker processes outlive the signals of the active guards.

    Slurm signals every process of a job. A worker dies of SIGTERM, torch raises in the main process because
    one did, and there is no time left to save. Here workers start with those signals blocked, and end only
    with one that the main process sends. Nothing changes without an active ``PreemptionGuard``, without
    workers, or on macOS, where a process cannot learn who sent a signal.

    Args:
        loader: A ``DataLoader``, whose ``worker_init_fn`` is called as ever, or any other iterable.
    """
    guarded = set(_guarded) if hasattr(signal, "sigwaitinfo") else set()
    if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn") or not guarded:
        return iter(loader)
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing.get_context()
    if context.get_start_method() != "fork":
        resource_tracker.ensure_running()  # which unblocks SIGTERM when it starts
    inner = loader.worker_init_fn
    loader.worker_init_fn = _Outlive(tuple(guarded), inner)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, guarded)  # every thread of a worker inherits that
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        loader.worker_init_fn = inner


@dataclass(frozen=True)
class _Outlive:
    """A ``worker_init_fn``; a class, since workers that are spawned get it pickled."""

    signals: tuple[signal.Signals, ...]
    then: Callable[[int], Any] | None

    def __call__(self, worker_id: int) -> None:
        threading.Thread(target=self._end_with_main, daemon=True).start()
        if self.then is not None:
            self.then(worker_id)

    def _end_with_main(self) -> None:
        main = multiprocessing.parent_process()
        while main is not None and signal.sigwaitinfo(self.signals).si_pid != main.pid:
            pass
        os._exit(0)
