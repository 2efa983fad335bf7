"""Functions on ranks that each have a simulated device."""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.harness.ranks import Task, run_task
from tests.simulated import build


def run_simulated(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    devices: int = 2,
    first_device: int = 0,
    copy_delay: float = 0.0,
    timeout: float = 120,
    **kwargs: Any,
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` on ranks with a simulated device each, and return what each returned.

    Skips the test where there is no compiler.

    Args:
        function: At the top of its module.
        world_size: Number of ranks.
        args: Its arguments.
        devices: That each rank sees.
        first_device: Index of rank 0's; the next rank has the next one.
        copy_delay: Seconds that each copy across the bus takes at least: makes races show.
        timeout: In seconds.
        kwargs: Its keyword arguments.
    """
    try:
        folder = build.folder()
    except build.NoCompilerError as error:
        pytest.skip(str(error))
    knobs = {"SIM_DEVICES": str(devices), "SIM_COPY_DELAY_US": str(int(copy_delay * 1e6))}
    prepare = partial(_become_simulated, str(folder), knobs, first_device)
    task = Task(function, args, kwargs, timeout, prepare=prepare)
    return run_task(task, world_size, fresh=True)


def _become_simulated(folder: str, knobs: dict[str, str], first_device: int, rank: int) -> str:
    """Give this rank its device, before it has a process group; the backend for that."""
    os.environ.update(knobs, LOCAL_RANK=str(first_device + rank))
    sys.path.insert(0, folder)
    import simdev  # noqa: F401
    import torch

    torch.accelerator.set_device_index(first_device + rank)
    return "cpu:gloo,sim:simccl"
