"""Shard a model with FSDP2 block by block; the float32 masters are made from each shard, not each block."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from fsdp_sft._boxes import local_of, refuse_disordered
from fsdp_sft._callers import warn_caller
from fsdp_sft._compat import apply_to_tensors, has_grad_hooks, has_hooks, keep_in_float32_patterns
from fsdp_sft._dtypes import check_dtypes
from fsdp_sft._expert_parallel import SharedExperts, check_shareable_experts, share_out, shared_experts
from fsdp_sft._kept import (
    Float32Unit,
    cast_at_use,
    float32_units,
    gather_with,
    kept_parameters,
    lower_buffers,
    matches,
    plain_dtypes,
    transformers_models,
)
from fsdp_sft._meshes import EP, parameter_mesh
from fsdp_sft._placement import shard_dim
from fsdp_sft._quantised import refuse_quantised_model
from fsdp_sft._recompiles import compile_block
from fsdp_sft._wrappers import replicas_of
from fsdp_sft.adapters import base_of, copied_modules
from fsdp_sft.blocks import find_blocks, is_never_called
from fsdp_sft.distributed import remember_mesh
from fsdp_sft.errors import UnsupportedModelError, WrappedModelError, abridged
from fsdp_sft.sac import Ratio, check_now, compile_under_budget, named_blocks
from fsdp_sft.shares import innermost, name_uneven

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_model(
    model: nn.Module,
    *,
    mesh: "DeviceMesh",
    master_dtype: torch.dtype = torch.float32,
    frozen_dtype: torch.dtype | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    blocks: Mapping[str, nn.Module] | None = None,
    reshard_after_forward: bool | int = True,
    offload_policy: OffloadPolicy | None = None,
    prefetch: int = 0,
    ep_size: int = 1,
) -> nn.Module:
    """Shard a model in place: each block is an FSDP2 group, and the rest (embedding, norm, head) the root's.

    Each shard is cast after its block has been split, so a rank casts 1/N of the bytes and never holds a
    block in the master dtype. A tied embedding and head lie in the root's group together. Modules that plain
    transformers keeps in float32 under the policy's compute dtype compute in float32 here; a warning names
    those for which that is not possible. Other floating-point buffers of transformers models take the dtype
    that they have in a plain model of the compute dtype. Blocks of such models do not cast their inputs,
    because plain models do not either.

    A parameter is sharded along its first dimension. If that would give some rank more than 1.05 times the
    mean, it is sharded along the first dimension whose size the number of ranks divides; 8 experts thus lie
    evenly on 64 ranks. FSDP2 copies such a parameter, and its gradient, once more. If the whole model is
    uneven because some parameters can be sharded evenly along no dimension, a warning names them.

    Args:
        model: Model with ordinary parameters, materialised (with the same values on every rank) or on the
            meta device.
        mesh: Mesh from ``build_mesh``: 1-D for FSDP, 2-D for HSDP and DDP. If it has ``cp``, parameters are
            sharded over the ranks of ``dp_shard`` and ``cp`` together.
        master_dtype: Dtype of the stored trainable shards, and so of gradients and optimizer states.
        frozen_dtype: Dtype of the stored frozen shards; None keeps the dtype that they have. Modules that
            peft's ``modules_to_save`` were copied from get ``master_dtype``, because the copies take their
            first values from them.
        mp_policy: Compute and reduction dtypes; None is bfloat16 compute with float32 reduction.
        blocks: Blocks by FQN, which may be nested; None takes ``find_blocks(model)``.
        reshard_after_forward: Treatment of a block's gathered parameters after its forward. True frees them
            (ZeRO-3), False keeps them until its backward (ZeRO-2), and a number keeps them sharded over that
            many ranks. The root keeps torch's default: it stays gathered from forward to backward. With a
            number, blocks are sharded along first dimensions only, as FSDP2's smaller mesh requires.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer states on the host.
            Pinned memory is turned off if there is no accelerator to copy to.
        prefetch: Number of blocks that the forward gathers ahead, which costs the memory of as many gathered
            blocks; 0 leaves it to torch, which gathers the next block while the present one computes.
        ep_size: Number of ranks that share out the experts of a mixture on the meta device (expert
            parallelism): each has some of them whole and reads no others, and tokens travel to the ranks that
            have their experts. It must divide ``dp_shard`` and the number of experts. 1 shards experts like
            all other parameters, which are gathered on the ranks that have the tokens.

    Returns:
        The same model.

    Raises:
        ValueError: If the model is sharded already, an argument is out of range, or a block is not part of
            this model.
        NoBlocksError: If ``blocks`` is None and none is found.
        UnsupportedModelError: If a trained parameter has hooks, which would not run, if transformers holds
            the weights quantised, if it has no plan by which ``ep_size`` ranks share out experts, or, after
            ``apply_sac(save=)``, if a part of a block is sharded as a group of its own, as these experts are.

    Collective: all ranks of the mesh, with the same model.
    Memory: For a materialised model, its memory, which falls towards that of the shards, and that of one more
        block at a time.

    Example:
        >>> model = fs.build_meta_model(path)
        >>> model = fs.shard_model(model, mesh=mesh, master_dtype=torch.float32)
        >>> report = fs.load_weights(model, path)
    """
    check_dtypes(master_dtype=master_dtype, frozen_dtype=frozen_dtype)
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy, got {mp_policy!r}; the dtype "
            "of the forward is its param_dtype"
        )
    _refuse_sharded(model)
    refuse_quantised_model(model)
    refuse_hooks({p: name for name, p in model.named_parameters()}, are_shards=False)
    given, mesh = mesh, parameter_mesh(mesh)
    policy = mp_policy or MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    refuse_disordered(mesh, [Shard(0)] * mesh.ndim)
    _check_reshard(reshard_after_forward, mesh)
    chosen = dict(find_blocks(model) if blocks is None else blocks)
    _check_blocks(model, chosen)
    if isinstance(prefetch, bool) or prefetch < 0:
        raise ValueError(f"prefetch must be a number of blocks, 0 or more, got {prefetch!r}")
    offload = _offload_policy(offload_policy)
    check_shareable_experts(base_of(model), given, ep_size)
    share_out(base_of(model), given, ep_size)

    copied = copied_modules(model)
    plan = _plan_float32(model, policy, chosen, warn=mesh.get_rank() == 0)
    for unit in _units(model, chosen, plan, policy, reshard_after_forward):
        _shard_unit(unit, mesh, offload)
        for module in unit.modules:
            _cast_shards(module, master_dtype, frozen_dtype, copied)
        if unit.float32 is not None:
            _use_float32(unit.float32, policy)
    if base_of(model) is not model and hasattr(model, "generate"):
        # peft's generate calls the base model, and so goes past the root, which gathers its parameters.
        register_fsdp_forward_method(model, "generate")
    _set_prefetch(list(chosen.values()), prefetch)
    if mesh.get_rank() == 0:
        name_uneven(model, mesh.size(mesh.ndim - 1))
    remember_mesh(model, given)
    check_now(model)  # after apply_sac(save=): before weights are loaded, and not in the first forward
    return model


def refuse_hooks(
    names: dict[nn.Parameter, str], *, are_shards: bool, gathered: Collection[torch.Tensor] = ()
) -> None:
    """Refuse trained parameters with hooks that do not run once the model is sharded.

    Args:
        names: The parameters with their names.
        are_shards: Whether the model is sharded already.
        gathered: Parameters of which the gathered ones have hooks.

    Raises:
        UnsupportedModelError: If there are any. Hooks after the accumulation run if they are registered on
            the shards, and are lost where they were registered before.
    """
    hooked = [
        name
        for parameter, name in names.items()
        if parameter.requires_grad
        and (has_hooks(parameter) or (not are_shards and has_grad_hooks(parameter)) or parameter in gathered)
    ]
    if hooked:
        raise UnsupportedModelError(
            f"{abridged(hooked)} have hooks that do not run, or see the gradient of one rank: FSDP2 computes "
            "with gathered parameters and reduces their gradients itself. A hook that "
            "parameter.register_post_accumulate_grad_hook is given after shard_model runs: as "
            "hook(parameter), with this rank's shard of the reduced gradient in parameter.grad"
        )


def compile_blocks(
    model: nn.Module,
    *,
    memory_budget: Ratio | None = None,
    blocks: Iterable[int | str] | None = None,
    **compile_kwargs: Any,
) -> list[str]:
    """Compile each block in place with ``torch.compile``; parameter names do not change.

    Blocks of one class share their compiled code, so the model compiles in the time of one block. Call it
    after ``apply_sac`` and before ``shard_model``. The code may have up to 64 variants (torch's default is
    8), for checkpointing, mode, gradients and lengths. A block that needs more runs in eager mode, and a
    warning names it.

    With ``memory_budget`` the compiler chooses what to recompute in the backward, so that blocks keep at most
    that share of their activations. This is an alternative to ``apply_sac`` and cannot be combined with it:
    torch would ignore the budget, or what ``apply_sac`` has marked. ``remove_sac`` removes the compiled code.

    Args:
        model: Any model that ``find_blocks`` reads.
        memory_budget: Share of the activations that compiled code keeps by default, in [0, 1]: a number or a
            text such as ``"1/2"``. 1 keeps what the compiler would keep anyway, 0 only the blocks' inputs.
            None leaves torch's own setting.
        blocks: FQNs or positions of blocks (see ``apply_sac``); None takes all blocks.
        **compile_kwargs: Options of ``torch.compile``, such as ``backend=`` or ``dynamic=``. With
            ``memory_budget`` only ``backend`` (``"inductor"``, ``"aot_eager"`` or a function that partitions
            by AOTAutograd), ``dynamic`` and ``fullgraph`` are allowed.

    Returns:
        FQNs of the compiled blocks, in forward order.

    Raises:
        NoBlocksError: If the model has no blocks.
        TypeError: If ``memory_budget`` is neither a number nor a text, or a keyword is not allowed with it.
        ValueError: If an argument is out of range, or a block is unknown. With ``memory_budget``, also if the
            backend would ignore it, if a block is compiled already, or if ``apply_sac`` is on.

    Memory: With ``memory_budget``, torch decides by its own estimates while the first batch is compiled.

    Example:
        >>> fs.compile_blocks(model)
        ['model.layers.0', 'model.layers.1', 'model.layers.2', 'model.layers.3']
        >>> fs.compile_blocks(fs.build_meta_model(path), memory_budget="1/2")
        ['model.layers.0', ...]
    """
    if memory_budget is not None:
        return compile_under_budget(model, memory_budget, blocks, **compile_kwargs)
    chosen = find_blocks(model) if blocks is None else named_blocks(model, blocks)
    for fqn, block in chosen.items():
        compile_block(block, fqn, **compile_kwargs)
    return list(chosen)


@dataclass(frozen=True)
class _Unit:
    """One FSDP2 group: modules whose parameters are gathered together, and how.

    Attributes:
        modules: The modules.
        policy: Dtypes of their computation.
        reshard: What becomes of the gathered parameters after a forward; None is torch's own default.
        experts: Placement of the experts that the module is, if ranks share them out.
        float32: The module's parts that do not compute in float32, if it does.
    """

    modules: list[nn.Module]
    policy: MixedPrecisionPolicy
    reshard: bool | int | None
    experts: SharedExperts | None = None
    float32: Float32Unit | None = None


def _units(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    plan: "_Float32Plan",
    policy: MixedPrecisionPolicy,
    reshard: bool | int,
) -> list[_Unit]:
    """The groups of a model, inner before outer, as ``fully_shard`` requires; the last is the root's."""
    of_blocks, in_float32 = plan.policies(policy)
    units = []
    for modules in _tied_across_blocks(model, blocks):
        kept = all(id(p) in plan.kept for module in modules for p in module.parameters())
        units.append(_Unit(modules, in_float32 if kept else of_blocks, False))
    done = {id(module) for unit in units for module in unit.modules}
    are_blocks = {id(block) for block in blocks.values()}
    for module in reversed(list(model.modules())):
        if module is model or id(module) in done:
            continue
        experts, float32 = shared_experts(module), plan.units.get(id(module))
        if experts is not None:
            units.append(_Unit([module], of_blocks, reshard, experts=experts))
            done.add(id(module))
        elif float32 is not None:
            others = [other for other in float32.others if id(other) not in done]
            if others:
                units.append(_Unit(others, of_blocks, reshard))
                done.update(map(id, others))
            units.append(_Unit([module], in_float32, reshard, float32=float32))
            done.add(id(module))
        elif id(module) in are_blocks:
            units.append(_Unit([module], of_blocks, reshard))
            done.add(id(module))
    return [*units, _Unit([model], policy, None)]


