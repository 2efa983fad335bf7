"""The state of optimizers by parameter name: how it is written, compared and read."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_sft._compat.fsdp import sharded_as
from fsdp_sft._compat.modules import is_wrapper_subclass, local_tensor
from fsdp_sft._model.view import is_a, parameter_names
from fsdp_sft._process.codec import decode, encode
from fsdp_sft._tensors.boxes import box_of
from fsdp_sft._tensors.safetensors import dtype_name
from fsdp_sft._tensors.sharding import own_part
from fsdp_sft._tensors.stored import StoredFolder
from fsdp_sft.dcp_io.folder import read_tensors
from fsdp_sft.dcp_io.manifest import PARTS, Manifest, per_optimizer
from fsdp_sft.dcp_io.parts import StoredTensor, read_rank_content
from fsdp_sft.errors import CheckpointMismatchError, UnstorableStateError, abridged

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]
Content: TypeAlias = tuple[dict[str, Any], dict[str, torch.Tensor]]


def as_list(optimizer: Optimizers) -> list[Optimizer]:
    """One optimizer or several, as a list; those that Accelerate has prepared are unwrapped.

    Raises:
        TypeError: If an entry is not an optimizer.
        ValueError: If the list is empty.
    """
    given: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not given:
        raise ValueError("optimizer must be an optimizer or a list of them, got an empty list")
    for one in given:
        if not hasattr(one, "param_groups") or not hasattr(one, "state"):
            raise TypeError(
                f"optimizer must be an optimizer or a list of them, got {type(one).__name__}; train_step "
                "takes model, micro_batches, optimizer in this order"
            )
    # What Accelerate has prepared steps in some of the windows of ``accelerator.accumulate`` alone.
    return [one.optimizer if is_a(one, "AcceleratedOptimizer", "accelerate") else one for one in given]


def optimizer_content(optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str]) -> Content:
    """Read the state of any number of optimizers by name, changing nothing.

    Args:
        optimizers: The optimizers; none have no content.
        names: The model's name of each parameter.

    Returns:
        (class, parameters, groups and state other than tensors as JSON, see ``Manifest``; the live tensors of
        the state by ``<fqn>/<state name>``, of several optimizers with the optimizer's number in front).

    Raises:
        ValueError: If a parameter is not the model's.
        UnstorableStateError: If there is state that could not be loaded again.
    """
    each = [content_of_one(one, names, optimizers) for one in optimizers]
    if len(each) < 2:
        return each[0] if each else ({}, {})
    tensors = {f"{i}/{key}": t for i, (_, own) in enumerate(each) for key, t in own.items()}
    return {"optimizers": [info for info, _ in each]}, tensors


# State in tensor subclasses, such as 8-bit moments, is stored as the tensors inside them.
#
# torch's protocol for such classes takes them apart (``__tensor_flatten__``) and rebuilds them
# (``__tensor_unflatten__``). Each rank's part lies as it is beside the rank's own state, so the same shards
# are restored bitwise and no others: a class quantises elements in blocks of its own.

PLAIN = "values"  # name of the one inner tensor of a part that is a plain tensor


def parts_inside(
    states: Mapping[str, torch.Tensor], names: Sequence[str], *, numbered: bool
) -> dict[str, list[Any]]:
    """Take apart this rank's parts of the states that are in a subclass on some rank; one replica has each.

    Args:
        states: The live tensors, see ``optimizer_content``.
        names: Names of these states, the same on all ranks.
        numbered: Whether names begin with the number of one of several optimizers.

    Returns:
        [class, context, tensors inside] by ``<fqn>/<state name>``.
    """
    return {
        name.partition("/")[2] if numbered else name: [*_take_apart(name, states[name])]
        for name in names
        if own_part(states[name]) is not None
    }


def _take_apart(name: str, tensor: torch.Tensor) -> tuple[str | None, Any, dict[str, torch.Tensor]]:
    """Class, context and inner tensors of this rank's part of a state; no class for a plain tensor.

    Raises:
        UnstorableStateError: If it is of a subclass that does not say what is inside it, or that has further
            subclasses inside it.
    """
    local: Any = local_tensor(tensor)
    kind = type(local)
    if not is_wrapper_subclass(local):
        if kind not in (torch.Tensor, nn.Parameter):
            raise UnstorableStateError(
                f"{name} is a {kind.__name__}: only plain tensors can be stored and sharded again"
            )
        return None, None, {PLAIN: local.detach()}
    if not hasattr(local, "__tensor_flatten__"):
        raise UnstorableStateError(
            f"{name} is a {kind.__name__}, which does not say what is inside it (__tensor_flatten__), so no "
            "checkpoint could hold it: use an optimizer with other state"
        )
    names, context = local.__tensor_flatten__()
    inner = {str(n): getattr(local, n) for n in names}
    nested = [n for n, t in inner.items() if type(t) not in (torch.Tensor, torch.nn.Parameter)]
    if nested:
        raise UnstorableStateError(f"{name} is a {kind.__name__} with subclasses inside it ({nested})")
    return f"{kind.__module__}.{kind.__qualname__}", context, inner


def content_of_one(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], together: Sequence[Optimizer]
) -> Content:
    """The state of one optimizer; see ``optimizer_content``.

    Args:
        optimizer: The optimizer.
        names: The model's name of each parameter.
        together: All optimizers that are saved with it.
    """
    _check_storable(optimizer, together)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    parameters: dict[str, list[Any]] = {}
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the "
                    "model's; make the optimizer from model.parameters() after the model has been sharded"
                )
        parameters |= {names[p]: [dtype_name(p.dtype), list(p.shape)] for p in group["params"]}
        # A tensor, such as a learning rate, is exact as a number: a float64 holds every float32.
        numbers = {
            key: value.item() if type(value) in (torch.Tensor, nn.Parameter) and value.numel() == 1 else value
            for key, value in group.items()
            if key != "params"
        }
        options = {key: encode(value, f"param_groups[{index}][{key!r}]") for key, value in numbers.items()}
        groups.append({"params": [names[parameter] for parameter in group["params"]], "options": options})
        for parameter in group["params"]:
            fqn = names[parameter]
            for name, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(name, str) or "/" in name:
                    raise UnstorableStateError(
                        f"the state of {fqn} has an entry named {name!r}; expected a string without a slash"
                    )
                if not isinstance(value, torch.Tensor):
                    values.setdefault(fqn, {})[name] = encode(value, f"optimizer state {name!r} of {fqn}")
                else:
                    _check_state(value, parameter, f"{fqn}/{name}")
                    tensors[f"{fqn}/{name}"] = value
    info = {"class": type(optimizer).__name__, "parameters": parameters, "groups": groups, "values": values}
    return info, tensors


def _check_storable(optimizer: Optimizer, together: Sequence[Optimizer]) -> None:
    """Refuse an optimizer that has state anywhere but in ``optimizer.state``, by parameter.

    Raises:
        UnstorableStateError: If part of its state would be lost.
    """
    lost: list[str] = []
    if optimizer.state is not optimizer.state:
        lost.append("a state that is made anew each time it is asked for")
    for name, value in vars(optimizer).items():
        held = value.values() if isinstance(value, dict) else value if type(value) is list else [value]
        others = [one for one in held if isinstance(one, Optimizer) and one not in together]
        if any(one.state is not optimizer.state for one in others):
            lost.append(f"another optimizer inside ({name})")
    foreign = optimizer.state.keys() - {p for group in optimizer.param_groups for p in group["params"]}
    if foreign:
        lost.append(f"state of what is no parameter of its groups ({abridged(map(repr, foreign))})")
    if getattr(type(optimizer), "state_dict", Optimizer.state_dict) is not Optimizer.state_dict:
        more = optimizer.state_dict().keys() - {"state", "param_groups"}
        lost += [f"more than state and param_groups ({abridged(more)})"] if more else []
    if lost:
        raise UnstorableStateError(
            f"{type(optimizer).__name__} has {'; '.join(lost)}, which would be lost: pass the optimizers "
            "inside as a list, optimizer=[...], and save the rest in train_state"
        )


def _check_state(value: torch.Tensor, parameter: nn.Parameter, name: str) -> None:
    """Refuse what cannot be stored and sharded again: 0-dim, or shaped and sharded as its parameter, can."""
    kind, _, _ = _take_apart(name, value)  # raises if it cannot be stored
    if kind is None and value.ndim == 0 and not isinstance(value, DTensor):
        return
    if value.shape != parameter.shape or isinstance(value, DTensor) != isinstance(parameter, DTensor):
        raise UnstorableStateError(
            f"{name} is a {type(value).__name__} {tuple(value.shape)}, its parameter a "
            f"{type(parameter).__name__} {tuple(parameter.shape)}: only 0-dim tensors and tensors like the "
            "parameter can be sharded again"
        )


# The optimizers in a checkpoint: comparing them with live ones, and reading them.

# Options that choose how a step is computed and not what it computes. The live optimizer's choice stays.
_IMPLEMENTATION_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})


class Match(NamedTuple):
    """A live optimizer and the saved one that is read into it.

    Attributes:
        live: The optimizer.
        parameters: Its parameters by the model's names.
        info: What was saved of it as JSON; see ``Manifest``.
        stored: Stored tensors of its state, by ``<fqn>/<state name>``.
        apart: States that were in a tensor subclass on some rank, as ``parts_inside`` made them, for this
            rank's shards; None if no rank had the same shard.
    """

    live: Optimizer
    parameters: dict[str, nn.Parameter]
    info: dict[str, Any]
    stored: dict[str, StoredTensor]
    apart: dict[str, list[Any] | None]


def match_optimizers(
    folder: Path, manifest: Manifest, model: nn.Module, optimizer: Optimizers
) -> list[Match]:
    """Compare a saved state with one optimizer or several, in any order, changing nothing.

    Raises:
        CheckpointMismatchError: If it does not fit; the message lists the differences.
        UnstorableStateError: If an optimizer is of a kind that cannot be saved or loaded.
    """
    if manifest.optimizer is None:
        raise CheckpointMismatchError("no optimizer was saved there; optimizer=None loads the model alone")
    optimizers, names = as_list(optimizer), parameter_names(model)
    saved = per_optimizer(manifest.optimizer_info, manifest.optimizer)
    if any(info.get(PARTS) for info, _ in saved):
        raise CheckpointMismatchError(
            f"{folder} has quantised moments of format version 3, which are not read: load the model alone "
            "(optimizer=None), or the step with the release that wrote it"
        )
    if len(optimizers) != len(saved):
        raise CheckpointMismatchError(
            f"the saved optimizer state does not fit: it is of {len(saved)} optimizers "
            f"({', '.join(info['class'] for info, _ in saved)}), and {len(optimizers)} were given "
            f"({', '.join(type(one).__name__ for one in optimizers)}); pass all of them as a list, "
            "optimizer=[...]"
        )
    matches, problems = [], []
    for one in optimizers:
        live, tensors = content_of_one(one, names, optimizers)
        # Without one of the same parameters the first that is left, so that the comparison can say how.
        own = live["parameters"].keys()
        info, stored = next((entry for entry in saved if entry[0]["parameters"].keys() == own), saved[0])
        saved = [entry for entry in saved if entry[0] is not info]
        parameters = {names[p]: p for g in one.param_groups for p in g["params"]}
        match = Match(one, parameters, info, stored, _apart(folder, manifest, info, parameters))
        matches.append(match)
        problems += _problems(match, live, tensors)
    if problems:
        raise CheckpointMismatchError("the saved optimizer state does not fit: " + abridged(problems, "; "))
    return matches


def _apart(
    folder: Path, manifest: Manifest, info: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]
) -> dict[str, list[Any] | None]:
    """Read ``Match.apart`` from the files of the ranks that had this rank's shards of the parameters."""
    content, found = cache(partial(read_rank_content, folder)), {}
    for name in info.get("apart", ()):
        fqn = name.rpartition("/")[0]
        stored = manifest.model.get(manifest.ties.get(fqn, fqn))
        if stored is None or fqn not in parameters or not (box := box_of(parameters[fqn])).numel:
            continue
        owners = [rank for rank, part in stored.sharding.parts(stored.shape, wanted=box) if part == box]
        found[name] = content(owners[0])[2].get(name) if owners else None
    return found


def _problems(match: Match, live: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """How a saved optimizer differs from a live one; empty if it does not."""
    problems, saved = [], match.info
    if live["class"] != saved["class"]:
        problems.append(f"it is of {saved['class']}, the optimizer is {live['class']}")
    missing = sorted(saved["parameters"].keys() - live["parameters"].keys())
    added = sorted(live["parameters"].keys() - saved["parameters"].keys())
    grouped, saved_groups = ([sorted(group["params"]) for group in own["groups"]] for own in (live, saved))
    if missing or added:
        problems.append(
            f"the optimizer lacks {len(missing)} of its parameters ({abridged(missing, ', ', 3)}) and has "
            f"{len(added)} others ({abridged(added, ', ', 3)}); freeze the same ones before making it"
        )
    elif sorted(grouped) != sorted(saved_groups):
        problems.append(
            f"it has groups of {[*map(len, saved_groups)]} parameters, the optimizer "
            f"{[*map(len, grouped)]}; group them as they were saved"
        )
    for name, tensor in match.stored.items():
        own = tensors.get(name)
        if (
            own is not None
            and not is_wrapper_subclass(own)
            and (tensor.dtype, tensor.shape) != (own.dtype, tuple(own.shape))
        ):
            problems.append(f"{name} was {tensor.dtype} {tensor.shape} and is {own.dtype} {tuple(own.shape)}")
    for name, apart in match.apart.items():
        if apart is None:
            problems.append(
                f"{name} is quantised in the shards of the ranks that saved it, and this rank has another "
                "shard: load it on as many ranks with the same mesh, or begin with a fresh optimizer "
                "(optimizer=None)"
            )
        elif apart[0] not in (None, *_imported()):
            problems.append(
                f"{name} cannot be put together: its class {apart[0]} is not imported; make the optimizer as "
                "it was when it was saved"
            )
    return problems


def apply_optimizer(match: Match, folder: StoredFolder) -> None:
    """Read one saved optimizer into a live one, whose existing state tensors are filled in place."""
    optimizer, parameters, info, _, _ = match
    names = {parameter: name for name, parameter in parameters.items()}
    saved_groups = [(set(group["params"]), group["options"]) for group in info["groups"]]
    states: dict[str, dict[str, Any]] = {
        fqn: {name: decode(value) for name, value in own.items()} for fqn, own in info["values"].items()
    }
    for key in info.get("apart", ()):
        fqn, _, name = key.rpartition("/")
        apart, parameter = match.apart.get(key), parameters[fqn]
        states.setdefault(fqn, {})[name] = (
            _assembled(parameter, apart) if apart else torch.empty_like(parameter.detach())
        )
    groups = {names[p]: group for group in optimizer.param_groups for p in group["params"]}
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in match.stored.items():
        fqn, _, name = key.rpartition("/")
        live = optimizer.state.get(parameters[fqn], {}).get(name)
        if not isinstance(live, torch.Tensor) or is_wrapper_subclass(live):
            live = _new_state(parameters[fqn], name, tensor, groups[fqn])
        tensors[key] = states.setdefault(fqn, {})[name] = live
    read_tensors(folder, match.stored, tensors)
    for group in optimizer.param_groups:
        own = {names[p] for p in group["params"]}
        _apply_options(group, saved_groups.pop([params for params, _ in saved_groups].index(own))[1])
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            if names[parameter] in states:
                optimizer.state[parameter] = states[names[parameter]]


def _assembled(parameter: torch.Tensor, apart: list[Any]) -> torch.Tensor:
    """Put a state together from what is inside a tensor subclass, for this rank's shard of a parameter."""
    kind, context, inner = apart
    inner = {name: tensor.to(parameter.device) for name, tensor in inner.items()}
    if kind is None:
        local: torch.Tensor = inner[PLAIN]
    else:
        like = torch.empty(box_of(parameter).shape, device="meta")
        local = _imported()[kind].__tensor_unflatten__(inner, context, like.shape, like.stride())
    return sharded_as(parameter, local, parameter.shape) if isinstance(parameter, DTensor) else local


def _imported() -> dict[str, Any]:
    """The imported subclasses of tensors by name: a name in a file must not import anything."""
    found: dict[str, Any] = {}
    left: list[Any] = [torch.Tensor]
    while left:
        kind = left.pop()
        found.setdefault(f"{kind.__module__}.{kind.__qualname__}", kind)
        left += kind.__subclasses__()
    return found


def _new_state(
    parameter: nn.Parameter, name: str, stored: StoredTensor, options: Mapping[str, Any]
) -> torch.Tensor:
    """Memory for a new state, sharded like its parameter if it has the parameter's shape."""
    if stored.shape == tuple(parameter.shape) and (stored.shape or name != "step"):
        return torch.empty_like(parameter.detach(), dtype=stored.dtype)
    # Where torch puts it: the count of steps is on the host, unless the step itself runs on the device.
    on_device = name != "step" or options.get("fused") or options.get("capturable")
    return torch.empty((), dtype=stored.dtype, device=parameter.device if on_device else "cpu")


def _apply_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set the saved options of a group; an option that is a tensor is filled in place."""
    for key, encoded in options.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(decode(encoded))
        elif key not in _IMPLEMENTATION_OPTIONS or key not in group:
            group[key] = decode(encoded)
