"""Multi-process harness: a function on several gloo ranks, its results back, the earliest failure named.

A fork server that has imported torch and transformers starts a rank in a fraction of a second. Ranks meet
over a file, so tests need no port. Each rank leaves its traceback in a file of its own with the time, and
the earliest is raised: the ranks that only lost their peer do not take the blame.
"""

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.harness import forks

_GRACE_SECONDS = 10  # what the other ranks get to fail by themselves once one has


class RankFailedError(AssertionError):
    """A rank failed; the message is the earliest rank's traceback."""


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120, **kwargs: Any
) -> list[Any]:
    """Run ``function(*args, **kwargs)`` on ``world_size`` gloo ranks and return what each returned.

    ``function`` and its arguments and results must be picklable: a function at the top of its module.
    """
    return run_ranks(function, world_size, args, kwargs, timeout=timeout, before=_backend)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    timeout: float,
    before: Callable[[int], str],
) -> list[Any]:
    """As ``run_distributed``; ``before(rank)`` runs first in each rank and names the backend."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        processes = [
            forks.process(_run_rank, folder, rank, world_size, timeout, before, function, args, kwargs)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        _wait(processes, timeout)
        _raise_earliest(folder, processes, timeout)
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _wait(processes: list[Any], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        for process in processes:
            process.join(0.02)


def _raise_earliest(folder: Path, processes: list[Any], timeout: float) -> None:
    errors = sorted(folder.glob("error-*"), key=lambda path: float(path.read_text().split("\n", 1)[0]))
    exit_codes = [process.exitcode for process in processes]
    if errors:
        rank = errors[0].name.removeprefix("error-")
        text = errors[0].read_text().split("\n", 1)[1]
        others = sorted(int(path.name.removeprefix("error-")) for path in errors[1:])
        raise RankFailedError(f"rank {rank} failed first (then {others}), exit codes {exit_codes}\n{text}")
    if any(exit_codes):
        raise RankFailedError(f"exit codes {exit_codes} without a traceback; time-out {timeout} s")


def _backend(rank: int) -> str:
    return "gloo"


def _run_rank(
    folder: Path,
    rank: int,
    world_size: int,
    timeout: float,
    before: Callable[[int], str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    dist.init_process_group(
        before(rank),
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        result = function(*args, **kwargs)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error-{rank}").write_text(f"{time.time()}\n{traceback.format_exc()}")
        os._exit(1)
