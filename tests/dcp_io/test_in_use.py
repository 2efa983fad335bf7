"""One job at a time saves below a root, and one that is gone is no hindrance."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft._tensors import lock
from fsdp_sft.dcp_io import in_use
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
    with pytest.raises(
        fs.CheckpointInUseError, match=rf"by process {job.pid} on .*, Slurm job 4711: one job"
    ):
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


def _claimed(root: Path, seconds_ago: float, **facts: Any) -> Path:
    """As a job on another machine leaves it."""
    file = root / in_use.FILE_NAME
    owner = {"host": "far", "process": [7, "1", "another machine"], "job": ["", "", 0], "token": "x", **facts}
    file.write_text(json.dumps(owner))
    os.utime(file, (time.time() - seconds_ago,) * 2)
    return file


def test_a_job_elsewhere_counts_as_gone_after_a_minute_of_silence(tmp_path: Path) -> None:
    _claimed(tmp_path, 50)
    with pytest.raises(
        fs.CheckpointInUseError, match=r"process 7 on far: .* wait 60 s or delete .*in-use.json"
    ):
        _save(tmp_path, 1)
    _claimed(tmp_path, 61)
    _save(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir() if "in-use" in path.name] == [in_use.FILE_NAME]


@pytest.mark.parametrize(
    ("job", "is_taken_over"),
    [
        (["Slurm job", "12", 0], True),
        (["Slurm job", "12", 1], False),
        (["Slurm job", "13", 0], False),
        (["torchrun's job", "12", 0], False),
    ],
)
def test_an_earlier_start_of_the_same_job_is_gone(
    job: list[Any], is_taken_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    _claimed(tmp_path, 1, job=job)
    if is_taken_over:
        _save(tmp_path, 1)
    else:
        with pytest.raises(fs.CheckpointInUseError):
            _save(tmp_path, 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"process": 3, "job": null}',
        '{"host": "h", "token": "t", "process": [1, "", ""], "job": ["", "", 1e999]}',
    ],
)
def test_a_file_that_says_nothing_counts_by_its_age(text: str, tmp_path: Path) -> None:
    file = tmp_path / in_use.FILE_NAME
    file.write_text(text)
    with pytest.raises(fs.CheckpointInUseError, match=r"by process 0 on \?: one job"):
        _save(tmp_path, 1)
    os.utime(file, (time.time() - 61,) * 2)
    _save(tmp_path, 1)


def test_a_pipe_of_that_name_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / in_use.FILE_NAME)
    started = time.monotonic()
    with pytest.raises(fs.CheckpointInUseError, match=r"by process 0 on \?: one job"):
        _save(tmp_path, 1)
    assert time.monotonic() - started < 5


def test_who_was_taken_over_does_not_go_on(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    _save(tmp_path, 2)
    _claimed(tmp_path, 1)
    with pytest.raises(fs.CheckpointInUseError, match="by process 7 on far"):
        _save(tmp_path, 3)
    assert json.loads((tmp_path / in_use.FILE_NAME).read_text())["host"] == "far"


def test_what_is_removed_is_what_was_looked_at(tmp_path: Path) -> None:
    file = _claimed(tmp_path, 61)
    stale = lock.read(file)
    assert stale is not None
    _claimed(tmp_path, 1, token="a newer one")
    lock.remove(file, stale)
    assert lock.read(file) == {**stale, "token": "a newer one"}
    assert list(tmp_path.iterdir()) == [file]


def test_a_deleted_folder_is_taken_anew(tmp_path: Path) -> None:
    _save(tmp_path / "root", 1)
    subprocess.run(["rm", "-r", str(tmp_path / "root")], check=True)
    _save(tmp_path / "root", 1)
    assert (tmp_path / "root" / in_use.FILE_NAME).exists()


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    _save(tmp_path, 1)
    assert json.loads((tmp_path / in_use.FILE_NAME).read_text())["process"][0] == os.getpid()
    _claimed(tmp_path / "", 1)
    with pytest.raises(fs.CheckpointInUseError):
        _save(tmp_path, 2)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, _: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            _save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []
    _save(tmp_path, 1)


def _refused_on_all(root: str) -> None:
    with pytest.raises(fs.CheckpointInUseError, match="process 7 on far"):
        _save(Path(root), 1)


def test_all_ranks_are_told(tmp_path: Path) -> None:
    _claimed(tmp_path, 1)
    run_distributed(_refused_on_all, 2, str(tmp_path))


def test_a_folder_in_the_place_of_a_lock(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    (file / "of somebody").mkdir(parents=True)
    os.utime(file, (0, 0))  # touched by nobody for long
    own = lock.Lock(file)
    assert own.take() is None
    own.end()
    assert [path.name for path in tmp_path.glob(".lock-*/*")] == ["of somebody"]
