"""The lock by which only one job at a time saves below a root.

Two jobs with one root would delete each other's unfinished folders, and prune each other's steps. The first
save makes a file in the root, which is deleted when the process ends (``_tensors/lock.py``).
"""

import atexit
import os
from contextlib import suppress
from pathlib import Path

from fsdp_sft._tensors.lock import DEAD_SECONDS, Lock, Owner
from fsdp_sft.errors import CheckpointInUseError

FILE_NAME = ".in-use.json"

_held: dict[Path, Lock] = {}
os.register_at_fork(after_in_child=_held.clear)  # a forked process inherits the dict, but not the locks


def take(root: Path) -> None:
    """Reserve ``root`` for the saves of this process until it ends, unless it is reserved already.

    Raises:
        CheckpointInUseError: If another job saves there, or has taken the root over since.
    """
    root = root.resolve()
    held = _held.get(root)
    if held is not None and held.is_own:
        return
    if held is not None:  # taken over, or the folder was deleted
        held.end()
        del _held[root]
    lock = Lock(root / FILE_NAME)
    other = lock.take()
    if other is not None:
        raise _in_use(root, other)
    _held[root] = lock


@atexit.register
def release_all() -> None:
    """Release all roots of this process."""
    while _held:
        with suppress(OSError):
            _held.popitem()[1].end()


def _in_use(root: Path, found: Owner) -> CheckpointInUseError:
    """The error that names the job which saves below a root."""
    kind, job_id, _ = found["job"]
    job = f", {kind} {job_id}" if kind else ""
    return CheckpointInUseError(
        f"{root} is in use by process {found['process'].pid} on {found['host']}{job}: one job at a time may "
        f"save below a root. Give this job another folder, or end the other one; should it be gone, wait "
        f"{DEAD_SECONDS:.0f} s or delete {root / FILE_NAME}"
    )
