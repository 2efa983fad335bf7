"""The FSDP2 groups of a model as a table: modules, mesh, policy, and what happens after the forward."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

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

from fsdp_sft._compat.models import keep_in_float32_patterns
from fsdp_sft._compat.modules import apply_to_tensors
from fsdp_sft._model.wrappers import base_of, transformers_models
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._tensors.boxes import local_of
from fsdp_sft._tensors.sharding import shard_dim
from fsdp_sft.shard.embeddings import free_early, own_vocabulary
from fsdp_sft.shard.expert_parallel import ExpertPlacement, expert_placement
from fsdp_sft.shard.float32_modules import (
    Float32Unit,
    cast_at_use,
    float32_units,
    gather_with,
    kept_parameters,
    lower_buffers,
    matches,
    plain_dtypes,
)
from fsdp_sft.shard.names import all_names, innermost, without_indices

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Unit:
    """One FSDP2 group: modules whose parameters are gathered together, and how.

    Attributes:
        modules: The modules.
        policy: Dtypes of their computation.
        reshard: What becomes of the gathered parameters after a forward; None is torch's own default.
        experts: Placement of the module, if it is experts that are divided among ranks.
        float32: The module's parts that do not compute in float32, if it does.
        beside_root: Whether it is the input embedding or the head in its own group.
    """

    modules: list[nn.Module]
    policy: MixedPrecisionPolicy
    reshard: bool | int | None
    experts: ExpertPlacement | None = None
    float32: Float32Unit | None = None
    beside_root: bool = False


def units_of(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    plan: "Float32Plan",
    policy: MixedPrecisionPolicy,
    reshard: bool | int,
) -> list[Unit]:
    """The groups of a model, inner before outer, as ``fully_shard`` requires; the last is the root's."""
    of_blocks, in_float32 = plan.policies(policy)
    units = []
    for modules in _tied_across_blocks(model, blocks):
        kept = all(id(p) in plan.kept for module in modules for p in module.parameters())
        units.append(Unit(modules, in_float32 if kept else of_blocks, False))
    done = {id(module) for unit in units for module in unit.modules}
    are_blocks = {id(block) for block in blocks.values()}
    for module in reversed(list(model.modules())):
        if module is model or id(module) in done:
            continue
        experts = expert_placement(module)
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
    embedding, head = own_vocabulary(base_of(model), taken, plan.kept)
    inner = replace(of_blocks, output_dtype=None)
    if embedding is not None:
        units.append(Unit([embedding], inner, bool(reshard), beside_root=True))
    if head is not None:
        # Mamba casts to the dtype of the head's weight, which is the shards' before the head is gathered.
        casts = replace(inner, cast_forward_inputs=policy.cast_forward_inputs)
        units.append(Unit([head], casts, False, beside_root=True))  # its backward follows its forward
    return [*units, Unit([model], policy, None)]


def shard_unit(unit: Unit, mesh: "DeviceMesh", offload: OffloadPolicy, by_rows: Collection[int] = ()) -> None:
    """Shard the modules of a unit as one FSDP2 group; parameters ``by_rows``, by id, are cut so."""
    experts, reshard = unit.experts, unit.reshard
    if experts is not None:
        mesh, reshard = experts.mesh, bool(reshard)
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
        else partial(_placement, num_shards=mesh.size(mesh.ndim - 1), by_rows=by_rows),
        **({} if reshard is None else {"reshard_after_forward": reshard}),
    )
    if experts is not None:
        _divide_by_all_ranks(unit.modules[0], experts)
    if unit.beside_root and reshard:
        free_early(unit.modules[0])


def use_float32(unit: Float32Unit, policy: MixedPrecisionPolicy) -> None:
    """Gather a module that computes in float32 where it is used, and cast its other parameters."""
    if unit.user is not None:
        gather_with(unit.user, unit.module)
    for owner, names in unit.casts:
        cast_at_use(owner, names, policy.param_dtype or torch.float32)


def _placement(parameter: nn.Parameter, num_shards: int, by_rows: Collection[int]) -> Shard | None:
    """Placement of a parameter's shards; None leaves it to FSDP2, as for tensors with their own gather."""
    if hasattr(parameter, "fsdp_pre_all_gather") or id(parameter) in by_rows:
        return None
    dim = shard_dim(tuple(local_of(parameter).shape), num_shards)
    return Shard(dim) if dim else None


def _divide_by_all_ranks(module: nn.Module, shared: ExpertPlacement) -> None:
    """Let FSDP2 divide the gradients of experts by the number of all ranks, as those of other parameters.

    They are sums over the tokens of all ranks, but are reduced over only the ranks with the same experts, by
    whose number FSDP2 would divide.
    """
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(shared.factor)
    if shared.mesh.size(shared.mesh.ndim - 1) > 1:
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


@dataclass
class Float32Plan:
    """The parts of a model that compute in float32 under a 16-bit policy.

    Attributes:
        units: Groups that compute in float32, by the id of their module.
        kept: Ids of the parameters in them.
        casts_inputs: Whether FSDP2 casts the inputs of blocks to the compute dtype.
    """

    units: dict[int, Float32Unit] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    casts_inputs: bool = True

    def policies(self, policy: MixedPrecisionPolicy) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
        """(policy of the blocks, policy of what computes in float32)."""
        blocks = policy if self.casts_inputs else replace(policy, cast_forward_inputs=False)
        return blocks, replace(
            policy, cast_forward_inputs=False, param_dtype=torch.float32, output_dtype=None
        )


def plan_float32(
    model: nn.Module, policy: MixedPrecisionPolicy, blocks: Mapping[str, nn.Module], *, warn: bool
) -> Float32Plan:
    """Plan float32 compute by transformers' own rule for loading a model in a 16-bit dtype.

    A warning names the modules for which the rule cannot be followed.
    """
    dtype = policy.param_dtype
    if dtype not in (torch.float16, torch.bfloat16):
        return Float32Plan()
    dtypes = plain_dtypes(model, dtype)
    lower_buffers(model, dtype, dtypes)
    names = kept_parameters(model, dtype, dtypes)
    units, missed = float32_units(model, list(blocks.values()), names)
    float16_only, _ = keep_in_float32_patterns(model)
    missed |= {n for n, _ in model.named_parameters() if n not in names and matches(n, float16_only)}
    if missed and warn:
        warn_caller(
            f"these modules compute in {dtype}, although transformers lists them in _keep_in_fp32_modules: "
            f"{', '.join(sorted(set(map(without_indices, missed))))} (transformers itself keeps such "
            "modules in float32 under float16 only, or they cannot be grouped apart from other parameters)"
        )
    # transformers' models cast by themselves, and some need float32 tensors passed between blocks (OLMo's
    # rotary embedding, T5's residual).
    theirs = bool(units) or next(transformers_models(model), None) is not None
    kept = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in names - missed}
    return Float32Plan({id(unit.module): unit for unit in units}, kept, casts_inputs=not theirs)


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
