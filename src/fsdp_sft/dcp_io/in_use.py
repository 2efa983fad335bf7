"""Only one job at a time may save below a root. A file in the root says which job that is.

Two jobs with one root would delete each other's unfinished folders, and prune each other's steps. The first
save makes the file, and it is deleted when the process ends. A process that is killed leaves it behind. The
next job notices that: at once if the process ran on this machine or belonged to an earlier start of the same
job, otherwise by the time since the file was last touched.
"""

import atexit
import json
import os
import socket
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_sft._codec import MALFORMED
from fsdp_sft._process import ProcessId, process_state, this_process
from fsdp_sft.errors import CheckpointInUseError

FILE_NAME = ".in-use.json"
_BEAT_SECONDS = 10.0  # between two touches of the file
_DEAD_SECONDS = 60.0  # without a touch, after which the job counts as dead
# Environment variables with a job's id and its number of restarts; see the manuals of sbatch and torchrun.
_JOBS = {
    "Slurm job": ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
    "torchrun's job": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
}


class _Hold:
    """This process's hold on a root: the file, and a thread that touches it."""

    def __init__(self, root: Path) -> None:
        self.file = root / FILE_NAME
        self.owner = {
            "host": socket.gethostname(),
            "process": list(this_process()),
            "job": _job(),
            "token": uuid.uuid4().hex,
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="fsdp_sft-in-use", daemon=True)

    @property
    def is_own(self) -> bool:
        """Whether the file is still the one that this process has made."""
        found = _read(self.file)
        return found is not None and found["token"] == self.owner["token"]

    def begin(self) -> None:
        """Start touching the file."""
        self._thread.start()

    def end(self) -> None:
        """Let another job have the root."""
        self._stop.set()
        self._thread.join(1.0)
        if self.is_own:
            self.file.unlink(missing_ok=True)

    def _beat(self) -> None:
        """Touch the file until the hold ends."""
        while not self._stop.wait(_BEAT_SECONDS):
            with suppress(OSError):
                if self.is_own:
                    os.utime(self.file)


_held: dict[Path, _Hold] = {}
_held_by = 0  # id of the process that has the roots: a forked process inherits the dict, but not the roots


def take(root: Path) -> None:
    """Reserve ``root`` for the saves of this process until it ends, unless it is reserved already.

    Raises:
        CheckpointInUseError: If another job saves there, or has taken the root over since.
    """
    global _held_by
    if _held_by != os.getpid():
        _held.clear()
        _held_by = os.getpid()
    root = root.resolve()
    held = _held.get(root)
    if held is not None and held.is_own:
        return
    if held is not None:  # taken over, or the folder was deleted
        held.end()
        del _held[root]
    hold = _Hold(root)
    while not _create(hold.file, hold.owner):
        found = _read(hold.file)
        if found is not None and not _is_gone(root, hold.file, found, hold.owner):
            raise _in_use(root, found, "one job at a time may save below a root")
        _remove(hold.file, found)
    hold.begin()
    _held[root] = hold


@atexit.register
def release_all() -> None:
    """Release all roots of this process."""
    if _held_by == os.getpid():
        while _held:
            with suppress(OSError):
                _held.popitem()[1].end()


def _job() -> list[Any]:
    """[kind, id, number of earlier starts] of the job that this process belongs to; all empty for none."""
    for kind, (job_id, restarts) in _JOBS.items():
        if os.environ.get(job_id, "none") != "none":
            count = os.environ.get(restarts, "0")
            return [kind, os.environ[job_id], int(count) if count.isdecimal() else 0]
    return ["", "", 0]


def _create(file: Path, owner: dict[str, Any]) -> bool:
    """Make the file unless it exists; whether it was made. It appears with its contents or not at all."""
    new = file.with_name(f"{file.name}-{owner['token']}")
    try:
        new.write_text(json.dumps(owner))
        return _link(new, file)
    finally:
        new.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> bool:
    """Give ``target`` the contents of ``source`` unless something is there; whether that was done.

    A hard link, unlike a rename, fails if the name exists, and unlike opening a new file makes the contents
    appear together with the name.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links; another job may see the file empty for a moment
        try:
            with open(target, "x") as file:
                file.write(source.read_text())
        except FileExistsError:
            return False
    return True


def _read(file: Path) -> dict[str, Any] | None:
    """What the file says; unknown values if it cannot be read as such a file; None if it is not there."""
    try:
        found = json.loads(file.read_text())
        process, (kind, job_id, restarts) = ProcessId(*found["process"]), found["job"]
        known = {"host": str(found["host"]), "process": process, "token": found["token"]}
        return {**known, "job": [str(kind), str(job_id), int(restarts)]}
    except FileNotFoundError:
        return None
    except MALFORMED:
        return {"host": "?", "process": ProcessId(0, "", ""), "token": "", "job": ["", "", 0]}


def _is_gone(root: Path, file: Path, found: dict[str, Any], own: dict[str, Any]) -> bool:
    """Whether the process that made the file has ended, as far as that can be told."""
    state = process_state(found["process"])
    kind, job_id, restarts = found["job"]
    if state:
        return state == "dead"
    if kind and [kind, job_id] == own["job"][:2] and restarts < own["job"][2]:
        return True  # an earlier start of this very job
    probe = root / f"{FILE_NAME}-{uuid.uuid4().hex}"
    probe.touch()  # so that both times are by the same clock, that of the file system
    try:
        return probe.stat().st_mtime - file.stat().st_mtime > _DEAD_SECONDS
    except FileNotFoundError:
        return True
    finally:
        probe.unlink(missing_ok=True)


def _remove(file: Path, stale: dict[str, Any] | None) -> None:
    """Remove a stale file, but not a new one that has taken its place meanwhile.

    Looking and deleting are two steps, and another job may act between them. So the file is renamed, which
    only one job can do, and looked at again under a name that only this process knows. A file that turns out
    to be a new one is put back.
    """
    aside = file.with_name(f"{file.name}-{uuid.uuid4().hex}")
    try:
        os.rename(file, aside)
    except FileNotFoundError:
        return
    if _read(aside) != stale:
        _link(aside, file)
    aside.unlink()


def _in_use(root: Path, found: dict[str, Any], why: str) -> CheckpointInUseError:
    """The error that names the job which saves below a root."""
    kind, job_id, _ = found["job"]
    job = f", {kind} {job_id}" if kind else ""
    return CheckpointInUseError(
        f"{root} is in use by process {found['process'].pid} on {found['host']}{job}: {why}. Give this job "
        f"another folder, or end the other one; should it be gone, wait {_DEAD_SECONDS:.0f} s or delete "
        f"{root / FILE_NAME}"
    )
