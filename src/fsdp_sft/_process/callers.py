"""Where the caller's code called this library: for warnings, and for what ranks compare."""

import sys
import warnings
from collections.abc import Iterator
from types import FrameType

from fsdp_sft.errors import printable

# Modules whose frames are between a caller and a function of ours: those of `with` and of decorators.
_BETWEEN = ("contextlib", "torch.utils._contextlib", "fsdp_sft._process.words")


def warn_caller(text: str) -> None:
    """``warnings.warn`` at the caller's line, outside this library."""
    level = 2  # of the function that calls this one
    for frame in _frames():
        if not (is_ours(frame) or is_between(frame)):
            break
        level += 1
    warnings.warn(printable(text), stacklevel=level)


def outermost_call() -> tuple[FrameType, FrameType | None] | None:
    """(the frame of the outermost function of ours, the frame that called it); None if there is none."""
    found: FrameType | None = None
    for frame in _frames():
        # Names with underscores at both ends are what `for` and `with` call.
        if is_ours(frame) and not frame.f_code.co_name.startswith("__"):
            found = frame
    if found is None:
        return None
    caller = found.f_back
    while caller is not None and (is_between(caller) or is_ours(caller)):
        caller = caller.f_back
    return found, caller


def is_ours(frame: FrameType) -> bool:
    """Whether a frame is of a function of this library; its decorators do not count."""
    return str(frame.f_globals.get("__name__", "")).startswith("fsdp_sft.") and not is_between(frame)


def is_between(frame: FrameType) -> bool:
    """Whether a frame is of ``with`` or of a decorator, between a caller and a function of ours."""
    return frame.f_globals.get("__name__") in _BETWEEN


def _frames() -> Iterator[FrameType]:
    """The frames of this thread outside this module, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") != __name__:
            yield frame
        frame = frame.f_back