def _shard_unit(unit: _Unit, mesh: "DeviceMesh", offload: OffloadPolicy) -> None:
    """Make FSDP2's group of a unit."""
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
        shard_placement_fn=None if first_only else partial(_placement, num_shards=mesh.size(mesh.ndim - 1)),
        **({} if reshard is None else {"reshard_after_forward": reshard}),
    )
    if experts is not None:
        _divide_by_all_ranks(unit.modules[0], experts)


def _use_float32(unit: Float32Unit, policy: MixedPrecisionPolicy) -> None:
    """Gather a module that computes in float32 where it is used, and cast what of it does not."""
    if unit.user is not None:
        gather_with(unit.user, unit.module)
    for owner, names in unit.casts:
        cast_at_use(owner, names, policy.param_dtype or torch.float32)


def _placement(parameter: nn.Parameter, num_shards: int) -> Shard | None:
    """Placement of a parameter's shards; None leaves it to FSDP2, as for tensors with their own gather."""
    if hasattr(parameter, "fsdp_pre_all_gather"):
        return None
    dim = shard_dim(tuple(local_of(parameter).shape), num_shards)
    return Shard(dim) if dim else None


def _divide_by_all_ranks(module: nn.Module, shared: SharedExperts) -> None:
    """Let FSDP2 divide the gradients of experts by the number of all ranks, as those of other parameters.

    They are sums over the tokens of all ranks, but are reduced over the few ranks only that have the same
    experts. FSDP2 would divide by the number of these.
    """
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(shared.factor)
    if shared.mesh.size(shared.mesh.ndim - 1) > 1:
        # torch would divide by a premultiplied sum, which gloo does not support and NCCL loses in bfloat16
        # (pytorch#190747). On one rank it divides without this, and with it would do so twice.
        module.set_force_sum_reduction_for_comms(True)


