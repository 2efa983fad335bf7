"""The job that is checked, and what may be wrong with it."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from fsdp_sft._ranks.agree import agreed, all_gather_objects, share
from fsdp_sft._ranks.init import DistributedContext
from fsdp_sft._ranks.mesh import CP, build_mesh, parameter_mesh
from fsdp_sft._tensors.disk import full_path

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Accelerators that compute beside the host, at a rate that does not depend on how busy it is.
ACCELERATORS = ("cuda", "xpu", "hpu", "npu", "mtia")
_LEFT_BEHIND = 3600.0  # seconds, in which no check lets its folder be


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes:
        level: ``"fail"``: the job would fail, or train wrongly or slowly. ``"warn"``: worth a look.
        ranks: The ranks that have it; () if it is not of single ranks.
        text: What is wrong and what to do.
        exclude: Whether the job would be well without the nodes of these ranks.
    """

    level: Literal["fail", "warn"]
    ranks: tuple[int, ...]
    text: str
    exclude: bool = False


Found = tuple[str, list[Problem]]
"""What a check returns, the same on all ranks: what was seen, in a few words, and what is wrong."""


@dataclass
class CheckedJob:
    """The ranks of a job, and the training that is checked.

    Attributes:
        context: This rank's place.
        hosts: The host of each rank.
        config: A transformers config of few layers.
        mesh: The mesh of the training, a ``DeviceMesh``.
        ep_size: As ``shard_model(ep_size=)``.
        compile: Whether the blocks are compiled.
        frozen_dtype: As ``shard_model(frozen_dtype=)``, below adapters; None trains all parameters.
        folder: A new folder for files, which all ranks see; None without.
        measured: Rates and sizes, for ``check.json``.
    """

    context: DistributedContext
    hosts: list[str]
    config: Any = None
    mesh: Any = None
    ep_size: int = 1
    compile: bool = False
    frozen_dtype: str | None = None
    folder: Path | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.context.device

    @property
    def rank(self) -> int:
        """This rank."""
        return self.context.rank

    @property
    def is_accelerated(self) -> bool:
        """Whether each rank has a device of its own, whose rate says something of the device."""
        return self.device.type in ACCELERATORS

    def hosts_of(self, ranks: tuple[int, ...]) -> list[str]:
        """The hosts of some ranks, each once."""
        return sorted({self.hosts[rank] for rank in ranks})


def make_job(
    context: DistributedContext, host: str, *, replicas: int = 1, cp: int = 1, **training: Any
) -> CheckedJob:
    """The job of all ranks; ``training`` has further attributes of ``CheckedJob``.

    Collective: all ranks.
    """
    mesh = build_mesh(dp_replicate=replicas, cp=cp, device_type=context.device.type)
    return CheckedJob(context, all_gather_objects(host), mesh=mesh, **training)


def axes_of(job: CheckedJob) -> "dict[str, ProcessGroup]":
    """The axes of the mesh along which ranks exchange parameters, gradients and rows, each with its group."""
    own = parameter_mesh(job.mesh)
    axes = {name: own for name in own.mesh_dim_names or () if own[name].size() > 1}
    if CP in (job.mesh.mesh_dim_names or ()) and job.mesh[CP].size() > 1:
        axes[CP] = job.mesh
    return {name: mesh.get_group(name) for name, mesh in axes.items()}


@contextmanager
def folder_below(job: CheckedJob, root: Path | None) -> Iterator[None]:
    """Context with a folder for the checks' files below the run's; a temporary one on a single host.

    Collective: all ranks.
    """
    made = None
    with agreed("making a folder for the checks"):
        if job.rank == 0 and (root is not None or len(set(job.hosts)) == 1):
            if root is not None:
                root.mkdir(parents=True, exist_ok=True)
                _sweep(root)
            made = Path(tempfile.mkdtemp(prefix=".check-", dir=None if root is None else full_path(root)))
    job.folder = share(made)
    try:
        yield
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Remove what checks that were killed have left."""
    for folder in root.glob(".check-*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _LEFT_BEHIND:
                shutil.rmtree(folder)
