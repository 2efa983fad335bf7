"""How ranks meet: limits on connections, the process group."""

import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fsdp_sft._compat.groups import careful_gloo, forget_meshes
from fsdp_sft._process.limits import raise_limit
from fsdp_sft._ranks.agree import answered
from fsdp_sft._ranks.launch import Launch, restarts_to_set_apart

_logger = logging.getLogger("fsdp_sft")
_LONG_SECONDS = 30.0


def meet(launch: Launch, backend: str, timeout: timedelta) -> None:
    """Make the default process group, and connect the ranks that will communicate.

    Collective: all ranks.
    """
    raise_limit()
    with careful_gloo(), _says_when_it_waits(launch):
        _init_process_group(launch, backend, timeout)
    connect_neighbours(dist.group.WORLD)


@contextmanager
def _says_when_it_waits(launch: Launch) -> Iterator[None]:
    """Context that logs a warning if it takes long; lower levels are not shown by default."""
    said = threading.Timer(
        _LONG_SECONDS,
        lambda: _logger.warning(
            "rank %d of %d on %s still waits for the other ranks (launcher: %s, %s): have all of them been "
            "started, with this address, and does it lead to rank 0's machine?",
            *(launch.rank, launch.world_size, socket.gethostname(), launch.launcher, launch.details),
        ),
    )
    said.daemon = True
    said.start()
    try:
        yield
    finally:
        said.cancel()
        said.join()


def connect_neighbours(group: dist.ProcessGroup | None) -> None:
    """Have gloo connect the ranks that its rings need.

    gloo connects ranks when they first communicate, and notices the end of a rank only by its connection.
    """
    if group is not None and group.size() > 1 and "cpu" in dist.get_backend_config(group):
        with answered():
            dist.all_reduce(torch.zeros(1), group=group)


def _init_process_group(launch: Launch, backend: str, timeout: timedelta) -> None:
    if "torch.distributed.tensor" in sys.modules:
        forget_meshes()  # a process group of this process may have ended before
    if launch.init_method is None:
        alone = dist.HashStore()  # type: ignore[attr-defined,unused-ignore]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
        return
    place = {} if launch.init_method == "env://" else {"rank": launch.rank, "world_size": launch.world_size}
    store, rank, world_size = next(rendezvous(launch.init_method, timeout=timeout, **place))
    store = _own_keys(store, rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _own_keys(store: Any, rank: int) -> Any:
    """A store without what has met over it before.

    It keeps the addresses of ranks. So each restart of the workers, and each meeting of theirs, gets new
    keys. Meetings are counted in the store: a process's own count would be another where a rank was replaced.
    """
    restart = dist.PrefixStore(  # type: ignore[attr-defined,unused-ignore]
        f"restart-{restarts_to_set_apart()}", store
    )
    meeting = restart.add(f"meetings-of-{rank}", 1)
    return dist.PrefixStore(f"meeting-{meeting}", restart)  # type: ignore[attr-defined,unused-ignore]
