"""The identity of a process among those of all machines, and whether it still runs."""

import os
from pathlib import Path


def this_process() -> tuple[int, str, str]:
    """The identity of the calling process, which no other process ever has.

    Returns:
        Its number; the time at which it started, in ticks since the machine booted; and the id of the
        machine's boot with the namespace of process numbers, since two machines may have the same host name,
        and most have the same number of the namespace. The last two are "" without /proc.
    """
    pid = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return pid, _stat(pid)[19], f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return pid, "", ""


def process_state(pid: int, born: str, machine: str) -> str:
    """``"dead"``, ``"stopped"`` or ``"running"`` for a process of this machine; "" for another machine's."""
    if not born or machine != this_process()[2]:
        return ""
    try:
        stat = _stat(pid)
    except FileNotFoundError:
        return "dead"
    except OSError:
        return ""
    # A process that started at another time has only inherited the number; Z and X are zombie and dead.
    if stat[19] != born or stat[0] in ("Z", "X"):
        return "dead"
    return "stopped" if stat[0] in ("T", "t") else "running"


def _stat(pid: int) -> list[str]:
    # Fields from the third of proc_pid_stat(5) on, since the second, a name, may contain blanks and brackets:
    # entry 0 is the state and entry 19 the start time.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
