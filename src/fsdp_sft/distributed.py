"""Rank, device and mesh of this process, found in the same way under every launcher."""

import logging
import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fsdp_sft._agree import (
    all_gather_objects,
    all_reduce_sum,
    control_group,
    is_distributed,
    raise_first,
    world_size,
)
from fsdp_sft._compat import (
    careful_gloo,
    forget_failed_iteration,
    is_broken_off,
    keep_trained_flags,
    native_mesh,
    replaced_parameters,
    split_axis,
)
from fsdp_sft._interrupt import say_interrupts_in_a_line
from fsdp_sft._launch import detect_launch
from fsdp_sft._meeting import connect_neighbours, meet
from fsdp_sft._meshes import CP, DP_SHARD_CP, EP, PP, remember_made, shard_parameters_on
from fsdp_sft._record import kept_of, record_of
from fsdp_sft._slurm import Launch, env_int, is_slurm_step
from fsdp_sft._wrappers import replicas_of, replicated_by, unwrapped
from fsdp_sft.errors import UnsupportedModelError, WrappedModelError, abridged

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DP_REPLICATE = "dp_replicate"
DP_SHARD = "dp_shard"

_logger = logging.getLogger("fsdp_sft")
# The environment variable that restricts which of a node's devices a process sees; ROCm heeds CUDA's as well.
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


