"""What is said of devices, their memory, faults and lanes, and what cannot be read."""

import ctypes
import dataclasses
from typing import Any

import pytest
import torch

from fsdp_sft.check import nvml
from fsdp_sft.check.checks import devices
from fsdp_sft.check.device_memory import memory_of_device
from tests.harness.clusters import cluster_of

GIB = 1 << 30
WELL = {"uncorrected": 0, "remap_pending": False, "remap_failed": False, "slowed_by": ""}
LANES = {"pcie_width": 16, "pcie_most": 16}


def _rank(rank: int, free: float = 79.5, **health: Any) -> dict[str, Any]:
    memory = (int(free * GIB), 80 * GIB)
    return {"host": "n", "uuid": f"u{rank}", "memory": memory, "health": {**WELL, **LANES, **health}}


@pytest.mark.parametrize(
    ("odd", "level", "says"),
    [
        ({"free": 70.0}, "warn", "70.0 of 80.0 GiB"),
        ({"free": 20.0}, "fail", "20.0 of 80.0 GiB"),
        ({"uncorrected": 3}, "fail", "3 uncorrected memory errors"),
        ({"remap_pending": True}, "fail", "wait to be replaced: reset"),
        ({"remap_failed": True, "remap_pending": True}, "fail", "could not be replaced"),
        ({"slowed_by": "heat (hardware)"}, "fail", "lowered by heat"),
        ({"pcie_width": 4}, "warn", "4 of 16 lanes"),
    ],
)
def test_the_device_that_is_not_well_is_named(odd: dict[str, Any], level: str, says: str) -> None:
    outcome = devices._decide([_rank(0), _rank(1, **odd), _rank(2)])
    (trouble,) = outcome.troubles
    assert (trouble.level, trouble.ranks, trouble.leave_out) == (level, (1,), True)
    assert says in trouble.text
    assert not outcome.unseen


def test_healthy_devices_and_blind_ones() -> None:
    assert devices._decide([_rank(0), _rank(1)]).troubles == ()
    blind = [{"host": "n", "uuid": None, "memory": None, "health": None}] * 2
    outcome = devices._decide(blind)
    assert outcome.troubles == ()
    assert "free memory" in outcome.unseen
    assert "NVML" in outcome.unseen
    shared = devices._decide([_rank(0), {**_rank(1), "uuid": "u0"}])
    assert [one.ranks for one in shared.troubles] == [(0, 1)]
    assert memory_of_device(torch.device("cpu")) is None


def test_a_start_without_a_launcher_leaves_devices_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_of("n")
    alone = dataclasses.replace(cluster.context, launcher="single", device=torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(devices, "_uuid", lambda _: None)
    monkeypatch.setattr(devices, "memory_of_device", lambda _: (GIB, GIB))
    outcome = devices._run(dataclasses.replace(cluster, context=alone))
    assert [one.text for one in outcome.troubles] == [
        "one of the 8 devices here is checked: start with torchrun --nproc-per-node 8"
    ]
    assert devices._run(
        dataclasses.replace(cluster, context=dataclasses.replace(alone, launcher="slurm"))
    ) == (dataclasses.replace(outcome, troubles=()))


class _Library:
    """NVIDIA's library as ctypes shows it: numbers are written behind pointers, 0 is success."""

    def __init__(self, **numbers: int) -> None:
        self.numbers, self.asked = numbers, ""

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        self.asked = name.decode()
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"570.1"
        return 0

    def nvmlDeviceGetRemappedRows(self, handle: Any, *rows: Any) -> int:
        for pointer, number in zip(rows, (1, 0, self.numbers["pending"], 0), strict=True):
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint))[0] = number
        return 0

    def __getattr__(self, name: str) -> Any:
        if name not in self.numbers:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            kind = ctypes.c_uint if "Pcie" in name else ctypes.c_ulonglong
            ctypes.cast(arguments[-1], ctypes.POINTER(kind))[0] = self.numbers[name]
            return 0

        return call


def test_what_nvidias_library_says_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Library(
        pending=1,
        nvmlDeviceGetTotalEccErrors=2,
        nvmlDeviceGetCurrentClocksThrottleReasons=0x4 | 0x40,
        nvmlDeviceGetCurrPcieLinkWidth=8,
    )
    monkeypatch.setattr(nvml, "_library", lambda: library)
    assert nvml.health_of("abc") == nvml.GpuHealth(2, True, False, "heat (hardware)", 8, None)
    assert library.asked == "GPU-abc"
    assert nvml.driver_version() == "570.1"
    monkeypatch.setattr(nvml, "_library", lambda: None)
    assert nvml.health_of("abc") is None
    assert nvml.driver_version() is None
