"""What is said of devices, their memory and driver, and what cannot be read."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_sft import check
from fsdp_sft.check import GIB, memory_of_device


def _rank(free: float = 79.5, **other: Any) -> dict[str, Any]:
    facts = {"torch": "2", "transformers": "5", "device": "H100"}
    memory = (int(free * GIB), 80 * GIB)
    return {"facts": facts, "memory": memory, **other}


@pytest.mark.parametrize(
    ("odd", "level", "says"),
    [
        ({"free": 70.0}, "warn", "70.0 of 80.0 GiB"),
        ({"free": 20.0}, "fail", "20.0 of 80.0 GiB"),
    ],
)
def test_the_device_that_is_not_well_is_named(odd: dict[str, Any], level: str, says: str) -> None:
    _, (problem,) = check._compare([_rank(), _rank(**odd), _rank()])
    assert (problem.level, problem.ranks, problem.exclude) == (level, (1,), True)
    assert says in problem.text


def test_healthy_devices_and_what_cannot_be_read() -> None:
    assert check._compare([_rank(), _rank()])[1] == []
    said, problems = check._compare([_rank(memory=None)])
    assert problems == []
    assert "GiB" not in said
    assert memory_of_device(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12", "535.183.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build", "570.86.10"),
        (None, "not known"),
    ],
)
def test_the_driver_is_read(
    text: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_DRIVER", tmp_path / "version")
    if text is not None:
        (tmp_path / "version").write_text(f"{text}\nGCC version:  gcc 12.2.0\n")
    assert check.versions(torch.device("cpu"))["driver"] == says
