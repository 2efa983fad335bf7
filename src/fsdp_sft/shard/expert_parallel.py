"""Expert parallelism: each rank holds some experts whole, and tokens travel to the ranks of their experts."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_sft._compat.experts import experts_to_place, place_experts_on
from fsdp_sft._compat.groups import careful_gloo, split_axis
from fsdp_sft._model.published import published
from fsdp_sft._model.view import original_class
from fsdp_sft._ranks.mesh import DP_REPLICATE, DP_SHARD, made_of
from fsdp_sft.errors import UnsupportedModelError, abridged

EXPERTS_SHARD = (
    "efsdp"  # transformers' name for the axis along which FSDP2 shards the experts that a rank holds
)
EP, _ALONE = "ep", "alone"  # axes of ranks that have different experts, and of each rank by itself

# Dtypes in which FSDP2 expects no overflow of a gradient reduction. In others it divides once before and
# once after, and so twice where a group is one rank, as of experts over all ranks (torch 2.13).
_DIVIDED_ONCE = (torch.float32, torch.bfloat16)


def place_experts(
    model: nn.Module, mesh: DeviceMesh, ep_size: int, reduced: torch.dtype
) -> "dict[int, DeviceMesh]":
    """Keep only this rank's part of the experts; an ``ep_size`` of 1 changes nothing.

    Neighbouring ranks form a group that holds all experts, so that tokens need not leave a node whose ranks
    are one group. Parameters keep their names and, as DTensors, the shape of all experts.

    Args:
        model: Model on the meta device, not sharded yet; adapters of other layers are already inside.
        mesh: Mesh that ``shard_model`` will be given.
        ep_size: Number of ranks that hold all experts between them.
        reduced: Dtype in which gradients are reduced.

    Returns:
        By the id of each module of experts, the mesh of the ranks that hold the same ones, over which FSDP2
        shards them. Its first axis is that of the replicas, where there are any.

    Raises:
        ValueError: If ``ep_size`` does not divide the ranks or the experts (the message lists values that
            do), the mesh has ``cp``, the experts are not on the meta device, or FSDP2 would divide their
            gradients twice, as it does where it reduces those of one rank in float16 or float64.
        UnsupportedModelError: If transformers has no plan for the model's experts, or there are adapters or
            trained copies of them (``modules_to_save``).

    Collective: all ranks of the mesh.
    """
    if ep_size == 1:
        return {}
    names = mesh.mesh_dim_names or ("",)
    if names[-1] != DP_SHARD:  # neighbours along it share the experts
        raise ValueError(f"ep_size={ep_size} needs a mesh of build_mesh without cp, got {mesh}")
    shards = mesh[DP_SHARD].size()
    if ep_size == shards and reduced not in _DIVIDED_ONCE:
        raise ValueError(
            f"ep_size={ep_size} of all {shards} ranks along {DP_SHARD} needs reduce_dtype=torch.float32 or "
            f"bfloat16, got {reduced}: FSDP2 would divide gradients of experts by the ranks twice"
        )
    with published(model) as base:
        experts = experts_to_place(base)
        modules = [base.get_submodule(fqn) for fqn in experts]
    name = original_class(base).__name__
    if not experts:
        raise UnsupportedModelError(
            f"transformers has no plan by which ranks share out the experts of {name} (ep_plan): use "
            "ep_size=1, which shards them as other parameters are"
        )
    if any(base.get_submodule(fqn) is not module for fqn, module in zip(experts, modules, strict=True)):
        raise UnsupportedModelError(
            "ranks cannot share out experts that peft adapts (target_parameters, all-linear) or copies "
            f"(modules_to_save): {abridged(experts)}; use ep_size=1, or adapters of other layers"
        )
    if not all(p.is_meta for module in modules for p in module.parameters()):
        raise ValueError(
            f"ep_size={ep_size} needs a model on the meta device (build_meta_model), whose weights are "
            "loaded afterwards (load_weights)"
        )
    fits = [n for n in range(1, shards + 1) if not shards % n and not any(e % n for e in experts.values())]
    if ep_size not in fits:
        raise ValueError(
            f"ep_size={ep_size} does not divide the {shards} ranks along {DP_SHARD} and the "
            f"{sorted(set(experts.values()))} experts of {name}; use one of {fits}"
        )
    kept = made_of(mesh)
    if ep_size not in kept:
        sizes = {EXPERTS_SHARD: mesh[DP_SHARD].size() // ep_size, EP: ep_size, _ALONE: 1}
        with careful_gloo():
            kept[ep_size] = split_axis(mesh, DP_SHARD, sizes)
    parts = kept[ep_size]
    axes = (DP_REPLICATE, EXPERTS_SHARD) if DP_REPLICATE in names else (EXPERTS_SHARD,)
    with published(model) as base:
        place_experts_on(base, parts[EP], parts[_ALONE])
    return {id(module): parts[axes] for module in modules}
