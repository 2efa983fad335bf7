"""FSDP2's states, groups and policies."""

import copy
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn


def reshard_within(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Reshard what FSDP2 has left gathered, and drop what a failed forward or backward has left.

    Returns:
        (module, name) of each parameter that was replaced since the first forward.
    """
    if is_broken_off(model):
        forget_failed_iteration(model)
    replaced: list[tuple[nn.Module, str]] = []
    for module in _sharded_within(model):
        replaced += _replaced_parameters(module)
        _keep_trained_flags(module)
        type(module).reshard(module)  # of this module alone, so that the flags of no other are lost
        _forget_inference(module)
    return replaced


def forget_failed_iteration(model: nn.Module) -> None:
    """Reset FSDP2 to its state between steps, after an error in a forward or a backward.

    Parameters are resharded, and what the failed iteration has left is dropped: pending gathers, unreduced
    gradients, and the flag that the final callback of a backward is queued, which would keep the next
    backward from ending. ``FSDPModule.reset_iter_state`` does most of it, but leaves unsharded gradients in a
    group's private parameters.
    """
    for module in _sharded_within(model):
        if module._get_fsdp_state()._is_root:  # None before the first forward, with nothing to forget
            module.reset_iter_state()
    forget_held_back(model)


def _keep_trained_flags(module: Any) -> None:
    """Carry ``requires_grad`` of an FSDP2 module's gathered parameters over to their shards.

    Freezing changes the parameter that the module holds at the moment. FSDP2 copies the flag from the shard
    when it gathers, and never back, so a change of the gathered one would be undone.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.sharded_param.requires_grad_(_registered(group, parameter).requires_grad)


def _registered(group: Any, parameter: Any) -> Any:
    """Which of its tensors for a parameter FSDP2 has put into the module: shard, part of it, or gathered."""
    if group.is_sharded:
        return parameter.sharded_param
    return (
        parameter._sharded_post_forward_param if group.is_sharded_post_forward else parameter._unsharded_param
    )


def _forget_inference(module: Any) -> None:
    """Let an FSDP2 module gather into new memory what it last gathered under ``torch.inference_mode``.

    FSDP2 makes the gathered parameter once, in the first forward; autograd refuses tensors of that mode.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for held in group.fsdp_params:
            if getattr(held, "_unsharded_param", held.sharded_param).is_inference():
                held.all_gather_outputs = []
                del held._unsharded_param


def is_broken_off(model: nn.Module) -> bool:
    """Whether an error has left FSDP2's ``_training_state`` in a forward or backward: it reshards nothing."""
    return any(state._training_state.name != "IDLE" for state in _states_within(model))


def _replaced_parameters(module: Any) -> list[tuple[nn.Module, str]]:
    """(module, name) of each parameter that has replaced one of FSDP2's; FSDP2 would put its own back."""
    state = module._get_fsdp_state()
    if state._is_root is None:  # before the first forward FSDP2 takes what it finds
        return []
    found = []
    for group in state._fsdp_param_groups:
        for parameter in group.fsdp_params:
            own, info = _registered(group, parameter), parameter._module_info
            places = [(info.module, info.param_name)]
            if info.shared_modules:
                places += zip(info.shared_modules, info.shared_param_names, strict=True)
            found += [place for place in places if place[0]._parameters.get(place[1]) is not own]
    return found


def compute_apart(module: Any, places: Collection[tuple[nn.Module, str]], policy: Any) -> None:
    """Let some parameters of an FSDP2 module, by (module, name), compute by another policy than the others.

    They are gathered and reduced beside the others, in a further group of the module. FSDP2 makes one for
    each mesh that its parameters lie on (``_fsdp_param_groups``), and publicly for no other reason.
    """
    groups = module._get_fsdp_state()._fsdp_param_groups
    for group in tuple(groups):
        beside = type(group)(
            [],
            group.modules,
            group.mesh_info,
            group.post_forward_mesh_info,
            group.device,
            None,
            policy,
            group.offload_policy,
        )
        beside.fsdp_params = [
            held
            for held in group.fsdp_params
            if (held._module_info.module, held._module_info.param_name) in places
        ]
        for held in beside.fsdp_params:
            held.mp_policy = policy  # torch 2.15 casts each parameter by its own
        group.fsdp_params = [held for held in group.fsdp_params if held not in beside.fsdp_params]
        groups.append(beside)
    groups[:] = [group for group in groups if group.fsdp_params]


def forget_held_back(model: nn.Module) -> None:
    """Drop the unreduced gradients of an abandoned window, which FSDP2 hides from ``zero_grad``."""
    for parameter, gathered in _held_parameters(model):
        if "unsharded_accumulated_grad" in vars(parameter):  # before torch 2.15, which has a property
            parameter.unsharded_accumulated_grad = None
        if gathered is not None and gathered.grad is not None:
            gathered.grad = None


def gradient_divide_factors(model: nn.Module) -> set[float | None]:
    """By what FSDP2 divides the sums of gradients; None is the number of ranks that reduce them."""
    return {
        group.gradient_divide_factor for state in _states_within(model) for group in state._fsdp_param_groups
    }


def _held_parameters(model: nn.Module) -> Iterator[tuple[Any, nn.Parameter | None]]:
    """FSDP2's own object for each parameter, and the gathered parameter; None if it never was gathered."""
    return (
        (parameter, getattr(parameter, "_unsharded_param", None))
        for state in _states_within(model)
        for group in state._fsdp_param_groups
        for parameter in group.fsdp_params
    )


def put_shard(module: nn.Module, name: str, local: torch.Tensor) -> None:
    """Put another tensor, such as one with a gather of its own, in place of a parameter's shard.

    FSDP2 takes it over at its next forward (``reset_sharded_param``, ``_init_extensions``).
    """
    before: Any = module._parameters[name]
    module._parameters[name] = nn.Parameter(sharded_as(before, local, before.shape), requires_grad=False)


def sharded_as(like: Any, local: torch.Tensor, shape: Sequence[int]) -> Any:
    """A tensor of another shape, sharded like ``like``, with ``local`` as this rank's shard; nothing is sent.

    The public ``DTensor.from_local`` would move a shard that lies on the host.
    """
    from torch.distributed.tensor import DTensor

    spec = copy.copy(like._spec)
    whole = torch.empty(tuple(shape), dtype=local.dtype, device="meta")
    spec.tensor_meta = spec.tensor_meta._replace(shape=whole.shape, stride=whole.stride(), dtype=whole.dtype)
    return DTensor(local, spec, requires_grad=False)


def adopt_shards(model: nn.Module) -> None:
    """Let FSDP2 know of shards that ``put_shard`` has replaced.

    At its first forward it would find them itself, but first it compares the memory of the former shard with
    that of the new one, and a tensor subclass has none (torch 2.13, ``reset_sharded_param``).
    """
    for held, _ in _held_parameters(model):
        info = held._module_info
        parameter = getattr(info.module, info.param_name)
        if parameter is not held.sharded_param:
            held.sharded_param, held._sharded_param_data = parameter, parameter._local_tensor
            held._init_extensions()
            held.all_gather_outputs = []  # of the size of what was gathered before
            vars(held).pop("_unsharded_param", None)


def allow_unused_groups(model: nn.Module) -> None:
    """Let a backward without a reduction pass by groups that no forward has gathered, such as a tower's.

    With a reduction torch 2.13 leaves them out; without one it looks at the gradients of all gathered
    parameters, and fails where there are none yet (``FSDPParam.to_accumulated_grad_if_needed``).
    """
    for held, gathered in _held_parameters(model):
        if gathered is None and "to_accumulated_grad_if_needed" not in vars(held):
            held.to_accumulated_grad_if_needed = functools.partial(_accumulate_if_gathered, held)


def reduce_what_is_thawed(model: nn.Module) -> None:
    """Let FSDP2 reduce in the policy's dtypes what was frozen as a whole at the first forward.

    In that forward a group takes the dtypes in which it reduces from its trained parameters. Where it has
    none it would reduce in that of the computation, and fail where masters have another: its ``_orig_dtype``,
    set by ``_init_mp_dtypes``, is None then. torch 2.15 takes them from what is frozen.
    """
    for group in (group for state in _states_within(model) for group in state._fsdp_param_groups):
        if vars(group).get("_orig_dtype", group) is None:  # before the first forward it is not there
            group._init_mp_dtypes()


def _accumulate_if_gathered(held: Any) -> None:
    if hasattr(held, "_unsharded_param"):
        type(held).to_accumulated_grad_if_needed(held)


def _states_within(model: nn.Module) -> Iterator[Any]:
    """FSDP2's state of each module that it has sharded."""
    return (module._get_fsdp_state() for module in _sharded_within(model))


def _sharded_within(model: nn.Module) -> Iterator[Any]:
    """The modules of a model that FSDP2 has sharded."""
    from torch.distributed.fsdp import FSDPModule

    return (module for module in model.modules() if isinstance(module, FSDPModule))


def keeps_shards_on_host(model: nn.Module) -> bool:
    """Whether a model was sharded with ``CPUOffloadPolicy``.

    FSDP2 keeps the policy in its groups of parameters (``_fsdp_param_groups``), which no public function
    shows.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy

    return any(
        isinstance(group.offload_policy, CPUOffloadPolicy)
        for state in _states_within(model)
        for group in state._fsdp_param_groups
    )


def compute_dtypes(model: nn.Module) -> set[torch.dtype]:
    """The floating dtypes of a model's parameters, and those that FSDP2 casts them to for the forward.

    ``fully_shard`` keeps its ``mp_policy`` in a state (``_get_fsdp_state``) that no public function shows.
    """
    return {
        *(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()),
        *(state._mp_policy.param_dtype for state in _states_within(model)),
    } - {None}


def native_axes(model: nn.Module) -> list[str]:
    """The axes of more than one rank along which transformers has cut a model otherwise than by FSDP.

    ``from_pretrained(distributed_config=...)`` keeps its meshes in the private ``_mesh_manager``.
    """
    manager: Any = getattr(model, "_mesh_manager", None)
    return [axis for axis in ("pp", "tp") if manager is not None and manager.get_mesh(axis).size() > 1]


def split_factor_of(placement: Any) -> int | None:
    """Number of parts into which a strided shard's dimension was already cut; None for other placements.

    FSDP2 uses this placement, the private class ``_StridedShard``, for a parameter that expert or tensor
    parallelism has cut along the same dimension.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None
