"""Anonymous memory of this process: what its allocations take, without files that are mapped."""

import threading
from pathlib import Path


def anonymous_bytes() -> int:
    """RssAnon of this process, which only Linux tells."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("needs /proc/self/status with RssAnon")


class PeakMemory:
    """The largest anonymous memory in a block, sampled in a thread.

    Attributes:
        peak: In bytes, so far.
    """

    def __init__(self, seconds_between: float = 0.002) -> None:
        self._seconds_between = seconds_between

    def __enter__(self) -> "PeakMemory":
        self._base = self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())

    @property
    def grown(self) -> int:
        """Bytes of the peak over the start."""
        return self.peak - self._base

    def _sample(self) -> None:
        while not self._stop.wait(self._seconds_between):
            self.peak = max(self.peak, anonymous_bytes())
