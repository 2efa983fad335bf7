"""The contents of another tool's checkpoint, by the names that the tool gives them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_sft._tensors.boxes import Box
from fsdp_sft.errors import CheckpointCorruptError


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor of another tool's checkpoint.

    Attributes:
        shape: Shape of the full tensor.
        dtype: Dtype of its elements.
        read: Function that returns a box of the tensor, in CPU memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Box], torch.Tensor]


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A model, its optimizer's state, and the number of steps taken.

    Attributes:
        kind: Tool or format that it is from.
        model: Tensors of the model by name.
        states: Tensors of the optimizer's state by (name of the parameter, name of the state).
        groups: Parameter groups of the optimizer: ``params``, a list of names, and options.
        step: Number of steps that had been taken; None if the checkpoint does not say.
        others: Names of state of the model that is not a tensor.
    """

    kind: str
    model: Mapping[str, ForeignTensor]
    states: Mapping[tuple[str, str], ForeignTensor] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    step: int | None = None
    others: tuple[str, ...] = ()


def step_of(value: Any, where: str) -> int:
    """A stored value as a number of steps; ``where`` names it in the error.

    Raises:
        CheckpointCorruptError: If it is not a number of steps.
    """
    while isinstance(value, (list, tuple)) and len(value) == 1:
        (value,) = value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise CheckpointCorruptError(f"{where} is {str(value)[:40]}, which is no number of steps")
    return value


def split_optimizer(
    keys: Mapping[str, Any], value: Callable[[str], Any]
) -> tuple[dict[tuple[str, str], Any], list[dict[str, Any]]]:
    """The states and groups of an optimizer that was stored under flat names.

    Args:
        keys: Stored entries by name: ``state.<parameter>.<state>``, and ``param_groups.<number>.<option>``
            or, where options are stored by parameter, ``param_groups.<parameter>.<option>``.
        value: Function that returns the value of an option by its name.

    Returns:
        (stored states by (parameter, state), groups).
    """
    states: dict[tuple[str, str], Any] = {}
    numbered: dict[int, dict[str, Any]] = {}
    named: dict[str, dict[str, Any]] = {}
    for key, stored in keys.items():
        kind, _, rest = key.partition(".")
        owner, _, last = rest.rpartition(".")
        if kind == "state":
            states[owner, last] = stored
        elif kind == "param_groups" and owner.isdigit():
            numbered.setdefault(int(owner), {})[last] = value(key)
        elif kind == "param_groups":
            named.setdefault(owner, {})[last] = value(key)
    groups = [numbered[number] for number in sorted(numbered)]
    by_options: dict[str, dict[str, Any]] = {}
    for name, options in named.items():  # parameters with equal options become one group
        group = by_options.setdefault(repr(sorted(options.items())), {**options, "params": []})
        group["params"].append(name)
    return states, groups + list(by_options.values())