@dataclass(frozen=True)
class DistributedContext:
    """The place of this process in the job.

    Attributes:
        rank: Index of this process in the job, from 0.
        local_rank: Index of this process on its node, from 0.
        world_size: Number of processes in the job.
        local_world_size: Number of processes on this node.
        device: Device on which this process computes; an accelerator has been made the current one.
        backend: Backend of the default process group, such as ``"cpu:gloo,cuda:nccl"``.
        launcher: ``"torchrun"`` (or another that sets the same variables), ``"slurm"``, ``"submitit"`` for
            its local executor, ``"single"``, or ``"existing"`` for a process group that the caller has made.
        details: Further facts from the launcher: its job, restarts, and the address at which ranks meet.

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


def init_distributed(
    *,
    device_type: str | None = None,
    backend: str | None = None,
    timeout: timedelta = timedelta(minutes=30),
) -> DistributedContext:
    """Join the job's process group, under any launcher, and choose this process's device.

    The place of this process comes from the first of these that exists: a process group that the caller has
    made, which is used as it is; torchrun's variables; those of submitit's local executor; those of a Slurm
    step (a plain ``python`` inside ``salloc`` or a batch script is not one, and a message says so); otherwise
    it is a single process. A gloo group for control messages is made beside the default group. What was found
    is logged under ``fsdp_sft`` at the level INFO before the ranks meet. In a job of several ranks, Ctrl-C is
    told in one line a rank (``sys.excepthook``).

    Args:
        device_type: ``"cuda"``, ``"cpu"`` or the name of another accelerator; None takes the accelerator if
            there is one.
        backend: Backend of the default group. None takes torch's default for the device beside gloo, such as
            ``"cpu:gloo,cuda:nccl"`` (gloo serves CPU tensors, which CPU offload and checkpoints need), and
            ``"gloo"`` on the CPU.
        timeout: Time after which a collective fails if some rank does not enter it.

    Raises:
        ValueError: If the launcher's variables are incomplete or contradict each other, or the device does
            not exist; the message names the variable.
        OSError: If this process may not open as many files as the job needs, even with a raised soft limit.

    Collective: all ranks. gloo connects two ranks when they first communicate (``TORCH_GLOO_LAZY_INIT``,
    which is not changed if it is set).

    Example:
        >>> context = fs.init_distributed()
        >>> mesh = fs.build_mesh()
        >>> print(context)
        rank 0 of 1 (local 0 of 1) on ..., launcher: ...
    """
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_type = accelerator.type if accelerator is not None else "cpu"
    if dist.is_initialized():
        launch = _existing_launch()
        device = _select_device(device_type, launch)
    else:
        launch = detect_launch()
        device = _select_device(device_type, launch)
        _say_what_was_found(launch, device)
        meet(launch, backend or _default_backend(device_type), timeout)
    if is_distributed():
        say_interrupts_in_a_line()
        control_group(timeout)
        _check_devices(device)
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


def build_mesh(
    *, dp_replicate: int = 1, dp_shard: int | None = None, cp: int = 1, device_type: str | None = None
) -> "DeviceMesh":
    """Arrange all ranks in a mesh for data parallelism and, if ``cp`` is given, context parallelism.

    Rows are distributed to ``dp_replicate x dp_shard`` groups of ``cp`` neighbouring ranks, each of which
    works on its part of the same rows (``use_context_parallel``). ``shard_model`` shards parameters over
    ``dp_shard`` and ``cp`` together.

    Args:
        dp_replicate: Number of replicas. 1 gives a 1-D mesh ``("dp_shard",)``: FSDP. More gives a 2-D mesh
            ``("dp_replicate", "dp_shard")``: HSDP, with neighbouring ranks in one shard group, so that with
            ``dp_shard`` equal to the GPUs of a node only the gradient all-reduce crosses nodes.
        dp_shard: Number of ranks over which a replica's parameters are sharded, divided by ``cp``. None takes
            all ranks that ``dp_replicate`` and ``cp`` leave. 1 with ``dp_replicate`` equal to the world size
            is plain data parallelism (DDP).
        cp: Number of ranks that share the tokens of a row. More than 1 adds a last axis ``"cp"``, and then
            the axis ``"dp_shard"`` exists even if its size is 1.
        device_type: Device type of the mesh; None takes the accelerator if there is one, else ``"cpu"``.

    Raises:
        ValueError: If the product of the three numbers is not the number of ranks.
        RuntimeError: Without a process group.

    Collective: all ranks.

    Example:
        >>> mesh = fs.build_mesh()
        >>> mesh.mesh_dim_names, mesh.size()
        (('dp_shard',), 1)
    """
    if not dist.is_initialized():
        raise RuntimeError("build_mesh needs a process group: call fsdp_sft.init_distributed() first")
    world_size = dist.get_world_size()
    for name, value in ((DP_REPLICATE, dp_replicate), (DP_SHARD, dp_shard), (CP, cp)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if world_size % cp:
        raise ValueError(
            f"cp={cp} does not divide the {world_size} ranks; use one of {_divisors(world_size)}"
        )
    if dp_shard is None:
        left = world_size // cp
        if left % dp_replicate:
            raise ValueError(
                f"dp_replicate={dp_replicate} does not divide the {left} ranks{_beside(cp)}; "
                f"use one of {_divisors(left)}"
            )
        dp_shard = left // dp_replicate
    if dp_replicate * dp_shard * cp != world_size:
        product = f"dp_replicate={dp_replicate} x dp_shard={dp_shard}" + (f" x cp={cp}" if cp > 1 else "")
        raise ValueError(
            f"{product} makes {dp_replicate * dp_shard * cp} ranks, but the job has {world_size}; leave "
            "dp_shard out to use all that the others leave"
        )
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_type = accelerator.type if accelerator is not None else "cpu"
    from torch.distributed.device_mesh import init_device_mesh

    axes = {DP_REPLICATE: dp_replicate} if dp_replicate > 1 else {}
    axes[DP_SHARD if cp == 1 else DP_SHARD_CP] = dp_shard * cp
    with careful_gloo():
        mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        whole = mesh if cp == 1 else split_axis(mesh, DP_SHARD_CP, {DP_SHARD: dp_shard, CP: cp})
    for axis in axes:
        connect_neighbours(mesh.get_group(axis))
    if cp > 1:
        connect_neighbours(whole.get_group(CP))
        shard_parameters_on(mesh, of=whole)
    remember_made(whole)
    return whole


@dataclass(frozen=True)
class _ShardedOn:
    """The mesh on which a model was sharded; that of its parameters has no ``cp``."""

    mesh: "DeviceMesh"


def remember_mesh(model: torch.nn.Module, mesh: "DeviceMesh") -> None:
    """Note the mesh on which ``model`` was sharded."""
    record_of(model).keep(_ShardedOn(mesh))


def training_mesh_of(model: torch.nn.Module) -> "DeviceMesh | None":
    """The mesh of a model that all ranks of the job train together; None for a model of this process alone.

    Raises:
        UnsupportedModelError: If some ranks of the job do not hold the model.
    """
    mesh = mesh_of(model)
    if mesh is not None and mesh.size() != world_size():
        raise UnsupportedModelError(
            f"{type(unwrapped(model)).__name__} is on {mesh}, which leaves out some of the {world_size()} "
            "ranks of this job: ranks agree, count and sum over the whole job. Shard it on build_mesh(), or "
            "start a job for each model"
        )
    return mesh


def mesh_of(model: torch.nn.Module) -> "DeviceMesh | None":
    """The mesh on which a model was sharded, or None for an ordinary model.

    Of a model that ``shard_model`` has not sharded it is that of the parameters. For a model inside
    DistributedDataParallel it is a mesh of one axis, over the ranks of its process group.

    Raises:
        WrappedModelError: If the model is in a wrapper whose ranks cannot be determined.
        UnsupportedModelError: If the model is split into stages of a pipeline.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    def of_parameters() -> "DeviceMesh | None":
        meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
        # With expert parallelism, experts are on a mesh of their own, which does not show how rows are
        # distributed. Of the other parameters' meshes the largest does: parameters that tensor parallelism
        # does not split are on a part of it.
        dense = [mesh for mesh in meshes if EP not in (mesh.mesh_dim_names or ())]
        return max(dense or meshes, key=lambda mesh: mesh.size(), default=None)

    known = kept_of(model, _ShardedOn)
    mesh = known.mesh if known is not None else native_mesh(unwrapped(model)) or of_parameters()
    if mesh is not None and PP in (mesh.mesh_dim_names or ()):
        raise UnsupportedModelError(
            f"{type(unwrapped(model)).__name__} is cut into stages of a pipeline, which "
            "one forward does not run through: load it with pp_size=1"
        )
    if mesh is None and any(isinstance(module, FSDPModule) for module in model.modules()):
        reshard(model)  # gathered parameters are plain tensors
        mesh = of_parameters()
    if mesh is not None and replicated_by(model) is None:
        return mesh
    replicas = replicas_of(model)
    if mesh is not None and replicas is not None:
        raise WrappedModelError(
            f"{type(unwrapped(model)).__name__} has sharded parameters inside DistributedDataParallel: ranks "
            "of two kinds, which cannot be told apart; shard on build_mesh(dp_replicate=...)"
        )
    return _mesh_over(replicas, model) if replicas is not None else None


