"""Every load of these tests is into memory that holds NaN."""

from pathlib import Path

import pytest

from tests.harness.hf_folders import save_tiny


@pytest.fixture(autouse=True)
def into_memory_that_is_nan(fresh_memory_is_nan: None) -> None:
    """For every test of the folder."""


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a tiny Llama, or with what a test asks ``save_tiny`` for by a parameter."""
    return save_tiny(tmp_path / "saved", **getattr(request, "param", {}))
