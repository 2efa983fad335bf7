"""A lock that gives one job a folder to itself, and does not outlive a job that is killed.

The file names the process that made it, which touches it regularly and deletes it in the end. If the process
is killed, the next job finds the file stale: at once if the process ran on this machine or belonged to an
earlier start of the same job, and by the time since the last touch if not.
"""

import json
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_sft._process.codec import MALFORMED
from fsdp_sft._process.identity import ProcessId, process_state, this_process

DEAD_SECONDS = 60.0  # since the last touch, after which the job counts as dead
_BEAT_SECONDS = 10.0  # between two touches of the file
_LOOK_SECONDS = 0.2  # between two checks by a job that waits
# Environment variables with a job's id and its number of restarts; see the manuals of sbatch and torchrun.
_JOBS = {
    "Slurm job": ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
    "torchrun's job": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
}

Owner = dict[str, Any]


class Lock:
    """This process's lock: the file, and a thread that touches it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.owner: Owner = {
            "host": socket.gethostname(),
            "process": list(this_process()),
            "job": _job(),
            "token": uuid.uuid4().hex,
        }
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="fsdp_sft-lock", daemon=True)

    @property
    def is_own(self) -> bool:
        """Whether the file is still the one that this process has made."""
        found = read(self.file)
        return found is not None and found["token"] == self.owner["token"]

    def take(self) -> Owner | None:
        """Take the lock, also from a job that has ended; None, or the owner if a live job has it."""
        while not _create(self.file, self.owner):
            found = read(self.file)
            if found is None:
                continue
            if not _is_gone(self.file, found, self.owner):
                return found
            remove(self.file, found)
        self._thread.start()
        return None

    def take_or_wait(self, is_made: Callable[[], bool]) -> bool:
        """Wait until this job has the lock (True), or until another has made what it is for (False)."""
        while not is_made():
            if self.take() is None:
                if not is_made():  # it may have been made between the check and the lock
                    return True
                self.end()
                break
            time.sleep(_LOOK_SECONDS)
        return False

    def end(self) -> None:
        """Release the lock, if this job has it."""
        if self._thread.ident is None:
            return
        self._stop.set()
        self._thread.join(1.0)
        if self.is_own:
            self.file.unlink(missing_ok=True)

    def _beat(self) -> None:
        """Touch the file until the lock is released."""
        while not self._stop.wait(_BEAT_SECONDS):
            with suppress(OSError):
                if self.is_own:
                    os.utime(self.file)


def claim_on(target: Path) -> Path:
    """Lock file for making a folder. It only saves work: if two jobs make it, the first rename wins."""
    return target.with_name(f".claim-{target.name}")


def read(file: Path) -> Owner | None:
    """The owner that a lock file names; an unknown one if the file is malformed, None if it is missing."""
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            raise ValueError("it is no regular file")  # a pipe would be waited for
        found = json.loads(file.read_text())
        process, (kind, job_id, restarts) = ProcessId(*found["process"]), found["job"]
        known = {"host": str(found["host"]), "process": process, "token": found["token"]}
        return {**known, "job": [str(kind), str(job_id), int(restarts)]}
    except FileNotFoundError:
        return None
    except MALFORMED:
        return {"host": "?", "process": ProcessId(0, "", ""), "token": "", "job": ["", "", 0]}


def remove(file: Path, stale: Owner | None) -> None:
    """Remove a stale lock file, but not a new one that has replaced it meanwhile.

    Another job may act between a check and a deletion. So the file is renamed, which only one job can do, and
    checked under a name that only this process knows. A new file is put back.
    """
    aside = file.with_name(f"{file.name}-{uuid.uuid4().hex}")
    try:
        os.rename(file, aside)
    except FileNotFoundError:
        return
    if read(aside) != stale:
        _link(aside, file)
    with suppress(IsADirectoryError, PermissionError):  # a folder of somebody's stays under its new name
        aside.unlink()


def _job() -> list[Any]:
    """[kind, id, number of earlier starts] of the job that this process belongs to; all empty for none."""
    for kind, (job_id, restarts) in _JOBS.items():
        if os.environ.get(job_id, "none") != "none":
            count = os.environ.get(restarts, "0")
            return [kind, os.environ[job_id], int(count) if count.isdecimal() else 0]
    return ["", "", 0]


def _create(file: Path, owner: Owner) -> bool:
    """Make the file unless it exists; whether it was made. It appears with its contents or not at all."""
    new = file.with_name(f"{file.name}-{owner['token']}")
    try:
        new.write_text(json.dumps(owner))
        return _link(new, file)
    finally:
        new.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> bool:
    """Make ``target`` with the contents of ``source`` unless it exists; whether it was made.

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


def _is_gone(file: Path, found: Owner, own: Owner) -> bool:
    """Whether the process that made the file has ended, as far as this one can tell."""
    state = process_state(found["process"])
    kind, job_id, restarts = found["job"]
    if state:
        return state == "dead"
    if kind and [kind, job_id] == own["job"][:2] and restarts < own["job"][2]:
        return True  # an earlier start of this very job
    probe = file.with_name(f"{file.name}-{uuid.uuid4().hex}")
    probe.touch()  # so that both times are by the same clock, that of the file system
    try:
        return probe.stat().st_mtime - file.stat().st_mtime > DEAD_SECONDS
    except FileNotFoundError:
        return True
    finally:
        probe.unlink(missing_ok=True)
