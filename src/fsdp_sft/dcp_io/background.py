"""Saving in a thread, one save at a time. The next call that waits for the save raises its error."""

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable

import torch.distributed as dist

from fsdp_sft._ranks.agree import agreeing_over


class BackgroundSave:
    """A save that runs in a thread.

    The thread is not a daemon, so a program that ends waits for it.

    Args:
        work: Function that saves. Its collectives use ``group``.
        group: Process group that nothing else uses while the thread runs; None in a single process.

    Attributes:
        error: Error with which the save has ended, until it is raised; None if there is none.
    """

    def __init__(self, work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
        self._work, self._group = work, group
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fsdp_sft-save")

    def start(self) -> None:
        """Start the thread."""
        global _last
        _last = self
        self._thread.start()

    def join(self) -> None:
        """Return when the save has ended, successfully or not."""
        self._thread.join()

    def wait(self) -> None:
        """Return when the save is committed; raise its error if it has one, but only once."""
        global _last
        self.join()
        if _last is self:
            _last = None
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        """Save, and keep an error for whoever waits for the save."""
        try:
            with agreeing_over(self._group):
                self._work()
        except BaseException as error:
            self.error = error
        finally:
            del self._work  # it refers to the model, which could then not be freed
            self._group = None  # gloo's threads end with it, for which the end of the program is too late


_last: BackgroundSave | None = None


def wait_for_last() -> None:
    """Return when no save is running; raise the error of the last one unless it has been raised already."""
    if _last is not None:
        _last.wait()


def join_last() -> None:
    """Return when no save is running; an error of the last one is kept for ``wait_for_last``."""
    if _last is not None:
        _last.join()


@atexit.register
def _say_so_at_exit() -> None:
    """Print the error of a last save that failed, and end the program with exit code 1."""
    if _last is not None and _last.error is not None:
        print("fsdp_sft: the last asynchronous save failed; the step before it stands.", file=sys.stderr)
        traceback.print_exception(_last.error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the only way in which an exit handler can change the exit code
