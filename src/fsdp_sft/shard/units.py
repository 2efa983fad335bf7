"""The FSDP2 groups of a model as a table: modules, mesh, policy, and what happens after the forward."""

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from fsdp_sft._compat.models import original_class
from fsdp_sft._compat.modules import apply_to_tensors
from fsdp_sft._tensors.boxes import local_of
from fsdp_sft._tensors.sharding import shard_dim
from fsdp_sft.shard.float32_modules import Float32Plan, Float32Unit, cast_at_use, gather_with
from fsdp_sft.shard.names import all_names, innermost

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Unit:
    """One FSDP2 group: modules whose parameters are gathered together, and how.

    Attributes:
        modules: The modules.
        policy: Dtypes of their computation.
        reshard: What becomes of the gathered parameters after a forward; None is torch's own default.
        experts: Mesh of the module, if it is experts that are divided among ranks.
        float32: The module's parts that do not compute in float32, if it does.
        beside_root: Whether it is the input embedding or the head in its own group.
    """

    modules: list[nn.Module]
    policy: MixedPrecisionPolicy
    reshard: bool | int | None
    experts: "DeviceMesh | None" = None
    float32: Float32Unit | None = None
    beside_root: bool = False


def units_of(
    model: nn.Module,
    base: nn.Module,
    blocks: Mapping[str, nn.Module],
    plan: Float32Plan,
    policy: MixedPrecisionPolicy,
    reshard: bool | int,
    placed: "Mapping[int, DeviceMesh]",
) -> list[Unit]:
    """The groups of a model, inner before outer, as ``fully_shard`` requires; the last is the root's."""
    of_blocks = policy if plan.casts_inputs else replace(policy, cast_forward_inputs=False)
    in_float32 = replace(policy, cast_forward_inputs=False, param_dtype=torch.float32, output_dtype=None)
    units = []
    for modules in _tied_across_blocks(model, blocks):
        kept = all(id(p) in plan.kept for module in modules for p in module.parameters())
        units.append(Unit(modules, in_float32 if kept else of_blocks, False))
    done = {id(module) for unit in units for module in unit.modules}
    are_blocks = {id(block) for block in blocks.values()}
    for module in reversed(list(model.modules())):
        if module is model or id(module) in done:
            continue
        experts = placed.get(id(module))
        float32 = plan.units.get(id(module)) if experts is None else None
        others = [other for other in float32.others if id(other) not in done] if float32 is not None else []
        if others:
            units.append(Unit(others, of_blocks, reshard))
            done.update(map(id, others))
        if experts is not None or float32 is not None or id(module) in are_blocks:
            own = of_blocks if float32 is None else in_float32
            units.append(Unit([module], own, reshard, experts=experts, float32=float32))
            done.add(id(module))
    taken = [module for unit in units for module in unit.modules]
    embedding, head = own_vocabulary(base, taken, plan.kept)
    inner = replace(of_blocks, output_dtype=None)
    if embedding is not None:
        units.append(Unit([embedding], inner, bool(reshard), beside_root=True))
    if head is not None:
        # Mamba casts to the dtype of the head's weight, which is the shards' before the head is gathered.
        casts = replace(inner, cast_forward_inputs=policy.cast_forward_inputs)
        units.append(Unit([head], casts, False, beside_root=True))  # its backward follows its forward
    return [*units, Unit([model], policy, None)]


def shard_unit(
    unit: Unit,
    mesh: "DeviceMesh",
    offload: OffloadPolicy,
    by_rows: Collection[int],
    usual: torch.dtype | None,
) -> None:
    """Shard the modules of a unit as one FSDP2 group.

    Args:
        unit: The group.
        mesh: Mesh of the parameters, but for experts that are divided among ranks.
        offload: Where shards are kept.
        by_rows: Ids of parameters that are cut along the first dimension.
        usual: Dtype of what does not compute in float32 within a group that does.
    """
    num_ranks, experts, reshard = mesh.size(), unit.experts, unit.reshard
    if experts is not None:
        mesh, reshard = experts, bool(reshard)
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
    if experts is not None:
        _divide_by_all_ranks(unit.modules[0], experts, num_ranks)
    if unit.beside_root and reshard:
        _free_early(unit.modules[0])
    if unit.float32 is not None and unit.float32.user is not None:
        gather_with(unit.float32.user, unit.float32.module)
    for owner, names in unit.float32.casts if unit.float32 is not None else ():
        cast_at_use(owner, names, usual or torch.float32)


