"""Turn signals that end a job early into one decision of all ranks between two steps."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from fsdp_sft._ranks.agree import all_gather_objects

_T = TypeVar("_T")

REQUEUE_EXIT_CODE = 85
"""Exit code for a job that has saved and is to be requeued; no shell or scheduler uses it itself."""


class PreemptionGuard:
    """Notes SIGTERM and SIGUSR1 while a loop runs; ``should_stop`` becomes True on all ranks at one step.

    A scheduler may signal one process or all, at different moments. A rank that stopped by itself would leave
    the others waiting in their next collective, so ranks ask each other between two steps.

    A DataLoader's worker processes must survive such a signal, which a scheduler sends to them as well:
    ``windows`` and ``evaluate`` ensure that for the workers that they start inside the block. A loop without
    them iterates over ``keep_workers_alive(loader)``.

    When the block ends, the previous signal handlers are restored, without being called for a noted signal;
    only an outer guard learns of it. SIGKILL cannot be caught: schedulers send it some time after SIGTERM,
    torchrun after 30 s.

    Args:
        signals: Signals to note. torchrun forwards SIGTERM and SIGINT to its workers by default, and SIGUSR1
            only with ``--signals-to-handle=SIGTERM,SIGINT,SIGUSR1``.

    Attributes:
        signal: The signal that made ``should_stop`` True, here or in a guard inside this one, the same on all
            ranks; None before that.

    Raises:
        OSError: On entering, for a signal that cannot be caught.
        ValueError: On entering outside the main thread, which alone may set handlers.

    Example:
        >>> with fs.PreemptionGuard() as guard:
        ...     for step, one in enumerate(fs.windows(loader, 2), start=1):
        ...         result = fs.train_step(model, one, optimizer)
        ...         if guard.should_stop():
        ...             fs.save_checkpoint("ckpt", step, model=model, optimizer=optimizer)
        ...             raise SystemExit(fs.REQUEUE_EXIT_CODE)
    """

    def __init__(self, *, signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        self._signals = [signal.Signals(number) for number in signals]
        self._before: dict[signal.Signals, Any] = {}
        self._noted = 0
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "PreemptionGuard":
        self._before = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
            if outer := _guard_of(handler):
                outer._noted = outer._noted or self._noted
                outer.signal = outer.signal or self.signal  # all ranks have agreed on it already
        self._before.clear()

    def should_stop(self) -> bool:
        """Whether any rank has received a signal by now; once True, always True.

        Collective: all ranks, between two steps. One small all-reduce on the host.

        Raises:
            RuntimeError: Outside the guard's block, in which it would never be True.
        """
        if not (self._before or self.signal):
            raise RuntimeError(
                "a PreemptionGuard notes signals within its block: `with PreemptionGuard() as guard:`"
            )
        if self.signal is None:
            number = max(all_gather_objects(self._noted))
            self.signal = signal.Signals(number) if number else None
        return self.signal is not None

    def _note(self, number: int, frame: Any) -> None:
        """The signal handler: it only notes the signal."""
        self._noted = number


def _guard_of(handler: Any) -> PreemptionGuard | None:
    guard = getattr(handler, "__self__", None)
    return guard if isinstance(guard, PreemptionGuard) else None


def keep_workers_alive(loader: Iterable[_T]) -> Iterator[_T]:
    """``iter(loader)``, whose worker processes survive the signals of the active guards.

    Slurm signals every process of a job. A worker would die of SIGTERM, torch would raise in the main process
    because of that, and nothing would be saved. Here workers start with those signals blocked, and end only
    on a signal from the main process. Nothing changes without an active ``PreemptionGuard``, without workers,
    or on macOS, where a process cannot learn who sent a signal.

    Args:
        loader: A ``DataLoader``, whose ``worker_init_fn`` is called as usual, or any other iterable.

    Example:
        >>> with fs.PreemptionGuard() as guard:
        ...     for batch in fs.keep_workers_alive(loader):
        ...         result = fs.train_step(model, [batch], optimizer)
    """
    guarded: set[int] = {number for number in signal.valid_signals() if _guard_of(signal.getsignal(number))}
    if not (
        guarded
        and getattr(loader, "num_workers", 0) > 0
        and hasattr(loader, "worker_init_fn")
        and hasattr(signal, "sigwaitinfo")
    ):
        return iter(loader)
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing.get_context()
    if context.get_start_method() != "fork":
        # Starting the tracker unblocks SIGTERM in this process, so it must run before signals are blocked.
        resource_tracker.ensure_running()
    inner = loader.worker_init_fn
    loader.worker_init_fn = partial(_outlive, guarded, inner)  # can be pickled for spawned workers
    before = signal.pthread_sigmask(signal.SIG_BLOCK, guarded)  # every thread of a worker inherits the mask
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        loader.worker_init_fn = inner


def _outlive(guarded: set[int], then: Callable[[int], Any] | None, worker_id: int) -> None:
    """A ``worker_init_fn`` for workers that start with the guarded signals blocked."""
    threading.Thread(target=_end_with_main, args=(guarded,), daemon=True).start()
    if then is not None:
        then(worker_id)


def _end_with_main(guarded: set[int]) -> None:
    """Wait for the guarded signals, and end this worker at the first that the main process sends."""
    main = multiprocessing.parent_process()
    while main is not None and signal.sigwaitinfo(guarded).si_pid != main.pid:
        pass
    os._exit(0)
