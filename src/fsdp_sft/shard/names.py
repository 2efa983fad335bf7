"""Names of parameters, for dividing a model into groups."""

import re

from torch import nn


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
