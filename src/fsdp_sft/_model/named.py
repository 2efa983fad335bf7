"""The tensors of a model by name."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.wrappers import unwrapped

# What torch.compile(model) and checkpoint_wrapper add to every name below them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """First FQN of each parameter."""
    return {parameter: clean_name(name) for name, parameter in unwrapped(model).named_parameters()}


def clean_name(name: str) -> str:
    """An FQN without the components that wrappers add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def slot(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor or module, and its name in it."""
    parent, _, leaf = name.rpartition(".")
    return model.get_submodule(parent), leaf


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and every buffer, persistent or not, under each of its names."""
    named = dict(unwrapped(model).named_parameters(remove_duplicate=False))
    return {**named, **dict(unwrapped(model).named_buffers(remove_duplicate=False))}


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors inside containers and objects (such as masks with attributes), but not inside modules."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, nn.Module):
        inner: Iterable[Any] = ()
        if isinstance(value, (list, tuple)):
            inner = value
        elif isinstance(value, dict):
            inner = value.values()
        elif hasattr(value, "__dict__"):
            inner = vars(value).values()
        for item in inner:
            yield from tensors_in(item, depth - 1)
