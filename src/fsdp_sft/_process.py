"""Which process this is, told apart from every other of any machine; and whether another one still runs."""

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple


class ProcessId(NamedTuple):
    """A process that no other has been or will be mistaken for.

    Attributes:
        pid: Its number.
        born: When it started, in ticks since the machine did; "" without /proc.
        machine: The machine's start and the namespace of process numbers in it; "" without /proc. Not its
            name, nor the namespace alone: two machines may have one name, and most have one namespace number.
    """

    pid: int
    born: str
    machine: str


def this_process() -> ProcessId:
    """That of the caller."""
    pid = os.getpid()
    try:
        return ProcessId(pid, _stat(pid)[19], _machine())
    except OSError:
        return ProcessId(pid, "", "")


def process_state(process: ProcessId) -> str:
    """``"dead"``, ``"stopped"`` or ``"running"`` for a process of this machine; "" for one that is not."""
    if not process.born or process.machine != this_process().machine:
        return ""
    try:
        stat = _stat(process.pid)
    except FileNotFoundError:
        return "dead"
    except OSError:
        return ""
    if stat[19] != process.born or stat[0] in ("Z", "X"):  # another one with the same number, or a corpse
        return "dead"
    return "stopped" if stat[0] in ("T", "t") else "running"


@cache
def _machine() -> str:
    return (
        Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    )


def _stat(pid: int) -> list[str]:
    # Fields from the third on, as proc_pid_stat(5) numbers them; the second may contain blanks and brackets.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