def _mesh_over(group: dist.ProcessGroup, model: torch.nn.Module) -> "DeviceMesh":
    """A mesh of one axis over a process group."""
    from torch.distributed.device_mesh import DeviceMesh

    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(DP_REPLICATE,))


def reshard(model: torch.nn.Module) -> None:
    """Shard all FSDP2 parameters of ``model`` that are gathered; does nothing to an ordinary model.

    After a forward without a backward the root's parameters stay gathered (torch's default), so all code that
    reads or writes parameters calls this first.

    After an error in a forward or a backward, what it has left is dropped.

    Raises:
        WrappedModelError: If the model is in a wrapper that hides its parameters.
        UnsupportedModelError: If parameters were replaced since the first forward.
    """
    from torch.distributed.fsdp import FSDPModule

    replicas_of(model)
    if is_broken_off(model):
        forget_failed_iteration(model)
    replaced: list[tuple[torch.nn.Module, str]] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            replaced += replaced_parameters(module)
            keep_trained_flags(module)
            module.reshard()
    if replaced:
        fqns = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
        names = [f"{fqns.get(id(module), '?')}.{name}" for module, name in replaced]
        raise UnsupportedModelError(
            f"{abridged(names)} were replaced after the first forward of the sharded model: FSDP2 computes "
            "with the parameters that it has sharded, and puts them back. Replace them before shard_model, "
            "or change their values under torch.no_grad(): parameter.copy_(distribute_tensor(value, "
            "parameter.device_mesh, parameter.placements)), of torch.distributed.tensor"
        )


