"""One job at a time saves below a root, and one that is gone is no hindrance."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft.dcp_io import saving
from tests.harness import forks
from tests.harness.ranks import run_distributed

PROGRAM = """
import sys, torch, fsdp_sft as fs
fs.save_checkpoint(sys.argv[1], int(sys.argv[2]), model=torch.nn.Linear(2, 2), keep_last=2)
print("saved", flush=True)
input()
"""


def _save(root: Path, step: int) -> None:
    fs.save_checkpoint(root, step, model=torch.nn.Linear(2, 2))


def _another_job(root: Path, step: int, **environment: str) -> subprocess.Popen[str]:
    job = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(root), str(step)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        text=True,
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "saved\n"
    return job


def test_the_second_job_is_told_of_the_first(tmp_path: Path) -> None:
    (tmp_path / ".tmp-mine").mkdir()
    job = _another_job(tmp_path, 1, SLURM_JOB_ID="4711")
    before = time.monotonic()
    with pytest.raises(fs.CheckpointInUseError, match=rf"by process {job.pid} on .*, Slurm job 4711: one"):
        _save(tmp_path, 2)
    assert time.monotonic() - before < 5
    assert fs.load_checkpoint(tmp_path, model=torch.nn.Linear(2, 2)).step == 1, "reading is free"
    job.communicate("\n")  # its end lets others in
    _save(tmp_path, 2)
    assert (tmp_path / ".tmp-mine").is_dir(), "not of the library's making"


def _save_and_stay(connection: Connection, root: str) -> None:
    _save(Path(root), 1)
    connection.send("saved")
    connection.recv()


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_job_that_was_killed_is_no_hindrance_and_one_that_stands_still_is(
    signal_number: int, tmp_path: Path
) -> None:
    own, other = Pipe()
    job = forks.process(_save_and_stay, other, str(tmp_path))
    job.start()
    assert own.recv() == "saved"
    os.kill(job.pid, signal_number)
    try:
        if signal_number == signal.SIGSTOP:
            with pytest.raises(fs.CheckpointInUseError):
                _save(tmp_path, 2)
        else:
            job.join()
            _save(tmp_path, 2)
    finally:
        job.kill()
        job.join()


def test_a_forked_process_is_another_job(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    child = os.fork()
    if child == 0:
        try:
            _save(tmp_path, 2)
        except fs.CheckpointInUseError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    _save(tmp_path, 3)
    job = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "4"], capture_output=True, text=True, check=False
    )
    assert f"is in use by process {os.getpid()} on" in job.stderr


def test_pipes_of_those_names_are_not_waited_for(tmp_path: Path) -> None:
    for name in saving.FILES:
        os.mkfifo(tmp_path / name)
    started = time.monotonic()
    _save(tmp_path, 1)
    assert time.monotonic() - started < 5


def test_a_deleted_folder_is_taken_anew(tmp_path: Path) -> None:
    _save(tmp_path / "root", 1)
    subprocess.run(["rm", "-r", str(tmp_path / "root")], check=True)
    _save(tmp_path / "root", 1)
    assert {*saving.FILES} <= {*os.listdir(tmp_path / "root")}


def _refused_on_all(root: str) -> None:
    with pytest.raises(fs.CheckpointInUseError, match="is in use by process"):
        _save(Path(root), 2)


def test_all_ranks_are_told(tmp_path: Path) -> None:
    job = _another_job(tmp_path, 1)
    run_distributed(_refused_on_all, 2, str(tmp_path))
    job.communicate("\n")
