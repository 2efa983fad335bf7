"""Every load of these tests is into memory that holds NaN."""

from collections.abc import Iterator

import pytest

from tests.harness.poison import poisoned


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    with poisoned():
        yield
