"""How much memory this process can still get from its host, within the limits of its control groups."""

from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
# For version 2 and version 1 of control groups: the root folder of all groups; the beginning, after its
# number, of the line in /proc/self/cgroup that names this process's group; and the files and the entry of
# memory.stat that hold a group's limit, its usage and its inactive file cache.
# https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html
_VERSIONS = (
    (_GROUPS, ":", "memory.max", "memory.current", "inactive_file"),
    (_GROUPS / "memory", "memory:", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_host_bytes() -> int | None:
    """Bytes that this process could allocate without swapping; None if not known (no Linux)."""
    found = [size for size in (_free(), *_granted()) if size is not None]
    return max(min(found), 0) if found else None


def _free() -> int | None:
    """Bytes that the machine has available; None where the kernel does not say."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, LookupError, ValueError):
        return None


def _granted() -> Iterator[int | None]:
    """Bytes left in each control group of this process and in the groups around it, as far as visible."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for root, mark, *files in _VERSIONS:
        for line in lines:
            _, _, name = line.partition(":")
            if name.startswith(mark):
                # Inside a container the process's own group is mounted as the root, whatever its name there.
                own = root / name.removeprefix(mark).strip("/")
                yield from (
                    _left_in(group, *files) for group in (own, *own.parents) if group.is_relative_to(root)
                )


def _left_in(group: Path, limit: str, usage: str, cached: str) -> int | None:
    """Bytes left in one group; None without a limit."""
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The kernel gives up inactive file cache when memory is asked for, so it does not count as used.
        return None if most == "max" else int(most) - used + int(counts.get(cached, 0))
    except (OSError, ValueError):
        return None
