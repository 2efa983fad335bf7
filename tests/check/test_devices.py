"""What is said of devices, their memory and faults, and what cannot be read."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_sft.check import environment
from fsdp_sft.check.environment import GIB, driver_and_faults, memory_of_device


def _rank(free: float = 79.5, **other: Any) -> dict[str, Any]:
    facts = {"torch": "2", "transformers": "5", "device": "H100"}
    memory = (int(free * GIB), 80 * GIB)
    return {"facts": facts, "clocks": [0.0], "shared": None, "memory": memory, "faults": [], **other}


@pytest.mark.parametrize(
    ("odd", "level", "says"),
    [
        ({"free": 70.0}, "warn", "70.0 of 80.0 GiB"),
        ({"free": 20.0}, "fail", "20.0 of 80.0 GiB"),
        ({"faults": ["3 uncorrected memory errors"]}, "fail", "3 uncorrected memory errors"),
    ],
)
def test_the_device_that_is_not_well_is_named(odd: dict[str, Any], level: str, says: str) -> None:
    said, measured, (problem,) = environment._compare([_rank(), _rank(**odd), _rank()])
    assert (problem.level, problem.ranks, problem.exclude) == (level, (1,), True)
    assert says in problem.text
    assert "not seen" not in said
    assert measured == {"memory_bytes": 80 * GIB}


def test_healthy_devices_and_blind_ones() -> None:
    assert environment._compare([_rank(), _rank()])[2] == []
    said, measured, problems = environment._compare([_rank(faults=None)] * 2)
    assert problems == []
    assert measured == {"memory_bytes": 80 * GIB}
    assert environment._compare([_rank(memory=None)])[1] == {}
    assert "not seen: faults of devices" in said
    assert memory_of_device(torch.device("cpu")) is None
    assert driver_and_faults(torch.device("cpu")) is None
    (little,) = environment._compare([_rank(), _rank(shared=GIB // 8)])[2]
    assert (little.level, little.ranks) == ("warn", (1,))
    assert "/dev/shm has 0.12 GiB free" in little.text


def test_what_nvidias_library_says_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def refuse(*_: Any) -> int:
        raise NVMLError

    asked: list[str] = []
    library = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "570.1",
        nvmlDeviceGetHandleByUUID=asked.append,
        nvmlDeviceGetTotalEccErrors=lambda handle, kind, counter: 2 if (kind, counter) == (1, 0) else 0,
        nvmlDeviceGetRemappedRows=lambda handle: (1, 0, 1, 0),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x4 | 0x40,
    )
    device = torch.device("cuda", 0)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="abc"))
    driver, faults = driver_and_faults(device) or ("", [])
    said = " ".join(faults)
    assert driver == "570.1"
    assert asked == ["GPU-abc"]
    assert "2 uncorrected memory errors" in said
    assert "wait to be replaced: reset" in said
    assert "lowered by heat (hardware)" in said
    assert "could not be replaced" not in said
    for name in ("TotalEccErrors", "RemappedRows", "CurrentClocksThrottleReasons"):
        monkeypatch.setattr(library, f"nvmlDeviceGet{name}", refuse)
    assert driver_and_faults(device) == ("570.1", [])
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert driver_and_faults(device) is None
