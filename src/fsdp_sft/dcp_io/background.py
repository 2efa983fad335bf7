"""One save at a time in a thread, whose error is raised by the next one that asks."""

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable

import torch.distributed as dist

from fsdp_sft._agree import agreeing_over


class BackgroundSave:
    """A save that goes on in a thread.

    The thread is not a daemon: a program that ends waits for it.

    Args:
        work: The save. Its collectives go over ``group``.
        group: A group that nothing else uses while the thread runs; None in a single process.
    """

    def __init__(self, work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
        self._work, self._group = work, group
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fsdp_sft-save")

    def start(self) -> None:
        """Begin."""
        global _last
        _last = self
        self._thread.start()

    def join(self) -> None:
        """Return when the save has ended, well or not."""
        self._thread.join()

    def wait(self) -> None:
        """Return when the save is committed; raise its error, once."""
        global _last
        self.join()
        if _last is self:
            _last = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error that nobody has seen."""
        return self._error is not None and not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with agreeing_over(self._group):
                self._work()
        except BaseException as error:
            self._error = error
        finally:
            del self._work  # it holds the model

    def report(self) -> None:
        """Print the error."""
        print("fsdp_sft: the last asynchronous save failed; the step before it stands.", file=sys.stderr)
        traceback.print_exception(self._error)


_last: BackgroundSave | None = None


def wait_for_last() -> None:
    """Return when no save is under way; raise the error of the last one if nobody has seen it."""
    if _last is not None:
        _last.wait()


def join_last() -> None:
    """Return when no save is under way; its error stays for ``wait_for_last``."""
    if _last is not None:
        _last.join()


@atexit.register
def _say_so_at_exit() -> None:
    """A program whose last save failed does not end as if nothing had happened."""
    if _last is not None and _last.failed:
        _last.report()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exit handler cannot change the exit code in another way
