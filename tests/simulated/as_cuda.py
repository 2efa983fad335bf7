"""Branches on the name "cuda", run on the simulated device.

Torch lets nobody call a device "cuda" that is none. So within ``answering_for_cuda`` the functions of a
module are what they would be if "sim" stood in their text wherever "cuda" does: ``device.type == "cuda"``
holds, ``torch.cuda.synchronize()`` is ``torch.sim.synchronize()``, and "nccl" is "simccl".
"""

import contextlib
import inspect
import re
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

_NAMES = {"cuda": "sim", "nccl": "simccl", "is_cuda": "is_sim"}
_WORD = re.compile(r"\b(cuda|nccl)\b")


@contextlib.contextmanager
def answering_for_cuda(*modules: ModuleType) -> Iterator[None]:
    """A context in which the code of ``modules`` takes the simulated device for CUDA.

    What a module has worked out when it was imported, and what it remembers in a cache, stays as it is.
    """
    before = [(function, function.__code__) for module in modules for function in _functions(module)]
    try:
        for function, code in before:
            function.__code__ = _renamed(code)
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def _functions(module: ModuleType) -> list[FunctionType]:
    """Those that a module defines, with the methods of its classes."""
    found: list[FunctionType] = []
    namespaces: list[dict[str, Any]] = [dict(vars(module))]
    while namespaces:
        for value in namespaces.pop().values():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                namespaces.append(dict(vars(value)))
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            value = inspect.unwrap(value) if callable(value) else value
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                found.append(value)
    return found


def _renamed(value: Any) -> Any:
    """Code, or one of its constants, with the names changed."""
    if isinstance(value, str):
        return _WORD.sub(lambda word: _NAMES[word[0]], value)
    if isinstance(value, tuple | frozenset):
        return type(value)(map(_renamed, value))
    if isinstance(value, CodeType):
        names = tuple(_NAMES.get(name, name) for name in value.co_names)
        return value.replace(co_consts=_renamed(value.co_consts), co_names=names)
    return value
