"""The ranks of the job as a mesh: which share rows, and which mesh parameters are sharded on."""

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from fsdp_sft._agree import world_size
from fsdp_sft._compat import careful_gloo

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

CP = "cp"  # context parallelism: ranks have the same rows, and each computes some of their tokens
PP = "pp"  # pipeline parallelism: ranks have different layers
TP = "tp"  # tensor parallelism: layers are split over the ranks, and all of these have the same rows
EP = "ep"  # expert parallelism: each rank has experts of its own
DP_SHARD_CP = "dp_shard_cp"  # dp_shard and cp flattened to one axis

# Attribute of a mesh with cp: the mesh that parameters are sharded on. It is an attribute and not an entry of
# a dictionary, because meshes of the same shape compare equal and would share one entry.
_PARAMETER_MESH = "_fsdp_sft_parameter_mesh"
_HOST_GROUPS = "_fsdp_sft_host_groups"
# The meshes that build_mesh has made in the present default process group. They are kept, also if the caller
# has dropped them: torch's caches hold some of them anyway, and when Python collects the others differs from
# rank to rank. Ranks would then share rows in different ways.
_made: "list[DeviceMesh]" = []
_made_in: "weakref.ref[dist.ProcessGroup] | None" = None


def shard_parameters_on(mesh: "DeviceMesh", *, of: "DeviceMesh") -> None:
    """Record that parameters of ``of`` lie on ``mesh``: the same ranks, ``dp_shard`` and ``cp`` flattened."""
    setattr(of, _PARAMETER_MESH, mesh)


def remember_made(mesh: "DeviceMesh") -> None:
    """Note a mesh for calls that get no model and no mesh."""
    global _made_in
    _made[:] = [*_present(), mesh]
    world = dist.group.WORLD
    assert world is not None  # a mesh has groups
    _made_in = weakref.ref(world)


def mesh_of_job(given: "DeviceMesh | None" = None) -> "DeviceMesh | None":
    """The mesh of a call without a model: the one that is given, or the one that ``build_mesh`` has made.

    Returns:
        A mesh over all ranks of the job; None if none was made, and every rank has rows of its own.

    Raises:
        TypeError: If what is given is no mesh.
        ValueError: If it leaves ranks of the job out; or if none is given and several were made that share
            rows in different ways (other ``cp``), since a call without a model cannot know which is meant.
    """
    if given is not None:
        if not hasattr(given, "mesh_dim_names"):
            raise TypeError(f"mesh must be a DeviceMesh, as build_mesh() makes one, got {given!r}")
        if given.size() != world_size():
            raise ValueError(
                f"{given} leaves out some of the {world_size()} ranks, which all train together: "
                "give the mesh that build_mesh() returns, or start a job for these ranks alone"
            )
        return given
    different = {cp_size(mesh): mesh for mesh in _present()}
    if len(different) > 1:
        axes = " and ".join(repr(mesh) for mesh in different.values())
        raise ValueError(
            f"this process has made {axes}, which share rows in different ways: say by mesh= for which one "
            "this call is"
        )
    return next(iter(different.values()), None)


def has_made_cp() -> bool:
    """Whether this process has made a mesh with ``cp``."""
    return any(cp_size(mesh) > 1 for mesh in _present())


def _present() -> "list[DeviceMesh]":
    """The meshes made in the process group of now."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return _made if world is not None and _made_in is not None and _made_in() is world else []


def parameter_mesh(mesh: "DeviceMesh") -> "DeviceMesh":
    """The mesh that parameters are sharded on: ``mesh``, its ``dp_shard`` and ``cp`` flattened to one axis.

    Raises:
        TypeError: If ``mesh`` is none.
        ValueError: If ``mesh`` has an axis ``cp`` and is not from ``build_mesh``.
    """
    if not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(f"mesh must be a DeviceMesh, as build_mesh() makes one, got {mesh!r}")
    if CP not in (mesh.mesh_dim_names or ()):
        return mesh
    found: DeviceMesh | None = getattr(mesh, _PARAMETER_MESH, None)
    if found is None:
        raise ValueError(
            f"a mesh with context parallelism has to be made by build_mesh(cp=...), got {mesh}: fully_shard "
            "would take its axes for replicas and shards"
        )
    return found


def cp_size(mesh: "DeviceMesh | None") -> int:
    """Number of ranks that share the tokens of a row; 1 without context parallelism.

    Raises:
        ValueError: If ``mesh`` is the flattened one of the parameters, which does not show which ranks share
            rows.
    """
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if DP_SHARD_CP in names:
        raise ValueError(f"{mesh} is that of parameters sharded over dp_shard and cp; give build_mesh's")
    return mesh[CP].size() if mesh is not None and CP in names else 1


def cp_rank(mesh: "DeviceMesh | None") -> int:
    """Index of the part of each row that this rank computes; 0 without context parallelism."""
    return mesh.get_local_rank(CP) if cp_size(mesh) > 1 and mesh is not None else 0


def data_parallel_place(mesh: "DeviceMesh") -> tuple[int, int]:
    """(index of this rank's share of the rows, number of shares); ranks along ``cp`` have one share together.

    Raises:
        ValueError: If this rank is not in the mesh, or ``cp_size`` refuses the mesh.
    """
    coordinate, each = mesh.get_coordinate(), cp_size(mesh)
    if coordinate is None:
        raise ValueError(f"this rank is not in {mesh}")
    place = 0
    for size, index in zip(mesh.shape, coordinate, strict=True):
        place = place * size + index
    return place // each, mesh.size() // each  # cp is the last axis


@dataclass(frozen=True)
class SameRows:
    """Ranks that are given the same whole rows, as tensor parallelism needs.

    Attributes:
        size: Number of ranks in the group.
        rank: Index of this rank in the group.
        share: Index of the group, which is also the index of its share of the data.
    """

    size: int
    rank: int
    share: int


def same_rows_in(mesh: "DeviceMesh | None") -> SameRows | None:
    """This rank's group on a model's mesh; None where every rank has rows of its own."""
    names = () if mesh is None else mesh.mesh_dim_names or ()
    # A model whose only mesh is that of its experts has every other parameter on every rank, and all ranks
    # are given the same rows.
    axis = TP if TP in names else EP if EP in names else None
    if mesh is None or axis is None or mesh[axis].size() == 1:
        return None
    share = 0
    for name, size, index in zip(names, mesh.shape, mesh.get_coordinate() or (), strict=True):
        share = share if name == axis else share * size + index
    return SameRows(mesh[axis].size(), mesh.get_local_rank(axis), share)


def copies_of_rows(mesh: "DeviceMesh | None") -> int:
    """Number of ranks of a model's mesh that are given each row; 1 where every rank has rows of its own."""
    same = same_rows_in(mesh)
    return 1 if same is None else same.size


def host_group(mesh: "DeviceMesh", axis: str) -> dist.ProcessGroup:
    """This rank's process group along an axis, for tensors in host memory.

    It is the mesh's own group if that takes CPU tensors, and otherwise one that is made once.

    Collective: all ranks of the mesh, the first time.
    """
    group = mesh.get_group(axis)
    if "cpu" in dist.get_backend_config(group):
        return group
    groups: dict[str, dist.ProcessGroup] = mesh.__dict__.setdefault(_HOST_GROUPS, {})
    if axis not in groups:
        from torch.distributed.device_mesh import init_device_mesh

        with careful_gloo():
            on_host = init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names)
        groups.update({name: on_host.get_group(name) for name in mesh.mesh_dim_names or ()})
    return groups[axis]
