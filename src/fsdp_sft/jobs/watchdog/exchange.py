"""Heartbeats through the store, in a separate thread: a store that does not answer blocks no other thread."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from fsdp_sft.jobs.watchdog.beat import Beat

_FEW = 32  # missing ranks that are asked for one by one at each look
_SHORTEST_PAUSE = 0.05  # seconds between two posts, however short the steps are
_LEAVING_SECONDS = 0.2


class Exchange:
    """Posts this rank's beat and fetches those of others, once per interval; posts what is new in between.

    Args:
        store: Any c10d store of the job. The exchange opens another connection, since calls of one client
            wait for each other.
        prefix: Prefix of all keys; the same on all ranks.
        rank: This rank.
        watched: Ranks whose beats are fetched.
        beat: Function that makes this rank's beat; called in the exchange's thread.
        interval: Seconds between two exchanges.
        timeout: Seconds that the store may take to answer.

    Attributes:
        beats: The latest beat of each watched rank that has begun.
        answered: Time in ``time.monotonic()`` at which the last completed exchange began.
        verdict: The report that the job ends with, the same on all ranks that reach the store; "" so far.
        first_failed: The last beat of the rank that failed first; None until this rank has asked.
        failed_for: Seconds since that exception, as far as the machines' clocks agree.
        num_left: Number of ranks that have left the loop; counted once this rank has left it.
        error: The store's last error message; "" if it has answered since.
    """

    def __init__(
        self,
        store: Any,
        *,
        prefix: str,
        rank: int,
        watched: Sequence[int],
        beat: Callable[[], Beat],
        interval: float,
        timeout: float,
    ) -> None:
        self._given: Any = store
        self._store: Any = None
        self._timeout = timedelta(seconds=max(timeout, 1.0))
        self._prefix, self._rank, self._beat, self._interval = prefix, rank, beat, interval
        self._missing, self._present = set(watched), set[int]()
        self._wake = threading.Event()
        self._proposed, self._decided = "", threading.Event()
        self._has_failed = self._wants_to_leave = self._hurry = self._closing = False
        self._closed_at = 0.0
        self._num_left = 0
        self._looks = 0
        self.beats: dict[int, Beat] = {}
        self.answered = time.monotonic()
        self.verdict = ""
        self.first_failed: Beat | None = None
        self.failed_for = 0.0
        self.num_left = 0
        self.error = ""
        self._thread = threading.Thread(target=self._run, name="watchdog-store", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def poke(self) -> None:
        """Post this rank's beat soon, since it has changed."""
        self._wake.set()

    def leave(self) -> None:
        """Count this rank as having left the loop; from now on ``num_left`` says how many have."""
        self._wants_to_leave = self._hurry = True
        self._wake.set()

    def propose(self, text: str, seconds: float) -> str:
        """Propose a verdict; return that of the first rank to propose one, or ``text`` without a store."""
        self._proposed, self._hurry = text, True
        self._wake.set()
        self._decided.wait(seconds)
        return self.verdict or text

    def fail(self, seconds: float) -> None:
        """Ask which rank failed first, which is this one if none has asked, and exchange at once."""
        self._has_failed = self._wants_to_leave = True
        self.refresh(seconds)

    def refresh(self, seconds: float) -> None:
        """Exchange at once, and wait at most ``seconds`` for it."""
        asked, self._hurry = time.monotonic(), True
        self._wake.set()
        while self.answered < asked and time.monotonic() - asked < seconds and self._thread.is_alive():
            time.sleep(0.01)

    def close(self, seconds: float) -> None:
        """Post the last beat and stop the thread, or give up after ``seconds``."""
        self._closed_at = time.monotonic()
        self._closing = self._wants_to_leave = True
        self._wake.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        """The thread: exchange once per interval, and post news in between."""
        due = 0.0
        while not (self._closing and self.answered >= self._closed_at):
            self._wake.wait(max(due - time.monotonic(), 0.0))
            self._wake.clear()
            asked = time.monotonic()
            full = self._hurry or self._closing or asked >= due
            self._hurry = False
            try:
                has_failed = self._has_failed  # asked before the beat is made, which then says so too
                self._post()
                if full:
                    self._fetch(has_failed)
                    self.answered, self.error = asked, ""
            except RuntimeError as error:  # errors of torch's stores are DistErrors, which are RuntimeErrors
                self.error = str(error).split("\n", 1)[0]
                if self._closing:
                    return
            if full:
                due = asked + (_LEAVING_SECONDS if self._wants_to_leave else self._interval)
            time.sleep(_SHORTEST_PAUSE)

    def _post(self) -> None:
        """Post this rank's beat."""
        if self._store is None:
            self._store = self._given.clone()
            self._store.set_timeout(self._timeout)
        self._store.set(self._key(self._rank), self._beat().to_bytes())

    def _fetch(self, has_failed: bool) -> None:
        """Fetch beats, the verdict, and what was asked about ranks that failed or left."""
        self._find_new()
        ranks = sorted(self._present)
        values = self._store.multi_get([self._key(rank) for rank in ranks]) if ranks else []
        self.beats = dict(zip(ranks, map(Beat.from_bytes, values), strict=True))
        if has_failed:
            own = f"{self._rank} {time.time()}"
            rank, when = self._store.compare_set(self._prefix + "first_failed", "", own).decode().split()
            # Fetched each time, since that rank may have found out more.
            self.first_failed = Beat.from_bytes(self._store.get(self._key(int(rank))))
            self.failed_for = time.time() - float(when)
        key = self._prefix + "verdict"
        if self._proposed and not self.verdict:
            self.verdict = self._store.compare_set(key, "", self._proposed).decode()
        # This rank counts itself out after it has proposed a verdict and before it asks for one. So a rank
        # that finds all others gone also finds any verdict that they have proposed.
        if self._wants_to_leave:
            self._num_left = int(self._store.add(self._prefix + "left", 0 if self._num_left else 1))
        if not self.verdict and self._store.check([key]):
            self.verdict = self._store.get(key).decode()
        self.num_left = self._num_left
        if self.verdict:
            self._decided.set()

    def _find_new(self) -> None:
        """Find watched ranks that have posted their first beat."""
        # One query tells whether all missing ranks are there. They are queried one by one only if they are
        # few, or at every fourth look: at the start of a large job most are missing.
        self._looks += 1
        if not self._missing:
            return
        if self._store.check([self._key(rank) for rank in self._missing]):
            found = set(self._missing)
        elif len(self._missing) <= _FEW or self._looks % 4 == 1:
            found = {rank for rank in self._missing if self._store.check([self._key(rank)])}
        else:
            found = set()
        self._present |= found
        self._missing -= found

    def _key(self, rank: int) -> str:
        return f"{self._prefix}beat/{rank}"


def address_of(store: Any) -> str:
    """``"host:port"`` of a TCPStore inside any number of PrefixStores; "" for another kind of store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", ""), getattr(store, "port", "")
    return f"{host}:{port}" if host else ""
