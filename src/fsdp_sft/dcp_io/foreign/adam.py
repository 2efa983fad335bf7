"""Conversion of another tool's state of Adam or AdamW into this library's optimizer state."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fsdp_sft._model.state import ModelTensors
from fsdp_sft._process.codec import encode
from fsdp_sft._tensors.safetensors import dtype_name
from fsdp_sft.dcp_io.content import ReadTensor
from fsdp_sft.dcp_io.foreign.source import ForeignCheckpoint, ForeignTensor
from fsdp_sft.errors import CheckpointMismatchError, abridged

_STATES = {"step", "exp_avg", "exp_avg_sq"}
_NEEDED = {"amsgrad", "betas", "eps", "lr", "weight_decay"}  # RAdam has the same state, but no amsgrad
_OPTIONS = _NEEDED | {
    "capturable",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "initial_lr",  # set by a scheduler
    "maximize",
}

Ordered = Callable[[str, ForeignTensor], ForeignTensor]


def optimizer_of(
    foreign: ForeignCheckpoint, live: ModelTensors, ours: Callable[[str], str | None], ordered: Ordered
) -> tuple[dict[str, ReadTensor], dict[str, Any]]:
    """State by name, and information, in the form of this library's checkpoints; both empty if there is none.

    Args:
        foreign: The other tool's checkpoint.
        live: The model.
        ours: Function from the tool's name of a parameter to the model's; None leaves the parameter out.
        ordered: Function that puts the rows of a parameter of that name, or of its moments, into the model's
            order.

    Raises:
        CheckpointMismatchError: If it is not the state of Adam or AdamW, or not of the model's parameters.
    """
    if not foreign.states and not foreign.groups:
        return {}, {}
    names = _names(foreign, live, ours)
    _check_kind(foreign, names)
    states: dict[str, ReadTensor] = {}
    for (theirs, state), tensor in foreign.states.items():
        name = names[theirs]
        if name is None:
            continue
        shape = tuple(live.tensors[name].shape)
        if tensor.shape not in (shape, ()):
            raise CheckpointMismatchError(f"{state} of {theirs} is {tensor.shape}, {name} is {shape}")
        alike = tensor.shape == shape
        placed = ordered(name, tensor) if alike else tensor
        like = live.tensors[name] if alike else torch.empty(())
        states[f"{name}/{state}"] = ReadTensor(placed.shape, placed.dtype, like, placed.read)
    groups = [
        {"params": [n for n in (names[str(p)] for p in group["params"]) if n], "options": _options(group)}
        for group in foreign.groups
    ]
    parameters = {
        name: [dtype_name(live.tensors[name].dtype), list(live.tensors[name].shape)]
        for group in groups
        for name in group["params"]
    }
    decoupled = {group.get("decoupled_weight_decay", True) for group in foreign.groups}
    kind = "AdamW" if decoupled == {True} else "Adam"
    return states, {"class": kind, "parameters": parameters, "groups": groups, "values": {}}


def _names(
    foreign: ForeignCheckpoint, live: ModelTensors, ours: Callable[[str], str | None]
) -> dict[str, str | None]:
    """The model's first name of each of the optimizer's parameters, by the name that the tool gives it."""
    in_groups = [str(name) for group in foreign.groups for name in group["params"]]
    found: dict[str, str | None] = {}
    unknown = []
    for theirs in dict.fromkeys([*in_groups, *(name for name, _ in foreign.states)]):
        name = ours(theirs)
        if name is not None and name not in live.names:
            unknown.append(theirs)
        found[theirs] = live.names.get(name) if name is not None else None
    if unknown:
        by_number = " by number, not by name" if all(name.isdigit() for name in unknown) else ""
        raise CheckpointMismatchError(
            f"the optimizer's state is of {len(unknown)} parameters that are not the model's{by_number} "
            f"({abridged(unknown, ', ', 4)})"
        )
    lacking = {name for name, _ in foreign.states} - set(in_groups)
    if lacking:
        raise CheckpointMismatchError(
            f"the optimizer's groups lack parameters that it has state of ({abridged(lacking, ', ', 4)})"
        )
    counts = Counter(found[name] for name in in_groups if found[name] is not None)
    twice = {name for name, count in counts.items() if count > 1 and name}
    if twice:
        raise CheckpointMismatchError(
            f"the optimizer has {len(twice)} of the model's parameters twice ({abridged(twice, ', ', 4)}): "
            "they are tied in the model, or listed twice"
        )
    return found


def _check_kind(foreign: ForeignCheckpoint, names: Mapping[str, str | None]) -> None:
    """Refuse an optimizer whose states or options are not those of torch's Adam and AdamW."""
    kept: dict[str, set[str]] = {}
    for name, state in foreign.states:
        kept.setdefault(name, set()).add(state)
    amsgrad = any(group.get("amsgrad") for group in foreign.groups)
    expected = _STATES | ({"max_exp_avg_sq"} if amsgrad else set())
    others = {name: states for name, states in kept.items() if states != expected}
    options = {key for group in foreign.groups for key in group if key != "params"}
    lacking = {key for group in foreign.groups for key in _NEEDED - group.keys()}
    if others or lacking or options - _OPTIONS:
        name, states = next(iter(others.items()), ("", set()))
        details = [
            f"{name} has the state {sorted(states)}" if others else "",
            f"it lacks the options {sorted(lacking)}" if lacking else "",
            f"it has the options {sorted(options - _OPTIONS)}" if options - _OPTIONS else "",
        ]
        raise CheckpointMismatchError(
            "the optimizer is not torch's Adam or AdamW, the only ones that are converted: "
            f"{'; '.join(filter(None, details))}. To convert the model alone, convert a copy of the "
            "checkpoint without the optimizer's files"
        )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group as JSON; a tensor with one element, such as a learning rate, as a number."""
    plain = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if key != "params":
            plain[key] = encode(value, f"option {key!r}")
    return plain
