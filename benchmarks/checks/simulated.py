"""Ranks with a simulated accelerator each, for what is counted rather than timed."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Collectives(TorchDispatchMode):
    """Counts c10d's operations on the simulated device, and the bytes of the larger side of each."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sides = [_bytes_of(value) for value in (*args, *(kwargs or {}).values())]
            if any(sides):  # a barrier moves nothing, and gloo's are on the CPU
                self.sizes.append(max(sides))
        return func(*args, **(kwargs or {}))


def _bytes_of(value: Any) -> int:
    """Bytes of a tensor on the simulated device, or of those in nested lists."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.device.type == "sim" else 0
    return sum(map(_bytes_of, value)) if isinstance(value, (list, tuple)) else 0


class Counted:
    """Waits of the host and collectives between `start` and `stop`.

    Attributes:
        syncs: The waits, with kind and stack.
        collectives: Number of collectives and bytes of the larger side.
    """

    def __init__(self) -> None:
        self.syncs: list[Any] = []
        self.collectives = (0, 0)
        self._open = ExitStack()

    def start(self) -> None:
        """Count from here on."""
        sim = torch.sim  # type: ignore[attr-defined]
        self.syncs = self._open.enter_context(sim.record_syncs())
        self._counts = self._open.enter_context(_Collectives())

    def stop(self) -> None:
        """Count to here."""
        self._open.close()
        self.collectives = (len(self._counts.sizes), sum(self._counts.sizes))


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """What ``function(*args)`` returns on rank 0 of ``world_size``; it is at the top of its module.

    The device is compiled by the tests, whose folder is asked for in a process of its own.
    """
    build = subprocess.run(
        [sys.executable, "-m", "tests.simulated.build"], check=True, capture_output=True, text=True
    )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    context = get_context("spawn")
    mine, theirs = context.Pipe()
    ranks = [
        context.Process(
            target=_serve,
            args=(theirs, build.stdout.split()[-1], port, rank, world_size, function, args),
        )
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    theirs.close()
    try:
        return mine.recv()
    finally:
        for rank in ranks:
            rank.join(60)
            rank.kill()


def _serve(
    connection: Connection,
    folder: str,
    port: str,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        SIM_DEVICES=str(world_size),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="localhost",
        MASTER_PORT=port,
    )
    sys.path.insert(0, folder)
    import simdev  # type: ignore[import-not-found]  # noqa: F401

    import fsdp_sft as fs

    torch.set_num_threads(1)
    fs.init_distributed()
    found = function(*args)
    if rank == 0:
        connection.send(found)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
