"""Meshes whose ranks share rows: who shares with whom, and what parameters are sharded on."""

import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist

from fsdp_sft._compat import careful_gloo

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

CP = "cp"
EP = "ep"  # the axis along which each rank has experts of its own
DP_SHARD_CP = "dp_shard_cp"  # the axis that dp_shard and cp are together

# On a mesh with cp: the mesh that parameters are sharded on. Meshes of one shape are equal, so that none can
# be the key to another.
_PARAMETER_MESH = "_fsdp_sft_parameter_mesh"
_HOST_GROUPS = "_fsdp_sft_host_groups"
_with_cp: "list[weakref.ref[DeviceMesh]]" = []


def shard_parameters_on(mesh: "DeviceMesh", *, of: "DeviceMesh") -> None:
    """Note that ``mesh`` has the ranks of ``of``, with its ``dp_shard`` and ``cp`` as one axis."""
    setattr(of, _PARAMETER_MESH, mesh)
    _with_cp.append(weakref.ref(of, _with_cp.remove))


def parameter_mesh(mesh: "DeviceMesh") -> "DeviceMesh":
    """The mesh that parameters are sharded on: ``mesh``, or with its ``dp_shard`` and ``cp`` as one axis.

    Raises:
        ValueError: If ``mesh`` has an axis ``cp`` and is not from ``build_mesh``.
    """
    if CP not in (mesh.mesh_dim_names or ()):
        return mesh
    found: DeviceMesh | None = getattr(mesh, _PARAMETER_MESH, None)
    if found is None:
        raise ValueError(
            f"a mesh with context parallelism has to be made by build_mesh(cp=...), got {mesh}: fully_shard "
            "would take its axes for replicas and shards"
        )
    return found


def has_context_parallelism() -> bool:
    """Whether this process has a mesh with ``cp``: "all ranks" then no longer says who has which rows."""
    return any(mesh() is not None for mesh in _with_cp)


def cp_size(mesh: "DeviceMesh | None") -> int:
    """Ranks that share the tokens of a row; 1 without context parallelism.

    Raises:
        ValueError: For the mesh of parameters, which does not say who shares rows.
    """
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if DP_SHARD_CP in names:
        raise ValueError(f"{mesh} is that of parameters sharded over dp_shard and cp; give build_mesh's")
    return mesh[CP].size() if mesh is not None and CP in names else 1


def cp_rank(mesh: "DeviceMesh | None") -> int:
    """Which part of its rows this rank has; 0 without context parallelism."""
    return mesh.get_local_rank(CP) if cp_size(mesh) > 1 and mesh is not None else 0


def data_parallel_place(mesh: "DeviceMesh") -> tuple[int, int]:
    """(index of this rank's share of the rows, number of shares); ranks along ``cp`` have the same.

    Raises:
        ValueError: If this rank is not in the mesh, or as ``cp_size``.
    """
    coordinate, each = mesh.get_coordinate(), cp_size(mesh)
    if coordinate is None:
        raise ValueError(f"this rank is not in {mesh}")
    place = 0
    for size, index in zip(mesh.shape, coordinate, strict=True):
        place = place * size + index
    return place // each, mesh.size() // each  # cp is the last axis


def host_group(mesh: "DeviceMesh", axis: str) -> dist.ProcessGroup:
    """This rank's group along an axis, for tensors in host memory: the mesh's own, where it takes them.

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
