"""How collectives fail: as NCCL's do, which hang until a watchdog ends the process."""

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.simulated.ranks import run_simulated

SECONDS = 2.0


def _group() -> Any:
    """A group with a short time-out, whose failures raise; by default they would end the process."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    return dist.new_group(backend="cpu:gloo,sim:simccl", timeout=timedelta(seconds=SECONDS))


def _reduce(group: Any, elements: int = 4) -> None:
    tensor = torch.ones(elements, device="sim")
    dist.all_reduce(tensor, group=group)
    tensor.tolist()


def _differ(how: str) -> tuple[str, float, float]:
    """What a failing collective raises, how long a call takes, and how long it is waited for."""
    group, rank = _group(), dist.get_rank()
    dist.barrier()
    start = time.monotonic()
    dist.all_reduce(torch.ones(1, device="sim"), group=group, async_op=True).wait()
    queued = time.monotonic() - start
    message = ""
    try:
        if how == "sizes":
            _reduce(group, 4 + rank)
        elif rank == 0:
            _reduce(group)
        else:  # stays away
            time.sleep(1.5 * SECONDS)
    except dist.DistBackendError as error:
        message = str(error)
    return message, queued, time.monotonic() - start


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("away", "not every rank has called it"),
        ("sizes", "rank 0 calls all_reduce of 4 Float, reduction 0; rank 1 calls all_reduce of 5 Float"),
    ],
)
def test_ranks_that_differ_hang_until_the_time_out(how: str, says: str) -> None:
    (message, queued, waited), _ = run_simulated(_differ, 2, how, fresh=True)
    assert "Watchdog caught collective operation timeout" in message
    assert says in message
    assert queued < SECONDS / 2, "the host must not wait for a collective"
    assert waited > 0.9 * SECONDS
