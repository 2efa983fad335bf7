"""Signals that end a job early, turned into one decision of all ranks at a step boundary."""

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from fsdp_sft._agree import all_reduce_max

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
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
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
