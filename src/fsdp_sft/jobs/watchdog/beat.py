"""The heartbeat: the state of one rank at one moment."""

import json
import os
import sys
import sysconfig
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from fsdp_sft._process.identity import ProcessId

RUNNING, ENDED, FAILED = "running", "ended", "failed"

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_COLLECTIVES = os.path.join("torch", "distributed", "")
_PACKAGE = Path(__file__).resolve().parents[2]
# Files whose functions wait for other ranks: their names say more than those of torch's functions inside.
_TREE = str(_PACKAGE / "_ranks/tree.py")
_AGREEMENT = (
    _TREE,
    *(str(_PACKAGE / name) for name in ("_ranks/agree.py", "attention/context_parallel/heads.py")),
)


@dataclass(frozen=True)
class Beat:
    """One heartbeat.

    Attributes:
        rank: The rank.
        host: Host name.
        process: Identity of the rank's process.
        number: Number of the beat. If it stays the same, the process does not run.
        progress: Number of calls of ``step`` and changes of phase so far. If it stays the same, the loop
            hangs.
        step: The last step that the loop began; None before the first.
        phase: ``"train"``, or the name of the innermost ``phase``.
        limit: Seconds for which ``progress`` may stay the same; infinite while paused.
        state: ``"running"``, ``"ended"`` or ``"failed"`` (an exception left the block).
        error: The exception of a failed rank.
        where: Innermost place in the caller's own code, such as ``"train.py:33 in main"``.
        collective: Function of torch.distributed, or of this library's agreement between ranks, that the main
            thread waits in; "" if it is in none.
        saw: (rank, state) of processes on the same machine that do not run.
    """

    rank: int
    host: str
    process: ProcessId
    number: int = 0
    progress: int = 0
    step: int | None = None
    phase: str = "train"
    limit: float = 0.0
    state: str = RUNNING
    error: str = ""
    where: str = ""
    collective: str = ""
    saw: tuple[tuple[int, str], ...] = ()

    def to_bytes(self) -> bytes:
        """The beat as stored; a few hundred bytes."""
        return json.dumps(list(vars(self).values()), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> "Beat":
        """The inverse of ``to_bytes``."""
        beat = cls(*(_tuples(item) for item in json.loads(value)))
        return replace(beat, process=ProcessId(*beat.process))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def place_of_main_thread() -> tuple[str, str]:
    """(innermost place of the main thread in the user's own code, collective that it waits in or "")."""
    # From the innermost frame outwards: the frames of a collective, if any, those of libraries, and the first
    # one of the user's.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    where = collective = ""
    if frame is not None and frame.f_code.co_filename == _TREE:
        collective = frame.f_code.co_name  # it waits in C++, with no frame of torch in between
    while frame is not None:
        path = frame.f_code.co_filename
        if _COLLECTIVES in path and not where:
            if not path.endswith("c10d_logger.py"):  # torch wraps each collective in a function of this file
                collective = frame.f_code.co_name
        elif collective and path in _AGREEMENT and not where:
            collective = frame.f_code.co_name  # "all_reduce_sum" says more than the "recv" inside it
        elif not where and not path.startswith((*_LIBRARIES, f"{_PACKAGE}{os.sep}", "<frozen")):
            where = _named(frame)
        frame = frame.f_back
    return where, collective


def _named(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
