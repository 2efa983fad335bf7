"""Messages between ranks, as data: they cannot make the receiver run code.

Besides the codec's types, a message may hold paths and dataclasses of this library. An error travels as the
name of its class, its arguments and its attributes.
"""

import builtins
import dataclasses
import os
import re
import sys
import traceback
from pathlib import Path, PurePath
from typing import Any

import torch

from fsdp_sft import errors
from fsdp_sft._process.codec import decode, dumps, encode, loads
from fsdp_sft.errors import RemoteRankError

_OURS = "fsdp_sft."


def pack(value: Any) -> bytes:
    """A value as a message.

    Raises:
        TypeError: If it contains anything but plain values, paths and dataclasses of this library.
    """
    tensors: dict[str, torch.Tensor] = {}  # without it, bytes would be refused
    packed = dumps(encode(value, "a message", tensors, _further), canonical=False)
    if tensors:
        raise TypeError(f"{next(iter(tensors))} is a tensor, which no message holds")
    return packed


def unpack(message: bytes) -> Any:
    """The value of a message."""
    return decode(loads(message, "a message"), None, _made)


def _further(value: Any) -> tuple[str, Any] | None:
    if isinstance(value, PurePath):
        return "path", str(value)
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith(_OURS):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return f"{type(value).__module__}:{type(value).__qualname__}", fields
    return None


def _made(kind: str, of: Any) -> Any:
    if kind == "path":
        return Path(of)
    module, _, name = kind.partition(":")
    found = getattr(sys.modules.get(module), name, None) if module.startswith(_OURS) else None
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ValueError(f"{kind} is no dataclass of this library")
    return found(**of)


def portable(error: Exception) -> dict[str, Any]:
    """An error as plain values: its nearest class that ``revived`` knows, its contents, and its text.

    It never raises, since the other ranks wait for it.
    """
    try:
        return _described(error)
    except Exception:  # its class may do anything when it is asked for its text or its attributes
        return {"class": "Exception", "text": f"{type(error).__name__}, which cannot be described"}


def _described(error: Exception) -> dict[str, Any]:
    kind: type = next(kind for kind in type(error).__mro__ if kind is _class_of(kind.__name__))
    made_of = error.__reduce__()[1]  # an OSError's args lack its file
    return {
        "class": kind.__name__,
        "is exact": kind is type(error),
        "arguments": list(made_of) if _can_be_sent(made_of) else [str(error)],
        "attributes": {name: value for name, value in vars(error).items() if _can_be_sent(value)},
        "text": f"{type(error).__name__}: {error}",
        "place": _place(error),
    }


def _place(error: Exception) -> str:
    """Where an error was raised: the innermost line that is not of this library or of torch; "" for none.

    A launcher may end a rank before its own traceback is printed.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not _NOT_THE_CALLERS.search(one.filename)]
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}" if own else ""


def revived(told: dict[str, Any], rank: int) -> Exception:
    """Another rank's error, of its nearest known class; a ``RemoteRankError`` if that is ``Exception``."""
    kind, text = _class_of(told["class"]), f"rank {rank} raised {told['text']}"
    if kind is None or kind is Exception:
        return RemoteRankError(text)
    arguments = told["arguments"] if told["is exact"] else [text]
    try:
        error = kind(*arguments)
    except Exception:
        return RemoteRankError(text)
    vars(error).update(told["attributes"])
    return error


_NOT_THE_CALLERS = re.compile(r"[/\\](fsdp_sft|torch)[/\\]")
_OF_TORCH = {"OutOfMemoryError": torch.OutOfMemoryError}  # which loops catch by name


def _class_of(name: str) -> type[Exception] | None:
    """The error class of that name, of this library, of Python or of torch; None if there is none."""
    kind = vars(errors).get(name) or getattr(builtins, name, None) or _OF_TORCH.get(name)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None


def _can_be_sent(value: Any) -> bool:
    try:
        pack(value)
    except (TypeError, ValueError, RecursionError):  # ValueError: an integer of too many digits
        return False
    return True