def _refuse_sharded(model: nn.Module) -> None:
    """Raise for a model that is sharded or inside DistributedDataParallel; shared out experts are allowed."""
    if replicas_of(model) is not None:
        raise WrappedModelError(
            "the model is inside DistributedDataParallel already; shard the model that it was made of, on "
            "build_mesh(dp_replicate=...) if whole replicas are wanted"
        )
    for fqn, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"{fqn or 'the model'} is sharded already; shard_model works once, on an ordinary model"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and EP not in (parameter.device_mesh.mesh_dim_names or ()):
            raise ValueError(f"{name} is a DTensor already; shard_model takes ordinary parameters")


def _check_reshard(reshard_after_forward: bool | int, mesh: "DeviceMesh") -> None:
    """Raise unless ``reshard_after_forward`` is a bool or divides the number of shards."""
    if isinstance(reshard_after_forward, bool):
        return
    shards = mesh.size(mesh.ndim - 1)
    allowed = [d for d in range(2, shards) if shards % d == 0]
    if reshard_after_forward not in allowed:
        raise ValueError(
            "reshard_after_forward must be True, False or a divisor of the shard group between 1 and its "
            f"size ({allowed or 'none'} for {shards} ranks), got {reshard_after_forward!r}"
        )


def _check_blocks(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Raise for a block that is not the module of that name, or is never called."""
    modules = dict(model.named_modules())
    for fqn, block in blocks.items():
        if not fqn or modules.get(fqn) is not block:
            raise ValueError(
                f"blocks[{fqn!r}] is not the module of that name in {type(model).__name__}; "
                "pass what find_blocks(model, ...) returned"
            )
        if is_never_called(block):
            raise ValueError(
                f"blocks[{fqn!r}] ({type(block).__name__}) only holds other modules and is never called, so "
                "its parameters would never be gathered; name its elements"
            )


def _offload_policy(policy: OffloadPolicy | None) -> OffloadPolicy:
    """The policy, without pinned memory if there is no accelerator."""
    if policy is None:
        return OffloadPolicy()
    if isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and not torch.accelerator.is_available():
        return CPUOffloadPolicy(pin_memory=False)
    return policy


def _cast_shards(
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
class _Float32Plan:
    """The parts of a model that compute in float32 under a 16-bit policy.

    Attributes:
        units: Groups of their own that compute in float32, by the id of their module.
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


def _plan_float32(
    model: nn.Module, policy: MixedPrecisionPolicy, blocks: Mapping[str, nn.Module], *, warn: bool
) -> _Float32Plan:
    """Plan float32 compute by transformers' own rule for loading a model in a 16-bit dtype.

    A warning names the modules for which the rule cannot be followed.
    """
    dtype = policy.param_dtype
    if dtype not in (torch.float16, torch.bfloat16):
        return _Float32Plan()
    dtypes = plain_dtypes(model, dtype)
    lower_buffers(model, dtype, dtypes)
    names = kept_parameters(model, dtype, dtypes)
    units, missed = float32_units(model, list(blocks.values()), names)
    float16_only, _ = keep_in_float32_patterns(model)
    missed |= {n for n, _ in model.named_parameters() if n not in names and matches(n, float16_only)}
    if missed and warn:
        warn_caller(
            f"computed in {dtype} although transformers lists them in _keep_in_fp32_modules: "
            f"{_abridged(missed)} (transformers itself keeps such modules in float32 under float16 only, or "
            "they cannot be grouped apart from other parameters)"
        )
    # transformers' models cast by themselves, and some need float32 tensors passed between blocks (OLMo's
    # rotary embedding, T5's residual).
    theirs = bool(units) or next(transformers_models(model), None) is not None
    kept = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in names - missed}
    return _Float32Plan({id(unit.module): unit for unit in units}, kept, casts_inputs=not theirs)


