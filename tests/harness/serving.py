"""What a rank does, in its own process: it serves one task after the other.

Its process group lasts as long as it does, so that a further case costs no store and no connections; the
groups that a test has made besides end with the test. A rank leaves its traceback in a file with the time. It
computes on the CPU, or on a simulated device that it keeps (see ``device``), and then fails if it has used
any other.
"""

import faulthandler
import gc
import os
import pickle
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_sft._compat.groups import careful_gloo, forget_meshes
from fsdp_sft._ranks import agree, mesh
from fsdp_sft.dcp_io import saving
from tests.harness import device, leftovers
from tests.harness.poison import poisoned
from tests.simulated.device import Simulated


@dataclass(frozen=True)
class Done:
    """What a rank says of a task that it has done.

    Attributes:
        changed: What is not as it was before.
        is_in_group: Whether it is still in the process group.
        groups: How many groups it has made.
    """

    changed: tuple[str, ...] = ("died",)
    is_in_group: bool = False
    groups: int = -1


def serve(connection: Connection, own: Simulated | None, store: Path, rank: int, world_size: int) -> None:
    """Do what comes over the connection until it ends, in a process group that meets over a file."""
    torch.set_num_threads(1)
    device.become(own)
    served = _Served(own, store, rank, world_size)
    while True:
        try:
            task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send(served.run(*task))


class _Served:
    """The tasks of one rank: its process group, and its state from one task to the next."""

    def __init__(self, own: Simulated | None, store: Path, rank: int, world_size: int) -> None:
        self._own, self._store, self._rank, self._world_size = own, store, rank, world_size
        self._world: Any = None
        self._state: leftovers.State | None = None

    def run(self, function: Callable[[], Any], timeout: float, poison: bool, folder: Path) -> Done:
        """Call a function, and leave its result in a folder; in memory that is poisoned, on request."""
        own, rank = self._own, self._rank
        os.environ.update(
            LOCAL_RANK=str(rank if own is None else own.index), LOCAL_WORLD_SIZE=str(self._world_size)
        )
        before = self._state or leftovers.State()
        before.settings.update(leftovers.settings())  # names are known to be unchanged
        torch.manual_seed(0)
        faulthandler.enable(open(folder / f"fault-{rank}", "w"))  # noqa: SIM115  needed until there is another
        try:
            self._meet(timedelta(seconds=timeout))
            with poisoned() if poison else nullcontext():
                result = function()
            (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
            del result
            if own is not None:
                own.check()
            is_in_group = dist.is_initialized() and dist.group.WORLD is self._world
            if is_in_group:
                dist.barrier()
                agree._groups.clear()  # a group that was ended lives on while anything refers to it
                for group in [g for g in dist.distributed_c10d._world.pg_map if g is not self._world]:
                    dist.destroy_process_group(group)
            forget_meshes()
            mesh._made.clear()
            leftovers.forget_remote_code()
            saving._held.clear()  # as at the end of a process
        except BaseException:
            (folder / f"error-{rank}").write_text(f"{time.time()}\n{traceback.format_exc()}")
            os._exit(1)
        gc.collect()
        after = leftovers.State(before)
        changed = before.changes(after)
        if changed:
            leftovers.put_back(before, changed)
            after = leftovers.State(before)
            changed = before.changes(after)
        self._state = after
        return Done(tuple(changed), is_in_group, dist.distributed_c10d._world.group_count)

    def _meet(self, timeout: timedelta) -> None:
        """Be in the process group, whose collectives may take so long."""
        if self._world is not None:
            dist.distributed_c10d._set_pg_timeout(timeout)
            return
        with careful_gloo():
            dist.init_process_group(
                device.backend_here(),
                init_method=f"file://{self._store}",
                rank=self._rank,
                world_size=self._world_size,
                timeout=timeout,
            )
        self._world = dist.group.WORLD