def _placement(parameter: nn.Parameter, num_shards: int, by_rows: Collection[int]) -> Shard | None:
    """Placement of a parameter's shards; None leaves it to FSDP2, as for tensors with their own gather."""
    if hasattr(parameter, "fsdp_pre_all_gather") or id(parameter) in by_rows:
        return None
    dim = shard_dim(tuple(local_of(parameter).shape), num_shards)
    return Shard(dim) if dim else None


def _divide_by_all_ranks(module: nn.Module, mesh: "DeviceMesh", num_ranks: int) -> None:
    """Let FSDP2 divide the gradients of experts by the number of all ranks, as those of other parameters.

    They are sums over the tokens of all ranks, but are reduced over only the ranks with the same experts, by
    whose number FSDP2 would divide.
    """
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(float(num_ranks))
    if mesh.size(mesh.ndim - 1) > 1:
        # torch would divide by a premultiplied sum, which gloo does not support and NCCL loses in bfloat16
        # (pytorch#190747). On one rank it divides without this, and with it would do so twice.
        module.set_force_sum_reduction_for_comms(True)


def checked_offload(policy: OffloadPolicy | None) -> OffloadPolicy:
    """The policy, without pinned memory if there is no accelerator."""
    if policy is None:
        return OffloadPolicy()
    if isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and not torch.accelerator.is_available():
        return CPUOffloadPolicy(pin_memory=False)
    return policy


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


def set_prefetch(blocks: list[nn.Module], prefetch: int) -> None:
    """Let each block's forward gather the next ``prefetch`` blocks."""
    sharded: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for i, block in enumerate(sharded):
        if following := sharded[i + 1 : i + 1 + prefetch]:
            block.set_modules_to_forward_prefetch(following)


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
    if not original_class(model).__module__.startswith("transformers."):
        return None, None
    names = all_names(model)
    inside = {id(inner) for module in taken for inner in module.modules()}

    def found(getter: str) -> nn.Module | None:
        try:
            module = getattr(model, getter)()
        except (AttributeError, NotImplementedError):
            return None
        if not isinstance(module, nn.Module) or id(module) in inside:
            return None
        own = [id(parameter) for parameter in module.parameters()]
        alone = bool(own) and all(len(names[one]) == 1 and one not in kept for one in own)
        return module if alone else None

    embedding, head = found("get_input_embeddings"), found("get_output_embeddings")
    return embedding, None if head is embedding else head


def needs_weight_in_backward(embedding: nn.Module) -> bool:
    """Whether an embedding's backward may need its weight; that of ``nn.Embedding`` needs the ids alone."""
    return getattr(type(embedding), "forward", None) is not nn.Embedding.forward


def follow_root(model: nn.Module, beside: list[nn.Module]) -> None:
    """Let embedding and head in groups of their own follow the root, as if they were in its group.

    ``model.reshard()`` frees them too: torch's method frees the group of one module only, and after a forward
    without a backward ``zero_grad`` would miss the gradients of their shards.
    """
    if beside:
        model.__dict__["reshard"] = functools.partial(_reshard, model, *beside)


def _reshard(*modules: Any) -> None:
    """``FSDPModule.reshard`` of the root, and of embedding and head in their own groups."""
    for module in modules:
        type(module).reshard(module)


def _free_early(embedding: Any) -> None:
    """Free a sharded embedding's weight after its forward; gather it for a backward only if that needs it."""
    embedding.set_unshard_in_backward(needs_weight_in_backward(embedding))
    embedding.register_forward_pre_hook(_free_in_training)


def _free_in_training(embedding: Any, _args: Any) -> None:
    """Keep the weight gathered without gradients: ``generate`` would gather it again for each token."""
    embedding.set_reshard_after_forward(torch.is_grad_enabled(), recurse=False)
