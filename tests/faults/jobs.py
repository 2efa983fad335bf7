"""Two jobs that save below one root at the same time: one of them is told, and the other loses nothing."""

import collections
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import fsdp_sft as fs
from fsdp_sft import dcp_io
from tests.harness import forks

SAVES, KEPT = 6, 3


@dataclass(frozen=True)
class JobOutcome:
    """What became of a job.

    Attributes:
        acknowledged: Steps whose save returned.
        error: Name of the error that ended it; "killed", or "" for none.
        seconds: Until the first save returned or was refused.
    """

    acknowledged: list[int]
    error: str
    seconds: float


def _job(connection: Connection, root: str, first: int) -> None:
    connection.send(None)
    connection.recv()  # both begin at once
    for step in range(first, first + 2 * SAVES, 2):
        model = torch.nn.Linear(64, 64)
        torch.nn.init.constant_(model.weight, step)
        try:
            fs.save_checkpoint(root, step, model=model, keep_last=KEPT)
        except Exception as caught:
            connection.send(type(caught).__name__)
            break
        connection.send(step)
    connection.send("")
    connection.recv()  # the one that is done first still has the root


class _Job:
    """A job in a process of its own."""

    def __init__(self, root: Path, first: int) -> None:
        self.connection, other = Pipe()
        self.process = forks.process(_job, other, str(root), first)
        self.process.start()
        other.close()
        self.connection.recv()

    def begin(self) -> None:
        self.connection.send(None)
        self._started = time.monotonic()

    def outcome(self) -> JobOutcome:
        """What it said until its end."""
        told: list[Any] = []
        seconds = 0.0
        try:
            while not told or told[-1] != "":
                told.append(self.connection.recv())
                seconds = seconds or time.monotonic() - self._started
        except (EOFError, ConnectionError):
            told.append("killed")
        saved = [step for step in told if isinstance(step, int)]
        return JobOutcome(saved, next((one for one in told if isinstance(one, str) and one), ""), seconds)

    def end(self) -> None:
        with suppress(ConnectionError):  # one that was killed
            self.connection.send(None)
        self.process.join()


def two_jobs(root: Path, kill_after: float | None = None) -> tuple[list[JobOutcome], list[str]]:
    """The outcomes of two jobs, and what is wrong with them.

    Args:
        root: Of both.
        kill_after: Seconds after which both get SIGKILL, and a third job begins; None lets them end.
    """
    both = [_Job(root, first) for first in (0, 1)]
    for job in both:
        job.begin()
    if kill_after is not None:
        time.sleep(kill_after)
        for job in both:
            job.process.kill()
    outcomes = [job.outcome() for job in both]
    for job in both:
        job.end()
    wrong = []
    kept = KEPT - (kill_after is not None)  # a save that was complete before its job could say so prunes too
    if kill_after is None and sorted(one.error for one in outcomes) != ["", "CheckpointInUseError"]:
        wrong.append(f"ended with {[outcome.error for outcome in outcomes]}")
    for outcome in outcomes:
        if outcome.error == "CheckpointInUseError" and (outcome.acknowledged or outcome.seconds > 5):
            wrong.append(f"told after {outcome.seconds:.1f} s and {len(outcome.acknowledged)} saves")
        for step in outcome.acknowledged[-kept:]:
            if dcp_io.verify_checkpoint(root / f"step-{step}"):
                wrong.append(f"step {step} was acknowledged and is not sound")
    expected = max((outcome.acknowledged[-1] for outcome in outcomes if outcome.acknowledged), default=-1)
    model = torch.nn.Linear(64, 64)
    try:
        loaded = fs.load_checkpoint(root, model=model).step
    except fs.CheckpointNotFoundError:
        loaded = -1
    most = expected if kill_after is None else max(expected + 2, 1)
    if not expected <= loaded <= most or (loaded >= 0 and model.weight.unique().tolist() != [loaded]):
        wrong.append(f"step {loaded} was loaded, {expected} was acknowledged")
    if kill_after is not None:
        third = _Job(root, 4 * SAVES)
        third.begin()
        outcomes.append(third.outcome())
        third.end()
        if outcomes[-1].error:
            wrong.append(f"the job after the kill ended with {outcomes[-1].error}")
    return outcomes, wrong


def jobs(count: int, root: Path) -> tuple[collections.Counter[str], list[object]]:
    """How jobs ended, and what was wrong: half of the trials end by themselves, half by a kill."""
    moments = random.Random(0)
    kills = [None if number % 2 else moments.uniform(0, 0.5) for number in range(count)]
    results = [two_jobs(root / f"jobs-{number}", kill) for number, kill in enumerate(kills)]
    ended = collections.Counter(outcome.error or "went on" for outcomes, _ in results for outcome in outcomes)
    return ended, [wrong for _, wrong in results if wrong]
