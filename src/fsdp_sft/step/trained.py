"""Checks that trained tensors get their gradients from the reduction over all ranks and from nothing else."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.fsdp import hooked_while_gathered
from fsdp_sft._compat.models import original_class
from fsdp_sft._model.adapters import refuse_merged
from fsdp_sft._model.named import parameter_names
from fsdp_sft._model.record import record_of
from fsdp_sft._model.sharded import refuse_own_divisor
from fsdp_sft._model.wrappers import replicated_by, unwrapped
from fsdp_sft._ranks.agree import world_size
from fsdp_sft._ranks.mesh import DP_REPLICATE, copies_of_rows, raise_on_mesh
from fsdp_sft._tensors.packed_shard import bits_of
from fsdp_sft.errors import OptimizerError, UnsupportedModelError, abridged
from fsdp_sft.shard.apply import refuse_hooks
from fsdp_sft.step.optimizers import stepped_by

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class _Modules:
    """Findings about the modules of a trained model; None before they are looked at.

    Attributes:
        norms: Those that may keep statistics of their inputs, by name; their modes may change unnoticed.
    """

    norms: dict[str, nn.Module] | None = None


def refuse_beside(
    names: dict[nn.Parameter, str], optimizers: list[torch.optim.Optimizer], mesh: "DeviceMesh | None"
) -> None:
    """Refuse to step tensors that have a gradient and are no parameters of the model.

    Raises:
        OptimizerError: If an optimizer holds one.
    """
    if mesh is None or mesh.size() == 1 or copies_of_rows(mesh) > 1:
        return
    beside = [
        parameter
        for parameter in stepped_by(*optimizers)
        if parameter.grad is not None and parameter not in names
    ]
    if beside:
        raise OptimizerError(
            f"the optimizer steps {len(beside)} tensors (the first of shape {tuple(beside[0].shape)}) that "
            "are none of the model's parameters: no reduction over the ranks reaches them, and each rank "
            "would train its own. Register them in the model before it is sharded"
        )


def refuse_untrainable(
    model: nn.Module,
    names: dict[nn.Parameter, str],
    optimizers: list[torch.optim.Optimizer],
    mesh: "DeviceMesh | None",
) -> None:
    """Refuse a model that cannot be trained as it is.

    Args:
        model: Model, whose parameters are not gathered.
        names: Its parameters with their names.
        optimizers: Those that step them.
        mesh: Ranks that share the window.

    Raises:
        OptimizerError: If nothing is trained.
        RuntimeError: If gradients are off.
        UnsupportedModelError: If adapters are merged into it, if gradients of its parameters would not be
            reduced, or if a module keeps running statistics of its inputs, which are those of this rank's
            rows.
    """
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "gradients are off here (torch.no_grad, torch.inference_mode or set_grad_enabled(False)), and a "
            "step needs them: call train_step outside of that block"
        )
    if not any(parameter.requires_grad for parameter in (*names, *stepped_by(*optimizers))):
        raise OptimizerError(
            "no parameter is trained: all are frozen. Set requires_grad of those that are to be trained"
        )
    if not any(parameter.requires_grad for parameter in stepped_by(*optimizers)):
        raise OptimizerError(
            "no parameter of the optimizer is trained, so that a step would change nothing: make it of those "
            "that require a gradient (adapters go in before that, and before sharding)"
        )
    refuse_merged(model, "training")
    looked = record_of(model).kept_or_new(_Modules)
    if looked.norms is None:
        looked.norms = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
            and not isinstance(module, nn.SyncBatchNorm)
        }
    if mesh is not None and mesh.size() > 1 and isinstance(unwrapped(model), FSDPModule):
        _refuse_running_statistics(looked.norms)
    _refuse_unreduced(model, names, mesh)


def _refuse_unreduced(model: nn.Module, names: dict[nn.Parameter, str], mesh: "DeviceMesh | None") -> None:
    """Refuse trained parameters whose gradients are not reduced over the ranks, or not as they have to be.

    Args:
        model: Model, whose parameters are not gathered.
        names: Its parameters with their names.
        mesh: Ranks that share the window.

    Raises:
        UnsupportedModelError: If a trained parameter is not sharded, or has a hook that would not run.
    """
    if mesh is None:
        _refuse_alone(model)
    if mesh is None or mesh.size() == 1 or copies_of_rows(mesh) > 1:
        return
    is_sharded = any(isinstance(parameter, DTensor) for parameter in names)
    if replicated_by(model) is not None or not is_sharded:
        return
    whole = [n for p, n in names.items() if p.requires_grad and not isinstance(p, DTensor)]
    if whole:
        raise UnsupportedModelError(
            f"{len(whole)} trained parameters are not sharded ({abridged(whole)}): no reduction over the "
            "ranks reaches them, and each rank would train its own. Add them before shard_model (adapters by "
            "add_adapters, or load_pretrained(peft_config=)), or freeze them with requires_grad_(False)"
        )
    refuse_own_divisor(model, mesh)
    refuse_hooks(names, are_shards=True, gathered=hooked_while_gathered(model))


def _refuse_alone(model: nn.Module) -> None:
    """Refuse a model of this process alone in a job of several."""
    name, started = type(unwrapped(model)).__name__, os.environ.get("WORLD_SIZE", "1")
    if world_size() > 1:
        raise UnsupportedModelError(
            f"{name} is neither sharded nor inside DistributedDataParallel, so that each of the "
            f"{world_size()} ranks would train a model of its own: call shard_model(model, "
            "mesh=build_mesh()) before the optimizer is made"
        )
    if not dist.is_initialized() and started.isdecimal() and int(started) > 1:
        raise UnsupportedModelError(
            f"{started} processes were started (WORLD_SIZE) and have not met, so that each would train a "
            "model of its own: call init_distributed() first, and shard the model. Processes that are meant "
            "to be apart have no WORLD_SIZE in their environment"
        )


def _refuse_running_statistics(norms: dict[str, nn.Module]) -> None:
    for name, module in norms.items():
        if module.training and module.track_running_stats:
            raise UnsupportedModelError(
                f"{name} ({original_class(module).__name__}) keeps running statistics of its rank's rows, "
                "so that ranks would end with different models. Put it into eval() after model.train(), or "
                "take a norm without statistics"
            )


@contextmanager
def gradients_past_reduction(model: nn.Module, names: dict[nn.Parameter, str]) -> Iterator[list[str]]:
    """Within the block, note the sharded parameters whose gradients come from autograd and not from FSDP2.

    FSDP2 computes with gathered parameters and writes the reduced gradient of a shard itself. Autograd
    reaches a shard only if something uses it directly, such as a penalty on the weights.

    Args:
        model: Model, whose parameters are not gathered.
        names: Its parameters with their names; empty notes nothing.
    """
    found: list[str] = []
    is_sharded = isinstance(unwrapped(model), FSDPModule)
    with ExitStack() as hooks:
        for parameter, name in names.items():
            if is_sharded and parameter.requires_grad and isinstance(parameter, DTensor):
                hooks.enter_context(parameter.register_hook(lambda _, name=name: found.append(name)))
        yield found


def refuse_past_reduction(names: list[str], mesh: "DeviceMesh | None") -> None:
    """Raise on all ranks if any rank has noted parameters in ``gradients_past_reduction``.

    Collective: all ranks of the mesh.
    """
    error = _uses_shards(str(abridged(dict.fromkeys(names))))
    raise_on_mesh(error if names else None, "looking at where gradients come from", mesh)


def refuse_sharded_loss(loss: object) -> None:
    """Raise for a loss that is a DTensor, as a term of sharded parameters makes it."""
    if isinstance(loss, DTensor):
        raise _uses_shards("parameters")


def _uses_shards(of: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the loss uses the shards of {of} directly, past FSDP2's reduction: each rank would add that "
        "gradient once more. Compute a term of the weights in the forward of the module that holds them, "
        "where they are gathered, or take the optimizer's weight_decay"
    )


def has_replicas(model: nn.Module, mesh: "DeviceMesh | None") -> bool:
    """Whether several ranks hold the same shards of a model that was sharded."""
    names = () if mesh is None else mesh.mesh_dim_names or ()
    is_sharded = isinstance(unwrapped(model), FSDPModule)
    return is_sharded and mesh is not None and DP_REPLICATE in names and mesh[DP_REPLICATE].size() > 1


def refuse_different_replicas(model: nn.Module, mesh: "DeviceMesh | None") -> None:
    """Refuse replicas with different values: their gradients are averaged, so they would stay different.

    The bits of each parameter's shard are added up as integers, which is the same on any hardware.

    Collective: all ranks of the mesh, which read each parameter once.
    """
    assert mesh is not None
    names, sums = [], []
    for parameter, name in parameter_names(model).items():
        names.append(name)
        sums.append(_sum_of_bits(bits_of(parameter.detach())).to(mesh.device_type))
    own = torch.stack(sums)
    most, least = own.clone(), own.clone()
    group = mesh.get_group(DP_REPLICATE)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=group)
    apart = [name for name, differs in zip(names, (most != least).tolist(), strict=True) if differs]
    error = UnsupportedModelError(
        f"the replicas of {len(apart)} parameters begin with different values ({abridged(apart)}): their "
        "gradients are averaged and they never meet. Load the weights, or seed every rank alike before the "
        "model is made (torch.manual_seed)"
    )
    raise_on_mesh(error if apart else None, "comparing the replicas of the model", mesh)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()]).sum(dtype=torch.int64)
