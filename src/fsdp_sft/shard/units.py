"""The FSDP2 groups of a model as a table: modules, mesh, policy, and what happens after the forward."""

import functools
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from fsdp_sft._compat.fsdp import compute_apart
from fsdp_sft._compat.modules import apply_to_tensors
from fsdp_sft._model.blocks import is_never_called
from fsdp_sft._model.view import base_of, original_class, transformers_models
from fsdp_sft._tensors.boxes import local_of


@dataclass(frozen=True)
class Unit:
    """One FSDP2 group: modules whose parameters are gathered together, and how.

    Attributes:
        modules: The modules.
        policy: Dtypes of their computation.
        reshard: What becomes of the gathered parameters after a forward; None is torch's own default.
        experts: Mesh of the module, if it is experts that are divided among ranks.
        beside_root: Whether it is the input embedding or the head in its own group.
    """

    modules: list[nn.Module]
    policy: MixedPrecisionPolicy
    reshard: bool | int | None
    experts: DeviceMesh | None = None
    beside_root: bool = False


def units_of(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    kept: Collection[int],
    policy: MixedPrecisionPolicy,
    reshard: bool | int,
    placed: "Mapping[int, DeviceMesh]",
) -> list[Unit]:
    """The groups of a model, inner before outer, as ``fully_shard`` requires; the last is the root's."""
    # transformers' models cast by themselves, and some need float32 tensors passed between blocks (OLMo's
    # rotary embedding, T5's residual).
    casts = next(transformers_models(model), None) is None and policy.cast_forward_inputs
    of_blocks = replace(policy, cast_forward_inputs=casts)
    units = [Unit(modules, of_blocks, False) for modules in _tied_across_blocks(model, blocks)]
    taken = [module for unit in units for module in unit.modules]
    are_blocks = {id(block) for block in blocks.values()}
    for module in reversed(list(model.modules())):
        is_group = id(module) in are_blocks or id(module) in placed
        if is_group and module is not model and module not in taken:
            units.append(Unit([module], of_blocks, reshard, experts=placed.get(id(module))))
            taken.append(module)
    embedding, head = own_vocabulary(base_of(model), taken, kept)
    inner = replace(of_blocks, output_dtype=None)
    if embedding is not None:
        units.append(Unit([embedding], inner, bool(reshard), beside_root=True))
    if head is not None:
        # Mamba casts to the dtype of the head's weight, which is the shards' before the head is gathered.
        # Its backward follows its forward.
        units.append(
            Unit(
                [head],
                replace(inner, cast_forward_inputs=policy.cast_forward_inputs),
                False,
                beside_root=True,
            )
        )
    return [*units, Unit([model], policy, None)]


def shard_unit(
    unit: Unit, mesh: DeviceMesh, offload: OffloadPolicy, by_rows: Collection[int], kept: Collection[int]
) -> None:
    """Shard the modules of a unit as one FSDP2 group.

    Args:
        unit: The group.
        mesh: Mesh of the parameters, but for experts that are divided among ranks.
        offload: Where shards are kept.
        by_rows: Ids of parameters that are cut along the first dimension.
        kept: Ids of parameters that compute in float32.
    """
    num_ranks, experts, reshard = mesh.size(), unit.experts, unit.reshard
    if experts is not None:
        mesh, reshard = experts, bool(reshard)
    in_float32 = {
        (inner, name)
        for module in unit.modules
        for inner in module.modules()
        for name, parameter in inner.named_parameters(recurse=False)
        if id(parameter) in kept
    }
    # With a number for reshard_after_forward each rank keeps one run of the gathered bytes after a forward.
    # torch's code for that supports the first dimension only.
    first_only = type(reshard) is int
    fully_shard(  # type: ignore[call-overload]
        unit.modules,
        mesh=mesh,
        mp_policy=unit.policy,
        offload_policy=offload,
        shard_placement_fn=None
        if first_only
        else functools.partial(_placement, num_shards=mesh.size(mesh.ndim - 1), by_rows=by_rows),
        **({} if reshard is None else {"reshard_after_forward": reshard}),
    )
    sharded: Any = next(module for module in unit.modules if isinstance(module, FSDPModule))
    if in_float32:
        compute_apart(sharded, in_float32, replace(unit.policy, param_dtype=torch.float32))
    if experts is not None:
        # Gradients of experts are sums over the tokens of all ranks, but are reduced over only the ranks with
        # the same experts, by whose number FSDP2 would divide.
        sharded.set_gradient_divide_factor(float(num_ranks))
        if mesh.size(mesh.ndim - 1) > 1:
            # torch would divide by a premultiplied sum, which gloo does not support and NCCL loses in
            # bfloat16 (pytorch#190747). On one rank it divides without this, and with it would do so twice.
            sharded.set_force_sum_reduction_for_comms(True)
    if unit.beside_root and reshard:
        # An embedding's weight is freed after its forward, and gathered for a backward only if that needs it.
        sharded.set_unshard_in_backward(needs_weight_in_backward(sharded))
        sharded.register_forward_pre_hook(_free_in_training)


def _placement(parameter: nn.Parameter, num_shards: int, by_rows: Collection[int]) -> Shard | None:
    """Placement of a parameter's shards; None leaves it to FSDP2, as for tensors with their own gather."""
    if hasattr(parameter, "fsdp_pre_all_gather") or id(parameter) in by_rows:
        return None
    dim = shard_dim(tuple(local_of(parameter).shape), num_shards)
    return Shard(dim) if dim else None


