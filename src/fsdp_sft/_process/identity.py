"""The identity of a process among those of all machines, and whether it still runs."""

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple


class ProcessId(NamedTuple):
    """The identity of a process, which no other process ever has.

    Attributes:
        pid: Number of the process.
        born: Time at which it started, in ticks since the machine booted; "" without /proc.
        machine: Id of the machine's boot, and the namespace of process numbers; "" without /proc. Two
            machines may have the same host name, and most have the same number of the namespace.
    """

    pid: int
    born: str
    machine: str


def this_process() -> ProcessId:
    """The identity of the calling process."""
    pid = os.getpid()
    try:
        return ProcessId(pid, _stat(pid)[19], _machine())
    except OSError:
        return ProcessId(pid, "", "")


def process_state(process: ProcessId) -> str:
    """``"dead"``, ``"stopped"`` or ``"running"`` for a process of this machine; "" for another machine's."""
    if not process.born or process.machine != this_process().machine:
        return ""
    try:
        stat = _stat(process.pid)
    except FileNotFoundError:
        return "dead"
    except OSError:
        return ""
    # A process that started at another time has only inherited the number; Z and X are zombie and dead.
    if stat[19] != process.born or stat[0] in ("Z", "X"):
        return "dead"
    return "stopped" if stat[0] in ("T", "t") else "running"


@cache
def _machine() -> str:
    """Id of the machine's boot, and the namespace of process numbers."""
    return (
        Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    )


def _stat(pid: int) -> list[str]:
    # Fields from the third of proc_pid_stat(5) on, since the second, a name, may contain blanks and brackets:
    # entry 0 is the state and entry 19 the start time.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
