"""Notes each error that a test has waited for: where it was raised, as what, on which rank, naming what.

With ``FSDP_SFT_REFUSALS=FILE`` in the environment, ``pytest.raises`` adds a line of JSON to the file, in the
process of the test and in its ranks. ``python -m baseline`` compares them.
"""

import contextlib
import functools
import json
import os
import re
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from fsdp_sft._process.callers import is_between

FILE = "FSDP_SFT_REFUSALS"
_SOURCE = str(Path(__file__).parents[2] / "src" / "fsdp_sft") + os.sep
_TESTS = str(Path(__file__).parents[1]) + os.sep
# What a message names: what has an underscore or a dot within, or is given or called in it.
_NAME = re.compile(r"(?<![\w/.-])[A-Za-z_]\w*(?:\.\w+)*(?==|\()|(?<![\w/.-])[A-Za-z]\w*[_.][\w.]*\w")
_PHASE = re.compile(r"failed first while (.*) \(failed")
_PATH = re.compile(r"/[\w./~-]+|tmp-pytest[\w.-]*")


def install() -> None:
    """Note errors from now on, if the environment says so."""
    if FILE not in os.environ or hasattr(pytest.RaisesExc.__exit__, "__wrapped__"):
        return
    before = pytest.RaisesExc.__exit__

    @functools.wraps(before)
    def noting(
        self: Any, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            _note(error, trace, sys._getframe(1).f_code)
        return before(self, kind, error, trace)

    pytest.RaisesExc.__exit__ = noting  # type: ignore[method-assign]


def _note(error: BaseException, trace: TracebackType | None, at: Any) -> None:
    call = _call(trace)
    if call is None or not at.co_filename.startswith(_TESTS):
        return
    phases = [found[1] for note in getattr(error, "__notes__", ()) if (found := _PHASE.search(note))]
    line = {
        "test": at.co_filename.removeprefix(_TESTS).removesuffix(".py") + "::" + at.co_name,
        "call": call,
        "bases": [one.__name__ for one in type(error).__mro__ if one.__module__ == "builtins"][:-3],
        "typed": any(one.__name__ == "FsdpSftError" for one in type(error).__mro__),
        "phase": _PATH.sub("PATH", phases[0]) if phases else None,
        "rank": _rank(),
        "names": sorted(set(_NAME.findall(_PATH.sub("PATH", str(error))))),
    }
    # One write, so that lines of ranks stay whole. A test may have left no file descriptor.
    with contextlib.suppress(OSError), Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _call(trace: TracebackType | None) -> str | None:
    """The function of the library that was called."""
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename.startswith(_SOURCE) and not is_between(trace.tb_frame):
            return code.co_qualname
        trace = trace.tb_next
    return None


def _rank() -> str:
    """This process among how many: "1 of 2"."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return "alone"
    return f"{dist.get_rank()} of {dist.get_world_size()}"
