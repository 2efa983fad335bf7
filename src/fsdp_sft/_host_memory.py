"""How much memory this host can still give to a process: what is free, and what its control group grants."""

from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
# By version: the root of the groups, what a line of a process's groups begins with behind its number, and
# the files of a group. https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html
_VERSIONS = (
    (_GROUPS, ":", "memory.max", "memory.current", "inactive_file"),
    (_GROUPS / "memory", "memory:", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_host_bytes() -> int | None:
    """Bytes that could be had without swapping; None where the system does not say (no Linux)."""
    found = [size for size in (_free(), *_granted()) if size is not None]
    return max(min(found), 0) if found else None


def _free() -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, LookupError, ValueError):
        return None


def _granted() -> Iterator[int | None]:
    """What is left in the control groups of this process, as far as they can be seen from here."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for root, mark, *files in _VERSIONS:
        for line in lines:
            _, _, name = line.partition(":")
            if name.startswith(mark):
                # A container sees its own group as the root, whatever the name it is told.
                own = root / name.removeprefix(mark).strip("/")
                yield from (
                    _left_in(group, *files) for group in (own, *own.parents) if group.is_relative_to(root)
                )


def _left_in(group: Path, limit: str, usage: str, cached: str) -> int | None:
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The cache of files that nobody has read again is given back when memory is asked for.
        return None if most == "max" else int(most) - used + int(counts.get(cached, 0))
    except (OSError, ValueError):
        return None
