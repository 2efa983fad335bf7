"""Every load of these tests is into memory that holds NaN."""

import pytest


@pytest.fixture(autouse=True)
def into_memory_that_is_nan(fresh_memory_is_nan: None) -> None:
    """For every test of the folder."""
