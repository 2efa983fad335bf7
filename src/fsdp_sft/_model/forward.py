"""What a model's forward depends on besides its weights, so that a change of it is noticed.

One walk over the modules serves every package that has checked a model once. The state refers to the modules,
hooks and functions found: comparing an ``id`` would not do, since Python reuses it when an object is gone.
"""

import functools
import itertools
import types
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.modules import hooks_on_all_modules, is_ours, only_records
from fsdp_sft._model.wrappers import unwrapped, with_wrappers

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What may replace the class's forward in an instance: a compiled call, another loss.
_OWN = ("_compiled_call_impl", "loss_type")
_LOSS = "_loss_function"  # where transformers keeps a loss that was set on a model
_MERGED = "merged_adapters"  # names of the adapters that peft has merged into a base layer
_MOST_PARTS = 300  # of a function: what it refers to may refer to everything
_NO_MATTER = {"use_cache", "_name_or_path", "transformers_version"}  # of a config


def forward_state(model: nn.Module) -> tuple[Any, ...]:
    """What a forward of ``model`` depends on besides its weights and inputs, to be compared by ``==``.

    Included are modules, hooks on them and on all modules, forwards set on an instance or a class, strings
    and flags of the config (such as the attention implementation), and the function of the model's own loss
    (``function_state``). Not included are numbers of a config, and what a hook or a function changes in an
    object that it holds.
    """
    parts: list[Any] = [weakref.ref(wrapper) for wrapper in with_wrappers(model)]
    classes: dict[type, None] = {}
    pending: list[nn.Module | None] = [unwrapped(model)]
    while pending:
        module = pending.pop()
        if module is None:
            continue
        parts.append(weakref.ref(module))
        classes[type(module)] = None
        own = module.__dict__
        for name in _HOOKS:
            if own[name]:
                parts += [hook for hook in own[name].values() if not (is_ours(hook) or only_records(hook))]
        parts += [own[name] for name in _OWN if name in own]
        forward = _before_a_look(own.get("forward"))
        if forward is not None:
            parts.append(forward)
        if own.get(_MERGED):  # if none is merged, peft reads the flag in each forward, and so do we
            parts.append((*own[_MERGED], own.get("_disable_adapters")))
        if _LOSS in own:
            parts.append(function_state(own[_LOSS]))
        if own["_modules"]:
            pending += own["_modules"].values()
    parts += hooks_on_all_modules(pre=True)
    parts += [(cls, getattr(cls, "forward", None)) for cls in classes]
    return (*parts, *_of_config(getattr(unwrapped(model), "config", None)))


def look_with(forward: Any, before: Any) -> Any:
    """Mark a forward of ours that replaces ``before`` for a moment; None is that of the class."""
    forward.fsdp_sft_instead_of = before
    return forward


def _before_a_look(forward: Any) -> Any:
    """The forward of an instance without those that ``look_with`` has marked."""
    while hasattr(forward, "fsdp_sft_instead_of"):
        forward = forward.fsdp_sft_instead_of
    return forward


def function_state(function: Any) -> Any:
    """What a function computes with, as far as that shows without calling it, to be compared by ``==``.

    Its code, and the strings, flags and functions in its closure, its defaults, the arguments of a partial,
    the module around it, or the object that it is a method of. Numbers and tensors do not count, so a loop
    may pass a new coefficient in each step.
    """
    return _FunctionParts().of(function)


class _FunctionParts:
    """The parts of one function, each object once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def of(self, value: Any) -> Any:
        if value is None or isinstance(value, (str, bool, type, torch.dtype)):
            return value
        if isinstance(value, (int, float, complex, torch.Tensor, types.ModuleType)):
            return None
        if id(value) in self._seen or len(self._seen) > _MOST_PARTS:
            return None
        self._seen.add(id(value))  # the function keeps all that is seen alive
        if isinstance(value, functools.partial):
            return self.of(value.func), self.of(value.args), self.of(value.keywords)
        if isinstance(value, types.MethodType):
            return self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._of_many(value)
        if isinstance(value, Mapping):
            return self._of_named(value)
        if isinstance(value, nn.Module) and any(True for _ in value.parameters()):
            return type(value)  # a model: its forward has a state of its own
        own = getattr(value, "__dict__", None)
        return (type(value), self._of_named(own)) if own is not None else value

    def _of_function(self, function: types.FunctionType) -> Any:
        code = function.__code__
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        names = function.__globals__
        around = [names[name] for name in code.co_names if isinstance(names.get(name), _OF_A_MODULE)]
        return code, [
            self.of(part) for part in (*cells, function.__defaults__, function.__kwdefaults__, *around)
        ]

    def _of_many(self, values: Any) -> Any:
        found = map(self.of, itertools.islice(values, _MOST_PARTS))
        return [part for part in found if part is not None] or None

    def _of_named(self, values: Mapping[Any, Any]) -> Any:
        found = ((str(name), self.of(part)) for name, part in itertools.islice(values.items(), _MOST_PARTS))
        # Nothing for a dict of numbers: a function that collects such is not another one with each.
        return {name: part for name, part in found if part is not None} or None


_OF_A_MODULE = (str, bool, types.FunctionType, functools.partial)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _of_config(config: Any) -> tuple[Any, ...]:
    """The strings and flags of a config and of the configs within it, by name."""
    own = getattr(config, "__dict__", None)
    if not own:
        return ()
    found: list[Any] = []
    for name, value in own.items():
        if isinstance(value, (str, bool)) and name not in _NO_MATTER:
            found.append((name, value))
        elif hasattr(value, "to_dict"):
            found += _of_config(value)
    return tuple(found)
