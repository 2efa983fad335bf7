"""Processes that need not import anything: forks of one that has imported what nearly every test needs.

A fork takes a few hundredths of a second; importing torch, transformers and the library takes five.
"""

import atexit
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.harness.device import become, for_ranks
from tests.simulated.device import Simulated


def process(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A process, not started yet, that will run ``target``, which must be at the top of its module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.preloaded"])
    return context.Process(target=target, args=args, kwargs=kwargs)


def end_server() -> None:
    """End the fork server, and wait for it: what its forks have used then counts as used by this process."""
    from multiprocessing import forkserver

    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # what multiprocessing's own tests call


class Program:
    """``python script arguments`` under way in the script's folder, without the time that imports take.

    It computes on the device that the harness is set to (``device.asked``).

    Args:
        script: To run as ``__main__``.
        arguments: On its command line.
        environment: Of the process; None is this one's.
    """

    def __init__(self, script: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._printed = tempfile.NamedTemporaryFile("r+")  # noqa: SIM115  closed in wait
        own = dict(os.environ if environment is None else environment)
        self._process = process(_as_main, script, arguments, own, self._printed.name, for_ranks(1)[0])
        self._process.start()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.exitcode is None

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self._process.pid, number)

    def wait(self, timeout: float = 240) -> tuple[int | None, str]:
        """Its exit code, None if it had to be killed, and all that it printed."""
        self._process.join(timeout)
        code = self._process.exitcode
        self._process.kill()
        self._process.join()
        with self._printed as printed:
            return code, printed.read()


def _as_main(
    script: Path,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    printed: str,
    simulated: Simulated | None,
) -> None:
    fd = os.open(printed, os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.environ.clear()
    os.environ.update(environment)
    become(simulated)
    os.chdir(script.parent)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
        if simulated is not None:
            simulated.check()
    finally:  # multiprocessing prints what is raised, and makes it the exit code
        atexit._run_exitfuncs()  # a fork of multiprocessing ends without them