def _abridged(names: set[str]) -> str:
    """Names as a text, with those that differ in an index only written once."""
    return ", ".join(sorted({re.sub(r"\.\d+(?=\.)", ".*", name) for name in names}))


def _tied_across_blocks(model: nn.Module, blocks: Mapping[str, nn.Module]) -> list[list[nn.Module]]:
    """Lists of modules that share a parameter across blocks; each list has to be one group.

    torch 2.13 and later refuse a parameter that lies in two groups. A layer that several blocks share
    (Zamba's attention) therefore needs a group of its own. A tied embedding and head both lie in the root's
    group and need none.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    groups: dict[tuple[str, ...], list[nn.Module]] = {}
    for names in places.values():
        owners = sorted({innermost(name, list(blocks)) for name in names})
        if len(owners) < 2:
            continue
        members = groups.setdefault(tuple(owners), [])
        for name in names:
            module = modules[name.rpartition(".")[0]]
            if all(module is not member for member in members):
                members.append(module)
    return list(groups.values())


def _set_prefetch(blocks: list[nn.Module], prefetch: int) -> None:
    """Let each block's forward gather the next ``prefetch`` blocks."""
    if not prefetch:
        return
    sharded: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for i, block in enumerate(sharded):
        following = sharded[i + 1 : i + 1 + prefetch]
        if following:
            block.set_modules_to_forward_prefetch(following)
