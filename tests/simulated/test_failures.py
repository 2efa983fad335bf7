"""How collectives fail: as NCCL's do, which hang until a watchdog ends the process."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import RankFailedError
from tests.simulated.ranks import run_simulated

SECONDS = 2.0


def _group() -> Any:
    """A group with a short time-out, whose failures raise; by default they would end the process."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    return dist.new_group(backend="cpu:gloo,sim:simccl", timeout=timedelta(seconds=SECONDS))


def _reduce(group: Any, elements: int = 4) -> torch.Tensor:
    tensor = torch.ones(elements, device="sim")
    dist.all_reduce(tensor, group=group)
    return tensor


def _one_stays_away(group: Any) -> None:
    if dist.get_rank() == 0:
        _reduce(group).tolist()
    else:
        time.sleep(1.5 * SECONDS)


def _unequal_sizes(group: Any) -> None:
    _reduce(group, 4 + dist.get_rank()).tolist()


def _message(run: Callable[[Any], None]) -> tuple[str, float, float]:
    """What a failing collective raises, how long the call took, and how long it was waited for."""
    group = _group()
    dist.barrier()
    start = time.monotonic()
    work = dist.all_reduce(torch.ones(1, device="sim"), group=group, async_op=True)
    work.wait()
    queued = time.monotonic() - start
    try:
        run(group)
    except dist.DistBackendError as error:
        return str(error), queued, time.monotonic() - start
    return "", queued, time.monotonic() - start


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (_one_stays_away, "not every rank has called it"),
        (
            _unequal_sizes,
            "rank 0 calls all_reduce of 4 Float, reduction 0; rank 1 calls all_reduce of 5 Float",
        ),
    ],
)
def test_ranks_that_differ_hang_until_the_time_out(run: Callable[[Any], None], says: str) -> None:
    results = run_simulated(_message, 2, run, fresh=True)
    message, queued, waited = results[0]
    assert "Watchdog caught collective operation timeout" in message
    assert says in message
    assert queued < SECONDS / 2, "the host must not wait for a collective"
    assert waited > 0.9 * SECONDS


def _dies() -> str:
    group = _group()
    _reduce(group).tolist()
    if dist.get_rank() == 1:
        os._exit(7)
    try:
        _reduce(group).tolist()
    except dist.DistBackendError as error:
        raise AssertionError(f"raised: {error}") from None
    return "went on"


def test_a_rank_that_dies_leaves_its_peers_hanging_until_the_time_out() -> None:
    with pytest.raises(RankFailedError, match=r"raised: .*Watchdog caught.*What NCCL would not say"):
        run_simulated(_dies, 2, fresh=True)
