"""The lock by which only one job at a time saves below a root.

Two jobs with one root would delete each other's unfinished folders, and prune each other's steps. The first
save locks a file in the root; the system unlocks it when the process ends, however it ends.
"""

import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from fsdp_sft._tensors.disk import read_bytes, write_bytes
from fsdp_sft.errors import CheckpointCorruptError, CheckpointInUseError

LOCK, OWNER = FILES = (".in-use.lock", ".in-use.txt")  # the second says in words who has the first

# By root: the lock, this process, and the number of the file.
_held: dict[Path, tuple[FileLock, tuple[int, int]]] = {}


def take(root: Path) -> None:
    """Reserve ``root`` for the saves of this process until it ends, unless it is reserved already.

    Raises:
        CheckpointInUseError: If another job saves there.
    """
    root = root.resolve()
    file = root / LOCK
    if root in _held and file.exists() and _held[root][1] == (os.getpid(), file.stat().st_ino):
        return
    # A process that was forked has its parent's entry, and a folder that was made anew another file.
    lock = FileLock(file, thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise _in_use(root) from None
    _held[root] = lock, (os.getpid(), file.stat().st_ino)
    number = os.environ.get("SLURM_JOB_ID")
    job = f", Slurm job {number}" if number else ""
    (root / OWNER).unlink(missing_ok=True)
    write_bytes(root / OWNER, f"process {os.getpid()} on {socket.gethostname()}{job}".encode())


def release_all() -> None:
    """Release all roots of this process."""
    while _held:
        _held.popitem()[1][0].release(force=True)


def _in_use(root: Path) -> CheckpointInUseError:
    """The error that names the job which saves below a root."""
    try:
        owner = read_bytes(root / OWNER, 1000).decode(errors="replace")
    except CheckpointCorruptError:
        owner = "another job"
    return CheckpointInUseError(
        f"{root} is in use by {owner}: one job at a time may save below a root. Give this job another "
        "folder, or end the other one"
    )
