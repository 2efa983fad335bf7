"""The ranks of the job as a mesh: how it is made, who shares rows, and where parameters are sharded."""

import itertools
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_sft._compat.groups import careful_gloo, split_axis
from fsdp_sft._process.devices import default_device_type
from fsdp_sft._ranks.agree import all_reduce_sum, connect_neighbours, this_rank, world_size

DP_REPLICATE = "dp_replicate"
DP_SHARD = "dp_shard"
CP = "cp"  # context parallelism: ranks have the same rows, and each computes some of their tokens
DP_SHARD_CP = "dp_shard_cp"  # dp_shard and cp flattened to one axis

_PARAMETERS = "parameters"
# Pipeline: ranks have different layers; tensor parallelism: parts of each; experts: different ones.
_OF_LAYERS = {"pp", "tp", "ep"}

# The meshes that build_mesh has made, by the default process group of then. They are kept even if the caller
# has dropped them: torch's caches hold some of them anyway, and Python collects the others at different times
# on different ranks, which would then share rows in different ways.
_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[DeviceMesh]]" = weakref.WeakKeyDictionary()


def made_of(mesh: DeviceMesh) -> dict[Any, Any]:
    """The meshes and groups that were made of a mesh once, by what they are for.

    They are kept on the mesh: in a dictionary, meshes of the same shape would share one entry, since they
    compare equal.
    """
    return mesh.__dict__.setdefault("_fsdp_sft_made_of", {})  # type: ignore[no-any-return]


def mesh_of_job(given: DeviceMesh | None = None) -> DeviceMesh | None:
    """The mesh of a call without a model: the given one, or the one that ``build_mesh`` has made.

    Returns:
        A mesh over all ranks of the job; None if none was made, and all ranks have different rows.

    Raises:
        ValueError: If ``given`` leaves out ranks of the job; or if none is given and several were made with
            different ``cp``, since a call without a model cannot know which is meant.
    """
    if given is not None:
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


def shares_rows_elsewhere(mesh: DeviceMesh) -> bool:
    """Whether no ranks share rows in ``mesh``, and some do in another that this process has made."""
    return CP not in (mesh.mesh_dim_names or ()) and any(cp_size(other) > 1 for other in _present())


def _present() -> "list[DeviceMesh]":
    """The meshes made in the current process group."""
    world = dist.group.WORLD
    return [] if world is None else _made.get(world, [])


def parameter_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that parameters are sharded on: ``mesh``, its ``dp_shard`` and ``cp`` flattened to one axis.

    Raises:
        ValueError: If ``mesh`` has an axis ``cp`` and is not from ``build_mesh``.
    """
    if CP not in (mesh.mesh_dim_names or ()):
        return mesh
    found: DeviceMesh | None = made_of(mesh).get(_PARAMETERS)
    if found is None:
        raise ValueError(
            f"a mesh with context parallelism has to be made by build_mesh(cp=...), got {mesh}: fully_shard "
            "would take its axes for replicas and shards"
        )
    return found


def layer_axes(mesh: DeviceMesh | None) -> set[str]:
    """The axes of a mesh along which ranks have the same rows, and different layers or parts of layers."""
    return _OF_LAYERS & set(mesh.mesh_dim_names or () if mesh is not None else ())


def cp_size(mesh: DeviceMesh | None) -> int:
    """Number of ranks that share the tokens of a row; 1 without context parallelism.

    Raises:
        ValueError: If ``mesh`` is the flattened one of the parameters, which hides which ranks share rows.
    """
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if DP_SHARD_CP in names:
        raise ValueError(
            f"{mesh} is the parameters' own mesh, with dp_shard and cp in one axis; give the mesh that "
            "build_mesh returned"
        )
    return mesh[CP].size() if mesh is not None and CP in names else 1


def data_parallel_place(mesh: DeviceMesh) -> tuple[int, int]:
    """(index of this rank's share of the rows, number of shares); ranks along ``cp`` have the same share.

    Raises:
        ValueError: If this rank is not in the mesh, or ``cp_size`` refuses the mesh.
    """
    place, each = mesh.mesh.flatten().tolist().index(this_rank()), cp_size(mesh)
    return place // each, mesh.size() // each  # cp is the last axis


def row_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ranks that have this rank's rows, the first of which reads and counts them; None if no other has.

    Raises:
        ValueError: If ``cp_size`` refuses the mesh.
    """
    return mesh.get_group(CP) if mesh is not None and cp_size(mesh) > 1 else None


def place_of_rows(mesh: Any) -> tuple[int, ...]:
    """This rank's coordinates in a mesh, but for that along ``cp``: the same for ranks that share rows."""
    names = mesh.mesh_dim_names or itertools.repeat("")  # a mesh of torch need not have names
    return tuple(at for at, name in zip(mesh.get_coordinate() or (), names, strict=False) if name != CP)


def exchange_groups(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """The axes along which ranks exchange parameters, gradients and rows, each with its group."""
    own, sharing = parameter_mesh(mesh), row_group(mesh)
    groups = {name: own.get_group(name) for name in own.mesh_dim_names or () if own[name].size() > 1}
    return groups if sharing is None else {**groups, CP: sharing}


def build_mesh(
    *, dp_replicate: int = 1, dp_shard: int | None = None, cp: int = 1, device_type: str | None = None
) -> DeviceMesh:
    """Arrange all ranks in a mesh for data parallelism and, if ``cp`` is given, context parallelism.

    Rows are distributed to ``dp_replicate x dp_shard`` groups of ``cp`` neighbouring ranks, each of which
    works on its part of the group's rows (``use_context_parallel``). ``shard_model`` shards parameters over
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
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("build_mesh needs a process group: call fsdp_sft.init_distributed() first")
    num_ranks = world_size()
    if dp_shard is None:
        dp_shard = max(1, num_ranks // max(1, cp * dp_replicate))
    if dp_replicate * dp_shard * cp != num_ranks:
        product = f"dp_replicate={dp_replicate} x dp_shard={dp_shard}" + (f" x cp={cp}" if cp != 1 else "")
        raise ValueError(
            f"{product} makes {dp_replicate * dp_shard * cp} ranks, but the job has {num_ranks}: leave "
            "dp_shard out to use all that the others leave, which have to divide the number of ranks"
        )
    device_type = device_type or default_device_type()
    axes = {DP_REPLICATE: dp_replicate} if dp_replicate > 1 else {}
    axes[DP_SHARD if cp == 1 else DP_SHARD_CP] = dp_shard * cp
    with careful_gloo():
        mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        whole = mesh if cp == 1 else split_axis(mesh, DP_SHARD_CP, {DP_SHARD: dp_shard, CP: cp})
    if cp > 1:
        made_of(whole)[_PARAMETERS] = mesh
    for group in exchange_groups(whole).values():
        connect_neighbours(group)
    made = [*_present(), whole]
    _made.clear()  # a mesh keeps its group alive, also one that has ended
    _made[world] = made
    return whole


def sum_over_mesh(values: list[float], mesh: DeviceMesh | None) -> list[float]:
    """Element-wise float64 sum over all ranks of the job, if a model has a mesh; else a copy of ``values``.

    A mesh holds all ranks (``training_mesh_of`` refuses others), so it says whether there is anything to add.

    Collective: all ranks, if there is a mesh.
    """
    return list(values) if mesh is None else all_reduce_sum(values)
