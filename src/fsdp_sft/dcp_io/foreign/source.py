"""What a checkpoint of another tool has, by the names that the other tool gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_sft._boxes import Box
from fsdp_sft.errors import CheckpointCorruptError


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor of another checkpoint.

    Attributes:
        shape: Of all of it.
        dtype: Of its elements.
        read: Gives a part, in CPU memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Box], torch.Tensor]


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A model, what an optimizer has of it, and how far training was.

    Attributes:
        kind: Which tool's.
        model: Name to tensor.
        states: (name of the parameter, name of the state) to tensor.
        groups: The optimizer's groups: ``params``, by name, and options.
        step: Steps that had been taken; None if it does not say.
        others: Names of the model's state that is no tensor.
    """

    kind: str
    model: Mapping[str, ForeignTensor]
    states: Mapping[tuple[str, str], ForeignTensor] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    step: int | None = None
    others: tuple[str, ...] = ()


def step_of(value: Any, where: str) -> int:
    """A count of steps.

    Raises:
        CheckpointCorruptError: If it is none.
    """
    while isinstance(value, (list, tuple)) and len(value) == 1:
        (value,) = value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise CheckpointCorruptError(f"{where} is {str(value)[:40]}, which is no number of steps")
    return value


def split_optimizer(
    keys: Mapping[str, Any], value: Callable[[str], Any]
) -> tuple[dict[tuple[str, str], Any], list[dict[str, Any]]]:
    """States and groups of an optimizer's flat names.

    Args:
        keys: ``state.<parameter>.<state>``, ``param_groups.<number>.<option>`` or, with options by parameter,
            ``param_groups.<parameter>.<option>``; each with what is stored there.
        value: Gives an option's value.

    Returns:
        ((parameter, state) to what is stored there, groups).
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
    for name, options in named.items():  # parameters with equal options are a group
        group = by_options.setdefault(repr(sorted(options.items())), {**options, "params": []})
        group["params"].append(name)
    return states, groups + list(by_options.values())
