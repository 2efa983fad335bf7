"""Rank and device of this process, found in the same way under every launcher, and how the ranks meet.

Launchers are torchrun and those that set its variables, Slurm, or none.
"""

import logging
import os
import re
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fsdp_sft._compat.groups import careful_gloo, forget_meshes
from fsdp_sft._process.devices import default_device_type
from fsdp_sft._process.limits import raise_limit
from fsdp_sft._ranks.agree import connect_neighbours, control_group, world_size

_logger = logging.getLogger("fsdp_sft")
_LONG_SECONDS = 30.0
# Slurm numbers steps that srun did not start (batch script, interactive shell, ...) from here up:
# https://github.com/SchedMD/slurm/blob/master/slurm/slurm.h (SLURM_BATCH_SCRIPT and its neighbours).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# Numbers of processes that other launchers set: mpirun, MPICH's mpiexec, submitit's local executor.
_FOREIGN_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SUBMITIT_LOCAL_NTASKS")
_TO_CHOOSE = (torch.device("cpu"), "")  # device and backend of a process that has not met the others


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
        init_method: URL at which ranks meet; None for a single process, and for the caller's process group.

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
    init_method: str | None = None

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
    if world_size() > 1:
        control_group(timeout)
    by_device = dist.get_backend_config()  # "cpu:gloo,cuda:gloo" if one backend serves all devices
    backends = {entry.partition(":")[2] for entry in by_device.split(",")}
    return replace(launch, device=device, backend=by_device if len(backends) > 1 else backends.pop())


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
    names = [n for n in ("LOCAL_RANK", *["SLURM_LOCALID"] * is_slurm_step()) if n in os.environ]
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


# What launchers say.


def detect_launch() -> DistributedContext:
    """This process's place in the job, from environment variables, before device and backend are chosen.

    Raises:
        ValueError: If a launcher's variables are incomplete or contradict each other; the message names them.
    """
    if "RANK" in os.environ or "LOCAL_RANK" in os.environ:
        return _torchrun_launch()
    if is_slurm_step():
        return _slurm_launch()
    for name in _FOREIGN_SIZES:
        if name in os.environ and env_int(name) > 1:
            raise ValueError(
                f"{name}={os.environ[name]} is set but RANK is not: start with torchrun or srun, or unset "
                f"{name} to run as a single process"
            )
    return DistributedContext(0, 0, 1, 1, *_TO_CHOOSE, "single")


def env_int(name: str, default: int | None = None) -> int:
    """An environment variable that must be a number, and must be set unless there is a default."""
    found = os.environ.get(name) or ("" if default is None else str(default))
    try:
        return int(found)
    except ValueError:
        raise ValueError(
            f"{name}={found!r} is not a number: pass on what the launcher sets (srun --export=ALL, a "
            "container's option), or unset all of it (RANK, LOCAL_RANK, SLURM_STEP_ID, ...) to run alone"
        ) from None


def is_slurm_step() -> bool:
    """Whether srun started this process as a task of a step."""
    # SLURM_PROCID does not tell: inside salloc or a batch script it may be set without any srun. What is
    # started by hand in the shell of ``srun --pty`` of one task of the step inherits its variables. So
    # do tasks of another srun inside it, but they have no terminal.
    step = os.environ.get("SLURM_STEP_ID", "")
    is_shell = "SLURM_PTY_PORT" in os.environ and sys.stdin is not None and sys.stdin.isatty()
    return step.isdigit() and int(step) < _FIRST_SPECIAL_STEP and not is_shell


def _torchrun_launch() -> DistributedContext:
    """The place that torchrun's variables give, or those of a launcher that sets the same."""
    rank, world_size = _rank_of("RANK", "WORLD_SIZE")
    # Operators of Kubernetes mostly set neither: a pod has one process, the only one of its node.
    local_world_size = env_int("LOCAL_WORLD_SIZE", world_size if os.environ.get("LOCAL_RANK") else 1)
    local_rank = env_int("LOCAL_RANK", 0 if local_world_size == 1 else None)
    # torch takes an IPv6 address only without the brackets that it has in a URL.
    os.environ["MASTER_ADDR"] = os.environ.get("MASTER_ADDR", "").strip("[]")
    details = f"meeting at {os.environ['MASTER_ADDR']}:{env_int('MASTER_PORT')}"
    return DistributedContext(
        rank, local_rank, world_size, local_world_size, *_TO_CHOOSE, "torchrun", details, "env://"
    )


def _slurm_launch() -> DistributedContext:
    """This task's place in its Slurm step, and where the step's ranks meet."""
    tasks = "SLURM_NTASKS" if "SLURM_STEP_NUM_TASKS" not in os.environ else "SLURM_STEP_NUM_TASKS"
    rank, world_size = _rank_of("SLURM_PROCID", tasks)
    where = f"job {os.environ.get('SLURM_JOB_ID', '?')}, step {os.environ['SLURM_STEP_ID']}"
    if world_size == 1:
        return DistributedContext(0, 0, 1, 1, *_TO_CHOOSE, "slurm", where)
    address = (os.environ.get("MASTER_ADDR") or _master_address()).strip("[]")
    # By job and step, so that ranks of neighbouring jobs on shared nodes do not meet.
    own = 20000 + (env_int("SLURM_JOB_ID", 0) * 7 + env_int("SLURM_STEP_ID")) % 20000
    port = env_int("MASTER_PORT", own)
    meeting = f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
    details = f"{where}, node {os.environ.get('SLURMD_NODENAME', '?')}, meeting at {meeting}"
    place = rank, env_int("SLURM_LOCALID"), world_size, _local_world_size()
    return DistributedContext(*place, *_TO_CHOOSE, "slurm", details, meeting)


def _rank_of(rank_name: str, size_name: str) -> tuple[int, int]:
    """(rank, world size) of two variables."""
    rank, world_size = env_int(rank_name), env_int(size_name)
    if not 0 <= rank < world_size:
        raise ValueError(f"{rank_name}={rank} is not in [0, {size_name}={world_size})")
    return rank, world_size


def _local_world_size() -> int:
    """This node's entry of a list such as ``4(x2),3``: four tasks on two nodes, then three on one."""
    listed = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "1")
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(count)] * int(times or 1)
    return counts[min(env_int("SLURM_NODEID", 0), len(counts) - 1)]


def _master_address() -> str:
    """The address of the first node of a Slurm node list such as ``gpu[03-05,9],login1``: that of rank 0."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "")
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)(?=,|$)", nodes)
    if match is not None:  # nor has a name several parts in brackets
        first = "".join(match.groups(""))
        with suppress(OSError):
            socket.getaddrinfo(first, None)
            return first
        # A node's name may not resolve (several slurmd on one host). Then srun's address is used.
        if os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
            return os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    raise ValueError(
        f"the first node of SLURM_STEP_NODELIST={nodes!r} is not known or has no address; set MASTER_ADDR"
    )
