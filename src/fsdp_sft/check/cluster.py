"""A job that is checked: its ranks, their hosts, and what was asked for."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft._ranks.init import DistributedContext
from fsdp_sft._ranks.mesh import CP, build_mesh, parameter_mesh
from fsdp_sft.check.environment import place, usable_processors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from fsdp_sft.jobs.watchdog import Watchdog

# Accelerators that compute beside the host, at a speed that does not depend on how busy it is.
_OWN_CLOCK = ("cuda", "xpu", "hpu", "npu", "mtia")


@dataclass(frozen=True)
class Asked:
    """What is to be trained, as far as the checks use it.

    Attributes:
        config: A transformers config; None for one of our own.
        root: The folder of the run; None without.
        replicas: As ``build_mesh(dp_replicate=)``.
        cp: As ``build_mesh(cp=)``.
        ep_size: As ``shard_model(ep_size=)``.
        compile: Whether the blocks are compiled.
        frozen_dtype: As ``shard_model(frozen_dtype=)``, below adapters; None trains all parameters.
        seconds: For all checks together.
    """

    config: Any = None
    root: Path | None = None
    replicas: int = 1
    cp: int = 1
    ep_size: int = 1
    compile: bool = False
    frozen_dtype: str | None = None
    seconds: float = 120.0


@dataclass
class Cluster:
    """The ranks of a job, and what its checks have measured so far.

    Attributes:
        context: This rank's place.
        asked: What was asked for.
        hosts: The host of each rank.
        turn: Place of this rank among those of its host.
        turns: The most ranks that a host has.
        crowding: The most ranks that share a processor, at least 1: checks take so much longer.
        folder: A new folder for the checks' own files, which goes at the end; None without.
        folder_problem: Why there is none; "" if none was asked for, or it could be made.
        folder_ranks: The ranks on which there is none.
        measured: By check, what it measured.
        mesh: That of the training, once ``mesh_of`` has made it.
        watchdog: The one that the checks are below, if any.
    """

    context: DistributedContext
    asked: Asked
    hosts: list[str]
    turn: int
    turns: int
    crowding: float
    folder: Path | None = None
    folder_problem: str = ""
    folder_ranks: tuple[int, ...] = ()
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    mesh: "DeviceMesh | None" = None
    watchdog: "Watchdog | None" = None

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.context.device

    @property
    def rank(self) -> int:
        """This rank."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.context.world_size

    @property
    def has_own_clock(self) -> bool:
        """Whether a rank's speed is its device's, and not that of a processor that ranks share."""
        return self.device.type in _OWN_CLOCK

    @property
    def scale(self) -> float:
        """How much longer than usual checks may measure."""
        return self.asked.seconds / 120.0

    @property
    def no_folder(self) -> str:
        """Why what needs the folder cannot be seen."""
        problem = self.folder_problem
        return f"there is no folder ({problem})" if problem else "no folder for files: give --root"

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len(set(self.hosts))

    def hosts_of(self, ranks: tuple[int, ...]) -> list[str]:
        """The hosts of some ranks, each once."""
        return sorted({self.hosts[rank] for rank in ranks})

    def on(self, rank: int) -> str:
        """A rank in words, with its host if there are several."""
        return f"rank {rank} on {self.hosts[rank]}" if self.num_hosts > 1 else f"rank {rank}"


def make_cluster(context: DistributedContext, asked: Asked) -> Cluster:
    """The job of all ranks.

    Collective: all ranks.
    """
    everyone = all_gather_objects((place()["host"], usable_processors()))
    hosts = [host for host, _ in everyone]
    own = [rank for rank, host in enumerate(hosts) if host == hosts[context.rank]]
    sharing = {host: hosts.count(host) for host in hosts}
    crowding = max(sharing[host] / processors for host, processors in everyone)
    turns = max(sharing.values())
    return Cluster(context, asked, hosts, own.index(context.rank), turns, max(1.0, crowding))


def mesh_of(cluster: Cluster) -> "DeviceMesh":
    """The mesh of the planned training, made once.

    Collective: all ranks, the first time.
    """
    if cluster.mesh is None:
        asked = cluster.asked
        cluster.mesh = build_mesh(dp_replicate=asked.replicas, cp=asked.cp, device_type=cluster.device.type)
    return cluster.mesh


def axes_of(cluster: Cluster) -> "dict[str, ProcessGroup]":
    """The axes of the mesh along which ranks exchange parameters, gradients and rows, each with its group.

    Collective: all ranks, the first time.
    """
    mesh = mesh_of(cluster)
    own = parameter_mesh(mesh)
    names = {name: own for name in own.mesh_dim_names or () if own[name].size() > 1}
    if cluster.asked.cp > 1:
        names[CP] = mesh
    return {name: of.get_group(name) for name, of in names.items()}
