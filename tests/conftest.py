"""Before any test module is imported."""

import os
from collections.abc import Iterator

import pytest

# Two workers of pytest and their ranks share the cores: threads of one would only wait for those of another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's store asks for the names of the addresses that connect to it; without a name server that takes 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(autouse=True)
def settings_stay() -> Iterator[None]:
    """A test leaves the settings of its process as it found them, for the tests after it."""
    from tests.harness.leftovers import changes, settings

    before = settings()
    before.pop("warnings")  # whose filters pytest puts back itself
    yield
    after = settings()
    found = {name: (before[name], after[name]) for name in changes(before, after)}
    if "environment" in found:  # of which only what differs is for other eyes
        old, new = (set(variables.items()) for variables in found["environment"])
        found["environment"] = old - new, new - old
    assert not found, f"changed for the tests that follow: {found}"


@pytest.fixture
def fresh_memory_is_nan() -> Iterator[None]:
    """Memory that nobody has written to holds NaN, here and in the ranks that are started."""
    from tests.harness.poison import poisoned

    with poisoned():
        yield