def compute_device(model: torch.nn.Module) -> torch.device:
    """The device on which ``model`` computes, which with CPU offload is not the device of its shards."""
    mesh = mesh_of(model)
    if mesh is not None:
        if mesh.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(mesh.device_type, torch.accelerator.current_device_index())
    parameter = next(model.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")


def sum_over_mesh(values: list[float], mesh: "DeviceMesh | None") -> list[float]:
    """Element-wise float64 sum over the ranks of ``mesh``; a copy of ``values`` without a mesh.

    Collective: all ranks, if there is a mesh.
    """
    return list(values) if mesh is None else all_reduce_sum(values)


def raise_on_mesh(error: Exception | None, phase: str, mesh: "DeviceMesh | None") -> None:
    """Raise the first error of any rank on all ranks; without a mesh this rank's own.

    Collective: all ranks, if there is a mesh.
    """
    if mesh is not None:
        raise_first(error, phase)
    elif error is not None:
        raise error


def device_groups_of(mesh: "DeviceMesh | None") -> tuple[dist.ProcessGroup, ...]:
    """Groups for device tensors: collectives over one after the other reach all ranks of ``mesh``."""
    if mesh is None or mesh.size() == 1:
        return ()
    return tuple(mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1)


def ranks_on_host() -> int:
    """Number of processes of this job on this host; that of all processes if the launcher does not tell."""
    try:
        launch = detect_launch()
    except ValueError:
        return world_size()
    return world_size() if launch.launcher == "single" else launch.local_world_size


def _existing_launch() -> Launch:
    """This process's place in the process group that the caller has made."""
    world_size = dist.get_world_size()
    local_rank = env_int("LOCAL_RANK") if "LOCAL_RANK" in os.environ else None
    if local_rank is None and is_slurm_step() and "SLURM_LOCALID" in os.environ:
        local_rank = env_int("SLURM_LOCALID")
    rank = dist.get_rank()
    local_world_size = env_int("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else world_size
    if local_rank is None:
        # The launcher does not say, so assume that ranks are assigned to the node's devices in order.
        devices = torch.accelerator.device_count() if torch.accelerator.is_available() else world_size
        local_rank = rank % max(devices, 1)
    return Launch("existing", rank, local_rank, world_size, local_world_size, None)


def _say_what_was_found(launch: Launch, device: torch.device) -> None:
    """Log rank, device and launcher."""
    details = f" ({launch.details})" if launch.details else ""
    _logger.info(
        "rank %d of %d on %s, %s, launcher: %s%s",
        *(launch.rank, launch.world_size, socket.gethostname(), device, launch.launcher, details),
    )
    if launch.hint and launch.rank == 0:
        _logger.warning("%s", launch.hint)


def _check_devices(device: torch.device) -> None:
    """Refuse two ranks on one GPU, which NCCL would refuse only in its first collective.

    Other backends can share a GPU, so only NCCL is checked.
    """
    if device.type != "cuda" or "nccl" not in _backend_name():
        return
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    shared = _shared_device(all_gather_objects((socket.gethostname(), uuid)))
    if shared is not None:
        raise ValueError(
            f"ranks {shared} share one GPU on {socket.gethostname()}: this process sees "
            f"{torch.accelerator.device_count()}{_visible('cuda')}; start one process per GPU"
        )


def _shared_device(devices: list[tuple[str, str]]) -> list[int] | None:
    """The first ranks that have the same (host, device); None if no two have."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(device, []).append(rank)
    return next((sharing for sharing in ranks.values() if len(sharing) > 1), None)


def _visible(device_type: str) -> str:
    """The environment variable that says which devices this process may see, and its value, for messages."""
    name = _VISIBLE.get(device_type)
    return "" if name is None else f" ({name}={os.environ.get(name, 'unset')})"


def _select_device(device_type: str, launch: Launch) -> torch.device:
    """The device of this process, made the current one if it is an accelerator's."""
    if device_type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device_type:
        raise ValueError(
            f"device_type={device_type!r}, but this process sees "
            f"{'no accelerator' if accelerator is None else accelerator.type}; use device_type='cpu' or "
            f"check the driver and {_VISIBLE.get(device_type, 'which devices it may see')}"
        )
    count = torch.accelerator.device_count()
    # If the launcher shows each process a single GPU, that GPU has the index 0 in every process.
    index = 0 if count == 1 else launch.local_rank
    if index >= count:
        raise ValueError(
            f"local rank {launch.local_rank} has no device of its own: this process sees {count} of type "
            f"{device_type}{_visible(device_type)}; start "
            f"at most {count} processes on this node, or show each of them its own device only"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)


def _default_backend(device_type: str) -> str:
    """Backend for a device type: gloo for the CPU, and torch's own for an accelerator beside it."""
    if device_type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def _backend_name() -> str:
    """Backend of the default process group, in one word if one backend serves all devices."""
    by_device = dist.get_backend_config()  # "cpu:gloo,cuda:gloo" if one backend serves all devices
    backends = {entry.partition(":")[2] for entry in by_device.split(",")}
    return backends.pop() if len(backends) == 1 else by_device


def _beside(cp: int) -> str:
    """What a message about the ranks adds where there is ``cp``."""
    return f" that cp={cp} leaves" if cp > 1 else ""


def _divisors(number: int) -> list[int]:
    """All divisors of a number."""
    return [d for d in range(1, number + 1) if number % d == 0]
