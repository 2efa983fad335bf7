"""Every public name with its arguments."""

import inspect
import re
from typing import Any

import fsdp_sft as fs


def now(arguments: Any, frozen: Any) -> dict[str, Any]:
    """By name: the signature of a function, those of a class's methods, or the kind of anything else."""
    return {name: _of(getattr(fs, name)) for name in fs.__all__}


def _of(thing: Any) -> Any:
    if inspect.isclass(thing):
        members = {
            name: _signature(member)
            for name, member in inspect.getmembers(thing)
            if callable(member) and not name.startswith("_") and _is_ours(member)
        }
        bases = [one.__name__ for one in thing.__mro__[1:] if one.__module__ == "builtins"][:-3]
        return {"bases": bases, "": _signature(thing), **members}
    return _signature(thing) if callable(thing) else type(thing).__name__


def _is_ours(member: Any) -> bool:
    return str(getattr(member, "__module__", "")).startswith("fsdp_sft")


def _signature(thing: Any) -> str:
    """The arguments with their defaults; addresses and annotations are left out."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return "?"
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)
