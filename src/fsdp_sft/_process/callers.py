"""Where the caller's code called this library: for warnings, and for what ranks compare."""

import os
import sys
import warnings
from collections.abc import Iterator
from types import FrameType

from fsdp_sft.errors import printable

# Modules whose frames are between a caller and a function of ours: those of `with` and of decorators.
_BETWEEN = ("contextlib", "torch.utils._contextlib", "fsdp_sft._process.words")


def warn_caller(text: str) -> None:
    """``warnings.warn`` at the caller's line, outside this library."""
    # Level 1 is this function, and level 2 the one that calls it, the first of the frames.
    level = next((n for n, frame in enumerate(_frames(), 2) if not _is_inside(frame)), 2)
    warnings.warn(printable(text), stacklevel=level)


def outermost_call() -> tuple[str, str]:
    """(name of the outermost function of ours that runs, the same with its place in the caller's code)."""
    frames = list(_frames())
    called = [
        at
        for at, frame in enumerate(frames)
        if _is_inside(frame) and _module(frame) not in _BETWEEN
        # Names with underscores at both ends are what `for` and `with` call.
        if not frame.f_code.co_name.startswith("__")
    ]
    if not called:
        return "", ""
    name = frames[called[-1]].f_code.co_name
    caller = next((frame for frame in frames[called[-1] :] if not _is_inside(frame)), None)
    return name, name.lstrip("_") + (
        "" if caller is None else f" ({os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno})"
    )


def _is_inside(frame: FrameType) -> bool:
    """Whether a frame is of this library, or of ``with`` or a decorator between it and its caller."""
    return _module(frame).startswith("fsdp_sft.") or _module(frame) in _BETWEEN


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _frames() -> Iterator[FrameType]:
    """The frames of this thread outside this module, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _module(frame) != __name__:
            yield frame
        frame = frame.f_back