def cast_shards(
    module: nn.Module,
    master_dtype: torch.dtype,
    frozen_dtype: torch.dtype | None,
    copied: Collection[nn.Module],
) -> None:
    """Cast the shards of a group to their stored dtypes; ``copied`` are modules that peft made copies of."""
    # peft's trained copies take their first values from these modules, and would start from rounded ones.
    exact = {id(p) for inner in module.modules() if inner in copied for p in inner.parameters()}

    def wanted(tensor: torch.Tensor) -> torch.dtype:
        if not isinstance(tensor, DTensor) or not tensor.is_floating_point():
            return tensor.dtype  # a buffer, or an integer parameter of a quantised layer
        dtype = master_dtype if tensor.requires_grad or id(tensor) in exact else frozen_dtype
        return dtype or tensor.dtype

    if any(wanted(parameter) != parameter.dtype for parameter in module.parameters()):
        apply_to_tensors(module, lambda tensor: tensor.to(wanted(tensor)))


def _tied_across_blocks(model: nn.Module, blocks: Mapping[str, nn.Module]) -> list[list[nn.Module]]:
    """Lists of modules that share a parameter across blocks; each list has to be one group.

    torch 2.13 and later refuse a parameter that lies in two groups. A layer that several blocks share
    (Zamba's attention) therefore needs its own group. A tied embedding and head both lie in the root's
    group and need none.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    groups: dict[tuple[str, ...], list[nn.Module]] = {}
    for names in all_names(model).values():
        owners = sorted({innermost(name, list(blocks)) for name in names})
        if len(owners) < 2:
            continue
        members = groups.setdefault(tuple(owners), [])
        for name in names:
            module = modules[name.rpartition(".")[0]]
            if all(module is not member for member in members):
                members.append(module)
    return list(groups.values())


# Input embedding and head, where they are not tied, in groups of their own. In the root's group both would
# stay gathered for the whole step, and their gradients would be reduced through one buffer: 9.5 GiB in
# float32 for 248,320 tokens and a width of 5,120 (NVIDIA-NeMo/Automodel#3708). So the embedding is freed
# after its forward, and not gathered for its backward, which does not need it; the head is gathered from its
# forward to its backward.


def own_vocabulary(
    model: nn.Module, taken: Iterable[nn.Module], kept: Collection[int] = ()
) -> tuple[nn.Module | None, nn.Module | None]:
    """The input embedding and the head of a model, each None if it has to stay in the root's group.

    A module stays there if it shares a parameter, has another name too, lies in another group, or computes in
    float32. FSDP2 gathers at a call, and only of transformers' own models is it known that they call both:
    another may use the weight alone.

    Args:
        model: The model, without adapters around it.
        taken: Modules that are groups already.
        kept: Ids of parameters that compute in float32.
    """
    names = all_names(model)
    if not original_class(model).__module__.startswith("transformers."):
        return None, None
    inside = {id(inner) for module in taken for inner in module.modules()}

    def found(getter: str) -> nn.Module | None:
        try:
            module = getattr(model, getter)()
        except (AttributeError, NotImplementedError):
            return None
        if not isinstance(module, nn.Module) or id(module) in inside or is_never_called(module):
            return None
        own = [id(parameter) for parameter in module.parameters()]
        alone = bool(own) and all(len(names[one]) == 1 and one not in kept for one in own)
        return module if alone else None

    embedding, head = found("get_input_embeddings"), found("get_output_embeddings")
    return embedding, None if head is embedding else head


def needs_weight_in_backward(embedding: nn.Module) -> bool:
    """Whether an embedding's backward may need its weight; that of ``nn.Embedding`` needs the ids alone."""
    return getattr(type(embedding), "forward", None) is not nn.Embedding.forward


def reshard_together(*modules: Any) -> None:
    """``reshard()`` of the root, for which embedding and head follow as if they were in its group.

    torch's method frees the group of one module only, and after a forward without a backward ``zero_grad``
    would miss the gradients of their shards.
    """
    for module in modules:
        FSDPModule.reshard(module)


def _free_in_training(embedding: Any, _args: Any) -> None:
    """Keep the weight gathered without gradients: ``generate`` would gather it again for each token."""
    embedding.set_reshard_after_forward(torch.is_grad_enabled(), recurse=False)


# The dimension along which FSDP2 shards each parameter, and how evenly the shards fall on the ranks.
#
# FSDP2 shards the first dimension by default, and pads every rank's shard to the size of the largest. With
# eight experts and 64 ranks, eight ranks get an expert each and 56 get none, but all 64 hold memory for one.
# Another dimension can be chosen only if the number of ranks divides its size.

MOST_IMBALANCE = 1.05  # largest shard divided by the mean shard; above it another dimension is tried


@functools.lru_cache(maxsize=65536)
def shard_dim(shape: tuple[int, ...], num_shards: int) -> int:
    """Dimension to shard: the first, unless that is uneven and ``num_shards`` divides a later one."""
    if not shape or not math.prod(shape):
        return 0
    imbalance = -(-shape[0] // num_shards) * num_shards / shape[0]  # of the first dimension
    if imbalance <= MOST_IMBALANCE:
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % num_shards == 0), 0)


def shard_numel(shape: tuple[int, ...], num_shards: int, dim: int | None = None) -> int:
    """Elements that each rank has memory for: the largest shard along ``dim`` (None: ``shard_dim``)."""
    if not shape:
        return 1
    dim = shard_dim(shape, num_shards) if dim is None else dim
    return -(-shape[dim] // num_shards) * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


# Names of parameters, for dividing a model into groups.


def all_names(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its id."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def innermost(name: str, groups: list[str]) -> str:
    """The innermost of ``groups`` that contains the parameter ``name``; ``""`` is the root."""
    return max((fqn for fqn in groups if not fqn or name.startswith(f"{fqn}.")), key=len, default="")


def without_indices(name: str) -> str:
    """A name with ``*`` for each index, by which the blocks of a list are alike."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
