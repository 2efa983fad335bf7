"""Rank and device of this process, found in the same way under every launcher, and how the ranks meet."""

import logging
import os
import socket
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fsdp_sft._compat.groups import careful_gloo, forget_meshes
from fsdp_sft._process.devices import default_device_type
from fsdp_sft._process.limits import raise_limit
from fsdp_sft._ranks.agree import connect_neighbours, control_group, is_distributed, world_size
from fsdp_sft._ranks.launch import DistributedContext, detect_launch, env_int, is_slurm_step

_logger = logging.getLogger("fsdp_sft")
_LONG_SECONDS = 30.0


def init_distributed(
    *,
    device_type: str | None = None,
    backend: str | None = None,
    timeout: timedelta | float = timedelta(minutes=30),
) -> DistributedContext:
    """Join the job's process group, under any launcher, and choose this process's device.

    The place of this process comes from the first of these that exists: a process group that the caller has
    made, which is used as it is; torchrun's variables; those of a Slurm step (a plain ``python`` inside
    ``salloc`` or a batch script is not one). Without any it is a single process. A gloo group for control
    messages is made beside the default group. The result is logged under ``fsdp_sft`` at the level INFO
    before the ranks meet.

    Args:
        device_type: ``"cuda"``, ``"cpu"`` or the name of another accelerator; None takes the accelerator if
            there is one.
        backend: Backend of the default group. None takes torch's default for the device beside gloo, such as
            ``"cpu:gloo,cuda:nccl"`` (gloo serves CPU tensors, which CPU offload and checkpoints need), and
            ``"gloo"`` on the CPU.
        timeout: Time after which a collective fails if some rank does not enter it; a number is of seconds.

    Raises:
        ValueError: If the launcher's variables are incomplete or contradict each other, or the device does
            not exist; the message names the variable.
        OSError: If there are no more open files for the connections to other ranks.

    Collective: all ranks. gloo connects two ranks when they first communicate (``TORCH_GLOO_LAZY_INIT``,
    which is not changed if it is set).

    Example:
        >>> context = fs.init_distributed()
        >>> mesh = fs.build_mesh()
        >>> print(context)
        rank 0 of 1 (local 0 of 1) on ..., launcher: ...
    """
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    device_type = device_type or default_device_type()
    launch = _existing_launch() if dist.is_initialized() else detect_launch()
    device = _select_device(device_type, launch)
    if not dist.is_initialized():
        _logger.info(
            "rank %d of %d on %s, %s, launcher: %s",
            *(launch.rank, launch.world_size, socket.gethostname(), device),
            f"{launch.launcher} {launch.details}".strip(),
        )
        if backend is None:  # gloo serves CPU tensors beside an accelerator's too
            default = dist.get_default_backend_for_device(device_type)
            backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{default}"
        _meet(launch, backend, timeout)
    if is_distributed():
        control_group(timeout)
    return replace(launch, device=device, backend=_backend_name())


def ranks_on_host() -> int:
    """Number of processes of this job on this host; the world size if the launcher does not say."""
    try:
        launch = detect_launch()
    except ValueError:
        return world_size()
    return world_size() if launch.launcher == "single" else launch.local_world_size


def _existing_launch() -> DistributedContext:
    """This process's place in the caller's process group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names = [name for name in ("LOCAL_RANK", "SLURM_LOCALID")[: 1 + is_slurm_step()] if name in os.environ]
    # Without a launcher's word, assume that ranks are assigned to the node's devices in order.
    local_rank = env_int(names[0]) if names else rank % (torch.accelerator.device_count() or size)
    return DistributedContext(
        rank, local_rank, size, env_int("LOCAL_WORLD_SIZE", size), torch.device("cpu"), "", "existing"
    )


def _select_device(device_type: str, launch: DistributedContext) -> torch.device:
    """The device of this process, made the current one if it is an accelerator."""
    if device_type == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count() if device_type == default_device_type() else 0
    # If the launcher shows each process a single GPU, that GPU has the index 0 in every process.
    index = 0 if count == 1 else launch.local_rank
    if index >= count:
        raise ValueError(
            f"local rank {launch.local_rank} has no device of its own: this process sees {count} of type "
            f"{device_type} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); start "
            "as many processes on a node as it has devices, show each of them its own device only, or use "
            "device_type='cpu'"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)


def _backend_name() -> str:
    """Backend of the default process group, in one word if one backend serves all devices."""
    by_device = dist.get_backend_config()  # "cpu:gloo,cuda:gloo" if one backend serves all devices
    backends = {entry.partition(":")[2] for entry in by_device.split(",")}
    return backends.pop() if len(backends) == 1 else by_device


def _meet(launch: DistributedContext, backend: str, timeout: timedelta) -> None:
    """Make the default process group, and connect the ranks that will communicate.

    Collective: all ranks.
    """
    raise_limit()
    if "torch.distributed.tensor" in sys.modules:
        forget_meshes()  # a process group of this process may have ended before
    # A warning, since lower levels are not shown by default.
    waits = (
        "rank %d of %d on %s still waits for the other ranks (launcher: %s, %s): have all of them been "
        "started, with this address, and does it lead to rank 0's machine?"
    )
    place = (launch.rank, launch.world_size, socket.gethostname(), launch.launcher, launch.details)
    warning = threading.Timer(_LONG_SECONDS, _logger.warning, (waits, *place))
    warning.daemon = True
    warning.start()
    try:
        with careful_gloo():
            store: Any = dist.HashStore()  # type: ignore[attr-defined,unused-ignore]
            if launch.init_method is not None:
                found = rendezvous(launch.init_method, launch.rank, launch.world_size, timeout=timeout)
                store = _own_keys(next(found)[0], launch.rank)
            size = launch.world_size
            dist.init_process_group(backend, store=store, rank=launch.rank, world_size=size, timeout=timeout)
    finally:
        warning.cancel()
        warning.join()
    connect_neighbours(dist.group.WORLD)


def _own_keys(store: Any, rank: int) -> Any:
    """A store without what has met over it before.

    It keeps the addresses of ranks, and that of a torchrun agent may outlive its workers, whose keys torch
    would use again:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/elastic/rendezvous/dynamic_rendezvous.py
    (TORCH_DISABLE_SHARE_RDZV_TCP_STORE). So each restart of the workers, and each meeting of theirs, gets new
    keys. Several agents may count restarts differently; then only meetings are set apart. They are counted in
    the store: a process's own count would be another where a rank was replaced.
    """
    restarts = env_int("TORCHELASTIC_RESTART_COUNT", 0) if env_int("GROUP_WORLD_SIZE", 1) == 1 else 0
    restart = dist.PrefixStore(f"restart-{restarts}", store)  # type: ignore[attr-defined,unused-ignore]
    meeting = restart.add(f"meetings-of-{rank}", 1)
    return dist.PrefixStore(f"meeting-{meeting}", restart)  # type: ignore[attr-defined,unused-ignore]
