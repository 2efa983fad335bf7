"""A claim on making a folder: one job makes it while the others wait."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fsdp_sft._disk import sweep

_BEAT_SECONDS = 5.0  # between two touches of the file
_DEAD_SECONDS = 60.0  # without a touch, after which the job that made the file counts as dead
_LOOK_SECONDS = 0.2  # between two looks of a job that waits


class Claim:
    """A claim on making one folder: a file beside it, which the job that has the claim touches regularly.

    The claim only saves work. If two jobs make the folder at once, nothing breaks: the first rename wins.

    Args:
        target: Folder to be made.
        is_there: Function that says whether the folder is there and sound.
    """

    def __init__(self, target: Path, is_there: Callable[[Path], bool]) -> None:
        self.target, self._is_there = target, is_there
        self._file = target.with_name(f".claim-{target.name}")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_beat: tuple[int, float] | None = None

    def take_or_wait(self) -> bool:
        """Wait until this job may make the folder (True) or the folder is there (False)."""
        while True:
            if self._is_there(self.target):
                return False
            if self._take():
                if not self._is_there(self.target):  # it may have appeared between the look and the claim
                    return True
                self.end()
                return False
            time.sleep(_LOOK_SECONDS)

    def end(self) -> None:
        """Give the claim up, if this job has it."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._file.unlink(missing_ok=True)

    def _take(self) -> bool:
        """Make the file, unless another job that is still alive has made it; whether it was made."""
        try:
            os.close(os.open(self._file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            if not self._is_dead():
                return False
            self._file.unlink(missing_ok=True)
            return self._take()
        sweep(self.target)
        self._thread = threading.Thread(target=self._beat, name="fsdp_sft-claim", daemon=True)
        self._thread.start()
        return True

    def _beat(self) -> None:
        """Touch the file until the claim ends."""
        while not self._stop.wait(_BEAT_SECONDS):
            try:
                os.utime(self._file)
            except OSError:
                return

    def _is_dead(self) -> bool:
        """Whether the job that made the file has not touched it for a minute."""
        # What counts is for how long this process has seen the same time stamp, by its own clock. The time
        # stamp itself is by the clock of another machine, which may be wrong.
        try:
            beat = self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        now = time.monotonic()
        if self._last_beat is None or self._last_beat[0] != beat:
            self._last_beat = (beat, now)
        return now - self._last_beat[1] > _DEAD_SECONDS
