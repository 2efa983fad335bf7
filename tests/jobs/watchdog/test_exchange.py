"""What goes through the store: pulses all the time, beats when there is something new in them."""

import math
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from fsdp_sft._process.identity import this_process
from fsdp_sft.jobs.watchdog.beat import ENDED, Beat
from fsdp_sft.jobs.watchdog.exchange import Exchange


class _Store:
    """A store in memory that counts what is fetched from it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.bytes = 0

    def clone(self) -> "_Store":
        return self

    def set_timeout(self, _: Any) -> None:
        """Nothing takes time here."""

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.fetched += keys
        found = [self.values[key] for key in keys]
        self.bytes += sum(len(key) + len(value) for key, value in zip(keys, found, strict=True))
        return found

    def add(self, key: str, number: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + number).encode()
        return int(self.values[key])

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        return self.values.setdefault(key, wanted.encode())


def _ranks(number: int, store: _Store) -> tuple[list[Beat], list[Exchange]]:
    beats = [
        Beat(rank, f"host{rank // 8}", this_process(), limit=60.0, where="train.py:3 in main")
        for rank in range(number)
    ]

    def exchange(rank: int, watched: range) -> Exchange:
        return Exchange(
            store,
            prefix="w/",
            rank=rank,
            watched=watched,
            beat=lambda: beats[rank],
            interval=1.0,
            timeout=10.0,
        )

    return beats, [exchange(rank, range(number) if rank == 0 else range(1)) for rank in range(number)]


def _step(beats: list[Beat], exchanges: list[Exchange], step: int, **changed: Any) -> None:
    for rank, exchange in enumerate(exchanges):
        new = {"number": step + 1, "progress": step, "step": step, "where": f"train.py:{step} in main"}
        beats[rank] = replace(beats[rank], **new, **changed)
        exchange._post(full=True)


def _watched(number: int, *steps: int) -> tuple[_Store, list[Beat], list[Exchange]]:
    """Ranks of which the first has looked at all after each of the steps."""
    store = _Store()
    beats, exchanges = _ranks(number, store)
    for step in steps:
        _step(beats, exchanges, step)
        exchanges[0]._fetch()
    return store, beats, exchanges


def test_what_does_not_change_is_fetched_once() -> None:
    store, beats, exchanges = _watched(40, 1)
    lookout = exchanges[0]
    assert lookout.beats == dict(enumerate(beats))
    store.fetched.clear()
    for step in (2, 3):
        _step(beats, exchanges, step)
        lookout._fetch()
    assert {key.split("/")[1] for key in store.fetched} == {"pulse"}
    assert len(store.fetched) == 2 * 40
    known = [replace(beat, where="train.py:1 in main") for beat in beats]  # a place is no matter yet
    assert lookout.beats == dict(enumerate(known))


def test_what_is_new_is_fetched_at_the_next_look() -> None:
    store, beats, exchanges = _watched(5, 1)
    lookout = exchanges[0]
    changes: list[dict[str, Any]] = [
        {"state": ENDED},
        {"limit": math.inf, "phase": "save"},
        {"shapes": ((2, (8, 128)),)},
        {"saw": ((4, "dead"),)},
        {"ticket": 1, "error": "ValueError: no"},
    ]
    for change in changes:
        beats[3] = replace(beats[3], number=beats[3].number + 1, **change)
        exchanges[3]._post(full=False)  # as after a poke
        store.fetched.clear()
        lookout._fetch()
        assert lookout.beats[3] == beats[3]
        assert [key for key in store.fetched if "beat" in key] == ["w/beat/3"]


def test_places_are_fetched_for_a_report() -> None:
    _, beats, exchanges = _watched(5, 1, 2)
    lookout = exchanges[0]
    assert lookout.beats[4].where == "train.py:1 in main"
    lookout._wants_details = True
    lookout._fetch()
    assert lookout.beats == dict(enumerate(beats))


def test_a_pulse_that_is_older_than_the_beat_takes_nothing_back() -> None:
    store = _Store()
    beats, exchanges = _ranks(2, store)
    _step(beats, exchanges, 1)
    old = store.values["w/pulse/1"]
    _step(beats, exchanges, 2, phase="save")
    store.values["w/pulse/1"] = old[:24] + store.values["w/pulse/1"][24:]  # of version 2, as it was before
    exchanges[0]._fetch()
    assert exchanges[0].beats[1] == beats[1]


@pytest.mark.parametrize("number", [100, 1000])
def test_a_look_costs_tens_of_bytes_for_a_rank(number: int) -> None:
    store = _Store()
    beats, exchanges = _ranks(number, store)
    for step in (1, 2):
        _step(beats, exchanges, step)
        store.bytes = 0
        exchanges[0]._fetch()
    assert store.bytes < 50 * number
    store.bytes = 0
    exchanges[-1]._fetch()
    exchanges[-1]._fetch()
    assert store.bytes < 1000, "what one that is no lookout fetches is the same in any job"


def test_details_do_not_wait_for_a_store_that_is_mute() -> None:
    speaks = threading.Event()

    class Mute(_Store):
        def multi_get(self, keys: list[str]) -> list[bytes]:
            speaks.wait(30)
            return super().multi_get(keys)

    _, (own, _) = _ranks(2, Mute())
    own.start()
    before = time.monotonic()
    own.fetch_details(0.3)
    assert time.monotonic() - before < 1
    speaks.set()
    own.close(5)
    assert not own._thread.is_alive()
