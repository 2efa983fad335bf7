"""How much memory this host can still give to a process: what is free, and what its control group grants."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def available_host_bytes() -> int | None:
    """Bytes that could be had without swapping; None where the system does not say (no Linux)."""
    found = [size for size in (_free(), *map(_left_in, _own_groups())) if size is not None]
    return max(min(found), 0) if found else None


def _free() -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None


def _own_groups() -> list[Path]:
    """The control group of this process and those around it, as far as they can be seen from here.

    Version 2, https://docs.kernel.org/admin-guide/cgroup-v2.html. A container sees its own group as the root,
    whatever the name it is told.
    """
    try:
        (name,) = (line[3:] for line in _OWN_GROUPS.read_text().splitlines() if line.startswith("0::"))
    except (OSError, ValueError):
        return []
    own = _GROUPS / name.strip("/")
    return [group for group in (own, *own.parents) if group == _GROUPS or _GROUPS in group.parents]


def _left_in(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The cache of files that nobody has read again is given back when memory is asked for.
        return None if limit == "max" else int(limit) - used + int(counts.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
