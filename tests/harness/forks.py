"""Processes that need not import anything: forks of one that has imported what nearly every test needs.

A fork takes a few hundredths of a second; importing torch, transformers and the library takes five.
"""

import atexit
import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PRELOAD = ["tests.harness.preloaded"]


def process(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A process, not started yet, that will run ``target``, which must be at the top of its module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context.Process(target=target, args=args, kwargs=kwargs)


@dataclass(frozen=True)
class Done:
    """How a program ended."""

    exit_code: int | None  # None: it was killed after the time-out
    text: str  # stdout and stderr


def run_program(script: Path, *, environment: Mapping[str, str] | None = None, timeout: float = 240) -> Done:
    """Run a script as ``python script`` in its folder would, but for the imports' time."""
    with tempfile.NamedTemporaryFile("r+") as printed:
        running = process(_as_main, script, dict(environment or os.environ), printed.name)
        running.start()
        running.join(timeout)
        if running.exitcode is None:
            running.kill()
            running.join()
            return Done(None, printed.read())
        return Done(running.exitcode, printed.read())


def _as_main(script: Path, environment: dict[str, str], printed: str) -> None:
    fd = os.open(printed, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(script.parent)
    sys.argv = [str(script)]
    sys.path.insert(0, str(script.parent))
    code = 1
    try:
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()  # a fork of multiprocessing ends without them
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
