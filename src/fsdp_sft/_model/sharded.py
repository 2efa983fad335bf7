"""A sharded model: its mesh, its device, its memory, and what its gradients must not have."""

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.fsdp import gradient_divide_factors, keeps_shards_on_host, native_axes
from fsdp_sft._compat.models import initialise_computed
from fsdp_sft._compat.modules import apply_to_tensors, has_grad_hooks, has_hooks
from fsdp_sft._model.published import published
from fsdp_sft._model.twin import meta_twin
from fsdp_sft._model.view import (
    clean_name,
    named_tensors,
    record_of,
    replicas_of,
    replicated_by,
    reshard,
    slot,
    transformers_models,
    unwrapped,
)
from fsdp_sft._process.devices import resolve_device
from fsdp_sft._process.generators import unmoved
from fsdp_sft._ranks.agree import world_size
from fsdp_sft._ranks.mesh import DP_REPLICATE, layer_axes
from fsdp_sft.errors import UnsupportedModelError, abridged


def training_mesh_of(model: nn.Module) -> DeviceMesh | None:
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


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh on which a model was sharded, or None for an ordinary model.

    For a model that ``shard_model`` has not sharded it is that of the parameters; inside
    DistributedDataParallel, a mesh of one axis over the ranks of the process group.

    Raises:
        UnsupportedModelError: If the model is in a wrapper whose ranks cannot be determined, or is cut into
            stages of a pipeline or along layers (tensor parallelism).
    """
    mesh: DeviceMesh | None = record_of(model).mesh or _mesh_of_parameters(model)
    if others := layer_axes(mesh).union(native_axes(unwrapped(model))):
        raise UnsupportedModelError(
            f"{type(unwrapped(model)).__name__} is cut into stages or along layers ({', '.join(others)}), "
            "and ranks have the same rows: load it by fsdp_size, with ep_size or without (of "
            "DistributedConfig), or use shard_model"
        )
    if mesh is None and any(isinstance(module, FSDPModule) for module in model.modules()):
        reshard(model)  # gathered parameters are plain tensors
        mesh = _mesh_of_parameters(model)
    if mesh is not None and replicated_by(model) is None:
        return mesh
    replicas = replicas_of(model)
    if mesh is not None:
        raise UnsupportedModelError(
            f"{type(unwrapped(model)).__name__} has sharded parameters inside DistributedDataParallel: ranks "
            "of two kinds, which cannot be told apart; shard on build_mesh(dp_replicate=...)"
        )
    if replicas is None:
        return None
    return DeviceMesh.from_group(
        replicas,
        next(model.parameters(), torch.empty(0)).device.type,
        mesh_dim_names=(DP_REPLICATE,),
    )


def _mesh_of_parameters(model: nn.Module) -> DeviceMesh | None:
    """The mesh of a model's parameters that shows how rows are distributed; None without shards.

    It is the largest, and not that of layers of which ranks have different ones, such as experts.
    """
    return max(
        (p.device_mesh for p in model.parameters() if isinstance(p, DTensor)),
        key=lambda mesh: (not layer_axes(mesh), mesh.size()),
        default=None,
    )


def refuse_changed_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Refuse gradients that are not the ranks' mean: of another divisor, or with hooks that do not run.

    Raises:
        UnsupportedModelError: If ``set_gradient_divide_factor`` was called with another number than that of
            the ranks which share the rows, or a trained parameter has such hooks.
    """
    if others := gradient_divide_factors(model) - {None, mesh.size()}:
        raise UnsupportedModelError(
            f"set_gradient_divide_factor({others.pop()}) was called on the model or on a module in it, and "
            f"its loss is weighed for gradients that are averaged over {mesh.size()} ranks. Leave the call "
            "out: the loss of a window is the mean over its targets on all ranks"
        )
    refuse_hooks(model, are_shards=True)


def refuse_hooks(model: nn.Module, *, are_shards: bool) -> None:
    """Refuse trained parameters with hooks that do not run once the model is sharded.

    Args:
        model: The model.
        are_shards: Whether it is sharded already.

    Raises:
        UnsupportedModelError: If there are any. A post-accumulate-grad hook runs if it is registered on a
            shard, and is lost if it was registered before.
    """
    hooked = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and (has_hooks(parameter) or (not are_shards and has_grad_hooks(parameter)))
    ]
    if hooked:
        raise UnsupportedModelError(
            f"{abridged(hooked)} have hooks that do not run, or see the gradient of one rank: FSDP2 computes "
            "with gathered parameters and reduces their gradients itself. A hook that "
            "parameter.register_post_accumulate_grad_hook is given after shard_model runs: as "
            "hook(parameter), with this rank's shard of the reduced gradient in parameter.grad"
        )


def materialise(model: nn.Module, packed: Collection[int] = ()) -> torch.device:
    """Give every meta tensor memory: shards where FSDP2 keeps them, the rest on the device that computes.

    Args:
        model: The model.
        packed: Ids of the parameters that get none, since their shards will be packed.

    Returns:
        The device of the shards.
    """
    named = named_tensors(model)
    sharded = [tensor for tensor in named.values() if isinstance(tensor, DTensor)]
    device = next(iter(named.values())).device
    if sharded and sharded[0].device_mesh.device_type != "cpu":
        device = resolve_device(None)  # a mesh says only the type
    elif sharded or device.type == "meta":
        device = torch.device("cpu")
    shard_device = torch.device("cpu") if keeps_shards_on_host(model) else device
    made: dict[int, torch.Tensor] = {}
    for name, tensor in named.items():
        if tensor.is_meta and not isinstance(tensor, DTensor):
            if id(tensor) not in made:
                fresh = torch.empty_like(tensor, device=device)
                made[id(tensor)] = (
                    nn.Parameter(fresh, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
                )
            setattr(*slot(model, name), made[id(tensor)])

    def with_memory(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta or id(tensor) in packed:
            return tensor
        # Not DTensor.from_local, which moves shards that stay on the host to the mesh's device.
        return torch.empty_like(tensor, device=shard_device)

    if any(tensor.is_meta for tensor in sharded):
        apply_to_tensors(model, with_memory)
    return shard_device


def give_memory(model: nn.Module) -> None:
    """Give a model on the meta device memory and its computed buffers, for a file of all else; others stay.

    Raises:
        ValueError: If it has buffers on the meta device that belong in no file, and that transformers does
            not compute.
    """
    with published(model) as base:
        tensors, computed = named_tensors(base), dict[str, torch.Tensor]()
        if not any(tensor.is_meta for named in (tensors, named_tensors(model)) for tensor in named.values()):
            return
        with unmoved():
            for prefix, inner in transformers_models(base):
                own = initialise_computed(meta_twin(inner), set())
                computed.update({prefix + name: value for name, value in own.items()})
        in_files = {*map(clean_name, base.state_dict()), *computed}
        lost = [name for name, tensor in tensors.items() if tensor.is_meta and name not in in_files]
        if lost:
            raise ValueError(
                f"{abridged(lost)} of {type(base).__name__} are on the meta device, and belong in no file: "
                "give the model memory with model.to_empty(device=...), and these buffers values, before"
            )
    materialise(model)
    with published(model) as base:
        for name in (name for name in computed.keys() & tensors.keys() if tensors[name].is_meta):
            value = computed[name].to(base.get_buffer(name).device, tensors[name].dtype)
            setattr(*slot(base, name), value)


def compute_device(model: nn.Module) -> torch.device:
    """The device on which ``model`` computes, which with CPU offload is not that of its shards."""
    mesh = mesh_of(model)
    if mesh is None:
        return next(model.parameters(), torch.empty(0)).device
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
