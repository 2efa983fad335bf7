"""Rank and device of this process, found in the same way under every launcher."""

import logging
import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_sft._process.words import answered
from fsdp_sft._ranks.agree import control_group, is_distributed, world_size
from fsdp_sft._ranks.launch import Launch, detect_launch, env_int, is_slurm_step
from fsdp_sft._ranks.rendezvous import meet

_logger = logging.getLogger("fsdp_sft")


@dataclass(frozen=True)
class DistributedContext:
    """The place of this process in the job.

    Attributes:
        rank: Index of this process in the job, from 0.
        local_rank: Index of this process on its node, from 0.
        world_size: Number of processes in the job.
        local_world_size: Number of processes on this node.
        device: Device on which this process computes; an accelerator is the current one.
        backend: Backend of the default process group, such as ``"cpu:gloo,cuda:nccl"``.
        launcher: ``"torchrun"`` (or another that sets the same variables), ``"slurm"``, ``"single"``, or
            ``"existing"`` for a process group that the caller has made.
        details: Further facts from the launcher: its job, and the address at which ranks meet.

    Example:
        >>> context = fs.init_distributed()
        >>> context.rank, context.world_size, context.is_main
        (0, 1, True)
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str
    launcher: str
    details: str = field(default="", compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.world_size} (local {self.local_rank} of {self.local_world_size}) "
            f"on {self.device}, {self.backend}, launcher: {self.launcher}"
            + (f" ({self.details})" if self.details else "")
        )


@answered
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
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_type = accelerator.type if accelerator is not None else "cpu"
    if dist.is_initialized():
        launch = _existing_launch()
        device = _select_device(device_type, launch)
    else:
        launch = detect_launch()
        device = _select_device(device_type, launch)
        _logger.info(
            "rank %d of %d on %s, %s, launcher: %s",
            *(launch.rank, launch.world_size, socket.gethostname(), device),
            f"{launch.launcher} {launch.details}".strip(),
        )
        if backend is None:  # gloo serves CPU tensors beside an accelerator's too
            default = dist.get_default_backend_for_device(device_type)
            backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{default}"
        meet(launch, backend, timeout)
    if is_distributed():
        control_group(timeout)
    return DistributedContext(
        rank=launch.rank,
        local_rank=launch.local_rank,
        world_size=launch.world_size,
        local_world_size=launch.local_world_size,
        device=device,
        backend=_backend_name(),
        launcher=launch.launcher,
        details=launch.details,
    )


def ranks_on_host() -> int:
    """Number of processes of this job on this host; the world size if the launcher does not say."""
    try:
        launch = detect_launch()
    except ValueError:
        return world_size()
    return world_size() if launch.launcher == "single" else launch.local_world_size


def _existing_launch() -> Launch:
    """This process's place in the caller's process group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names = [name for name in ("LOCAL_RANK", "SLURM_LOCALID")[: 1 + is_slurm_step()] if name in os.environ]
    # Without a launcher's word, assume that ranks are assigned to the node's devices in order.
    local_rank = env_int(names[0]) if names else rank % (torch.accelerator.device_count() or size)
    local_size = env_int("LOCAL_WORLD_SIZE", size)
    return Launch("existing", rank, local_rank, size, local_size, None)


def _select_device(device_type: str, launch: Launch) -> torch.device:
    """The device of this process, made the current one if it is an accelerator."""
    if device_type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device_type:
        raise ValueError(
            f"device_type={device_type!r}, but this process sees "
            f"{'no accelerator' if accelerator is None else accelerator.type}; use device_type='cpu' or "
            "check the driver and which devices it may see (CUDA_VISIBLE_DEVICES)"
        )
    count = torch.accelerator.device_count()
    # If the launcher shows each process a single GPU, that GPU has the index 0 in every process.
    index = 0 if count == 1 else launch.local_rank
    if index >= count:
        raise ValueError(
            f"local rank {launch.local_rank} has no device of its own: this process sees {count} of type "
            f"{device_type} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); start "
            f"at most {count} processes on this node, or show each of them its own device only"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)


def _backend_name() -> str:
    """Backend of the default process group, in one word if one backend serves all devices."""
    by_device = dist.get_backend_config()  # "cpu:gloo,cuda:gloo" if one backend serves all devices
    backends = {entry.partition(":")[2] for entry in by_device.split(",")}
    return backends.pop() if len(backends) == 1 else by_device
