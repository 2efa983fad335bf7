"""What several workers of pytest need is made by the first that asks."""

import fcntl
import os
import pickle
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[], T]) -> T:
    """What ``make`` returns, which must be picklable: made here, or by another worker of this run."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return make()
    made = factory.getbasetemp().parent / f"{name}-{run}"
    with open(made.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            made.write_bytes(pickle.dumps(make()))
        return pickle.loads(made.read_bytes())  # type: ignore[no-any-return]
