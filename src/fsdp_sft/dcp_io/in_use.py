"""One job at a time saves below a root; a file there says which.

Two jobs on one root would sweep each other's folders away while they are written, and prune each other's
steps. The file is made by the first save and goes with the process. One that was killed leaves it behind, and
the next job notices: at once if the process was on this machine or belonged to an earlier start of the same
job, else by the time since it was last touched.
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

from fsdp_sft._process import ProcessId, process_state, this_process
from fsdp_sft.dcp_io.codec import MALFORMED
from fsdp_sft.errors import CheckpointInUseError

FILE_NAME = ".in-use.json"
_BEAT_SECONDS = 10.0
_DEAD_SECONDS = 60.0
# (its id, how often it has been started) in the environment of a job; see the manuals of sbatch and torchrun.
_JOBS = {
    "Slurm job": ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
    "torchrun's job": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
}


class _Hold:
    """A root that this process saves below."""

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
        """Whether the file still is this one's."""
        found = _read(self.file)
        return found is not None and found["token"] == self.owner["token"]

    def begin(self) -> None:
        """Touch the file from now on."""
        self._thread.start()

    def end(self) -> None:
        """Let another job have the root."""
        self._stop.set()
        self._thread.join(1.0)
        if self.is_own:
            self.file.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_SECONDS):
            with suppress(OSError):
                if self.is_own:
                    os.utime(self.file)


_held: dict[Path, _Hold] = {}
_held_by = 0  # the process's number: a fork has the dict, and not the roots


def take(root: Path) -> None:
    """Make ``root`` this process's to save below, until it ends; nothing to do if it is.

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
    """Let other jobs have all roots of this process."""
    if _held_by == os.getpid():
        while _held:
            with suppress(OSError):
                _held.popitem()[1].end()


def _job() -> list[Any]:
    """[kind, id, starts before this one] of the job that this process belongs to; all empty for none."""
    for kind, (job_id, restarts) in _JOBS.items():
        if os.environ.get(job_id, "none") != "none":
            count = os.environ.get(restarts, "0")
            return [kind, os.environ[job_id], int(count) if count.isdecimal() else 0]
    return ["", "", 0]


def _create(file: Path, owner: dict[str, Any]) -> bool:
    """Whether the file was not there; it appears with its contents or not at all."""
    new = file.with_name(f"{file.name}-{owner['token']}")
    try:
        new.write_text(json.dumps(owner))
        return _link(new, file)
    finally:
        new.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> bool:
    """Whether nothing was at ``target``, where ``source``'s contents are now."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError:  # a file system without links; this one may be seen empty for a moment
        try:
            with open(target, "x") as file:
                file.write(source.read_text())
        except FileExistsError:
            return False
    return True


def _read(file: Path) -> dict[str, Any] | None:
    """What the file says; of one that says nothing, that nothing is known; None if it is not there."""
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
    state = process_state(found["process"])
    kind, job_id, restarts = found["job"]
    if state:
        return state == "dead"
    if kind and [kind, job_id] == own["job"][:2] and restarts < own["job"][2]:
        return True  # an earlier start of this very job
    probe = root / f"{FILE_NAME}-{uuid.uuid4().hex}"
    probe.touch()  # both times by the file system's clock
    try:
        return probe.stat().st_mtime - file.stat().st_mtime > _DEAD_SECONDS
    except FileNotFoundError:
        return True
    finally:
        probe.unlink(missing_ok=True)


def _remove(file: Path, stale: dict[str, Any] | None) -> None:
    """Remove what was found to be stale, and nothing that has come in its place."""
    aside = file.with_name(f"{file.name}-{uuid.uuid4().hex}")
    try:
        os.rename(file, aside)
    except FileNotFoundError:
        return
    if _read(aside) != stale:
        _link(aside, file)
    aside.unlink()


def _in_use(root: Path, found: dict[str, Any], why: str) -> CheckpointInUseError:
    kind, job_id, _ = found["job"]
    job = f", {kind} {job_id}" if kind else ""
    return CheckpointInUseError(
        f"{root} is in use by process {found['process'].pid} on {found['host']}{job}: {why}. Give this job "
        f"another folder, or end the other one; should it be gone, wait {_DEAD_SECONDS:.0f} s or delete "
        f"{root / FILE_NAME}"
    )
