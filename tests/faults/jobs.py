"""Two jobs that save below one root at the same time: one of them is told, and the other loses nothing."""

import collections
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import fsdp_sft as fs
from fsdp_sft import dcp_io
from tests.faults.tables import counted
from tests.harness import forks

SAVES, KEPT = 6, 3


@dataclass(frozen=True)
class JobOutcome:
    """What became of a job.

    Attributes:
        acknowledged: Steps whose save returned.
        error: Name of the error that ended it; "" for none.
        seconds: Until the first save returned or was refused.
    """

    acknowledged: list[int]
    error: str
    seconds: float


def _job(connection: Connection, root: str, first: int) -> None:
    connection.send(None)
    connection.recv()  # both begin at once
    acknowledged: list[int] = []
    error, started, seconds = "", time.monotonic(), 0.0
    for step in range(first, first + 2 * SAVES, 2):
        model = torch.nn.Linear(64, 64)
        torch.nn.init.constant_(model.weight, step)
        try:
            fs.save_checkpoint(root, step, model=model, keep_last=KEPT)
            acknowledged.append(step)
        except Exception as caught:
            error = type(caught).__name__
        seconds = seconds or time.monotonic() - started
        if error:
            break
    connection.send(JobOutcome(acknowledged, error, seconds))
    connection.recv()  # the one that is done first still has the root


def two_jobs(root: Path) -> tuple[list[JobOutcome], list[str]]:
    """Both outcomes, and what is wrong with them."""
    ends = []
    for first in (0, 1):
        own, other = Pipe()
        process = forks.process(_job, other, str(root), first)
        process.start()
        ends.append((own, process))
    for own, _ in ends:
        own.recv()
    for own, _ in ends:
        own.send(None)
    outcomes = [own.recv() for own, _ in ends]
    for own, process in ends:
        own.send(None)
        process.join()
    wrong = []
    if sorted(outcome.error for outcome in outcomes) != ["", "CheckpointInUseError"]:
        wrong.append(f"ended with {[outcome.error for outcome in outcomes]}")
    for outcome in outcomes:
        if outcome.error and (outcome.acknowledged or outcome.seconds > 5):
            wrong.append(f"told after {outcome.seconds:.1f} s and {len(outcome.acknowledged)} saves")
        for step in outcome.acknowledged[-KEPT:]:
            if dcp_io.verify_checkpoint(root / f"step-{step}"):
                wrong.append(f"step {step} was acknowledged and is not sound")
    expected = max(outcome.acknowledged[-1] for outcome in outcomes if outcome.acknowledged)
    model = torch.nn.Linear(64, 64)
    loaded = fs.load_checkpoint(root, model=model).step
    if loaded != expected or model.weight.unique().tolist() != [expected]:
        wrong.append(f"step {loaded} was loaded, {expected} was acknowledged")
    return outcomes, wrong


def jobs(count: int, root: Path) -> tuple[str, int]:
    """The section on two jobs below one root."""
    results = [two_jobs(root / f"jobs-{number}") for number in range(count)]
    bad = sum(bool(wrong) for _, wrong in results)
    ended = collections.Counter(outcome.error or "went on" for outcomes, _ in results for outcome in outcomes)
    acknowledged = sum(len(outcome.acknowledged) for outcomes, _ in results for outcome in outcomes)
    slowest = max(outcome.seconds for outcomes, _ in results for outcome in outcomes if outcome.error)
    text = (
        f"## Two jobs that save below one root\n\n**{bad} wrong in {count} trials**: {acknowledged} steps "
        f"acknowledged, of the newest {KEPT} of each job 0 lost or unsound where nothing is wrong. Jobs: "
        f"{counted(ended)}; the slowest was told after {slowest:.1f} s.\n"
    )
    return text, bad
