"""One job makes a folder while others wait for it."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fsdp_sft._disk import sweep

_BEAT_SECONDS = 5.0
_DEAD_SECONDS = 60.0
_LOOK_SECONDS = 0.2


class Claim:
    """A claim on making one folder, kept alive by touching a file beside it.

    Only courtesy rests on it: should two jobs make the folder at once, the first rename wins.

    Args:
        target: The folder.
        is_there: Whether it is there and sound.
    """

    def __init__(self, target: Path, is_there: Callable[[Path], bool]) -> None:
        self.target, self._is_there = target, is_there
        self._file = target.with_name(f".claim-{target.name}")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._last_beat: tuple[int, float] | None = None

    def take_or_wait(self) -> bool:
        """True once this job is to make the folder, False once the folder is there."""
        while True:
            if self._is_there(self.target):
                return False
            if self._take():
                if not self._is_there(self.target):  # it may have come between
                    return True
                self.end()
                return False
            time.sleep(_LOOK_SECONDS)

    def end(self) -> None:
        """Let others have it."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._file.unlink(missing_ok=True)

    def _take(self) -> bool:
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
        while not self._stop.wait(_BEAT_SECONDS):
            try:
                os.utime(self._file)
            except OSError:
                return

    def _is_dead(self) -> bool:
        # By this process's clock, and by whether the file changes: clocks of other machines may be off.
        try:
            beat = self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        now = time.monotonic()
        if self._last_beat is None or self._last_beat[0] != beat:
            self._last_beat = (beat, now)
        return now - self._last_beat[1] > _DEAD_SECONDS
