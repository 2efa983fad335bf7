"""What the ranks of a test compute on: the CPU, or a simulated accelerator each.

``FSDP_SFT_TEST_DEVICE=sim`` gives ranks simulated ones in every test; unset, they are on the CPU, and tests
marked ``accelerator`` run on both. Tests name the device by ``device_type()`` and compare on the CPU.
"""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.simulated import build
from tests.simulated.device import BACKEND, Simulated

SETTING = "FSDP_SFT_TEST_DEVICE"
_DEVICES = 4

_asked = os.environ.get(SETTING, "cpu")
if _asked not in ("cpu", "sim"):
    raise ValueError(f"{SETTING} must be cpu or sim, got {_asked!r}")

_own: Simulated | None = None


def asked() -> str:
    """The kind of device that ranks started from here get: ``"cpu"`` or ``"sim"``."""
    return _asked


def asking(kind: str) -> AbstractContextManager[str]:
    """Ranks started inside get this kind of device."""
    return mock.patch(f"{__name__}._asked", kind)


def for_ranks(world_size: int) -> list[Simulated | None]:
    """The device of each rank, None for the CPU; skips the test if the simulator cannot be compiled."""
    if _asked == "cpu":
        return [None] * world_size
    simulator_or_skip()
    return [simulated(rank, max(_DEVICES, world_size)) for rank in range(world_size)]


def simulated(index: int, devices: int) -> Simulated:
    """A device with slow copies and collectives, whose memory the host may not touch."""
    # Slow enough that what does not wait for a copy or a collective reads the memory before it.
    return Simulated(index, devices, copy_delay=0.002, comm_delay=0.002, protected=True)


def for_launched() -> dict[str, str]:
    """What the environment of a launcher has beside the usual, so that its ranks get such a device."""
    if _asked == "cpu":
        return {}
    simulator_or_skip()
    folder = Path(__file__).parents[1] / "simulated" / "launched"
    return {"FSDP_SFT_LAUNCHED_DEVICES": str(_DEVICES), "PYTHONPATH": str(folder)}


def simulator_or_skip() -> None:
    """Skip the test, with the reason, where there is no compiler for the simulated accelerator."""
    try:
        build.folder()
    except build.NoCompilerError as error:
        pytest.skip(str(error))


def become(own: Simulated | None) -> None:
    """Make this process, a rank that has just begun, one that has ``own`` as its device."""
    global _own
    if own is not None:
        own.become()
        _own = own


def backend_here() -> str:
    """The backend of process groups among processes that compute on what this one does."""
    return "gloo" if _own is None else BACKEND


def device_type() -> str:
    """The type of the device that this process, mostly a rank, computes on."""
    return "cpu" if _own is None else "sim"


def device_here() -> torch.device:
    """The device that this process, mostly a rank, computes on."""
    return torch.device("cpu") if _own is None else torch.device("sim", _own.index)


def mesh_here(**shape: int | None) -> DeviceMesh:
    """``fsdp_sft.build_mesh`` on the device that ranks compute on.

    Collective: all ranks.
    """
    import fsdp_sft as fs

    return fs.build_mesh(**shape, device_type=device_type())
