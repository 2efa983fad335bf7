"""Roots: one job at a time saves below one, readers beside it take whole steps; mounts of object stores."""

import errno
import itertools
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_sft as fs
from fsdp_sft.dcp_io import checkpoint, retention, saving
from tests.harness import forks
from tests.harness.ranks import run_distributed


def _save(root: Path, step: int) -> None:
    fs.save_checkpoint(root, step, model=nn.Linear(2, 2))


def _save_and_stay(connection: Connection, root: Path) -> None:
    os.environ["SLURM_JOB_ID"] = "4711"
    _save(root, 1)
    connection.send("saved")
    connection.recv()


@contextmanager
def _another_job(root: Path) -> Iterator[Any]:
    """A process that has saved step 1, and has the root until it ends."""
    own, other = Pipe()
    job = forks.process(_save_and_stay, other, root)
    job.start()
    assert own.recv() == "saved"
    try:
        yield job
    finally:
        job.kill()
        job.join()


def _refused(root: Path, words: str) -> None:
    with pytest.raises(fs.CheckpointInUseError, match=words):
        _save(root, 2)


def test_the_second_job_is_told_of_the_first(tmp_path: Path) -> None:
    (tmp_path / ".tmp-mine").mkdir()
    with _another_job(tmp_path) as job:
        before = time.monotonic()
        _refused(tmp_path, rf"by process {job.pid} on .*, Slurm job 4711: one")
        assert time.monotonic() - before < 5
        assert fs.load_checkpoint(tmp_path, model=nn.Linear(2, 2)).step == 1, "reading is free"
        run_distributed(_refused, 2, tmp_path, f"is in use by process {job.pid}")
        os.kill(job.pid, signal.SIGSTOP)
        _refused(tmp_path, "one")  # a job that stands still has its root
    _save(tmp_path, 2)  # one that was killed has not
    assert (tmp_path / ".tmp-mine").is_dir(), "not of the library's making"


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


def test_pipes_of_those_names_are_not_waited_for(tmp_path: Path) -> None:
    for name in saving.FILES:
        os.mkfifo(tmp_path / name)
    started = time.monotonic()
    _save(tmp_path, 1)
    assert time.monotonic() - started < 5


def test_a_deleted_folder_is_taken_anew_and_a_renamed_one_again(tmp_path: Path) -> None:
    _save(tmp_path / "root", 1)
    shutil.rmtree(tmp_path / "root")
    _save(tmp_path / "root", 1)
    assert {*saving.FILES} <= {*os.listdir(tmp_path / "root")}
    _save((tmp_path / "root").rename(tmp_path / "other"), 2)  # this job's still


# --- mounts of object stores: folders that cannot be fsynced, renames that copy ----------------------------


def _save_and_load(root: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    fs.save_checkpoint(root, 1, model=model)
    fs.load_checkpoint(root, model=other)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_folders_that_cannot_be_put_on_the_disk(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refused(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(number, os.strerror(number))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refused)
    if number == errno.EIO:  # an error of the disk
        with pytest.raises(OSError, match="Input/output error"):
            _save_and_load(tmp_path)
    else:
        _save_and_load(tmp_path)


def test_renames_that_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def copied(source: Any, target: Any) -> None:
        if os.path.isdir(source):
            shutil.copytree(source, target)
            shutil.rmtree(source)
        else:
            rename(source, target)

    monkeypatch.setattr(os, "rename", copied)
    _save_and_load(tmp_path)
    fs.save_checkpoint(tmp_path, 2, model=nn.Linear(3, 2), keep_last=1)
    assert [info.step for info in fs.find_checkpoints(tmp_path)] == [2]
    assert not list(tmp_path.glob(".tmp*"))


# --- a reader beside a job that saves and prunes: it takes the next step and never a torn one --------------


def _model(value: float) -> torch.nn.Module:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def _value(model: torch.nn.Module) -> float:
    return float(torch.cat([p.detach().flatten() for p in model.parameters()]).unique().item())


def _prune_aside(root: Path, step: int) -> None:
    """As another job does between two looks: a newer step, and all older ones gone."""
    fs.save_checkpoint(root, step, model=_model(step), train_state={"step": step}, keep_last=1)


def _prune_before(name: str, root: Path, steps: Iterator[int], patch: pytest.MonkeyPatch) -> None:
    """The next of these steps, while there is one, before each call of a function of loading."""
    real = getattr(checkpoint, name)

    def pruned_first(*args: Any, **kwargs: Any) -> Any:
        for step in itertools.islice(steps, 1):
            _prune_aside(root, step)
        return real(*args, **kwargs)

    patch.setattr(checkpoint, name, pruned_first)


@pytest.mark.parametrize(
    "name",
    ["open_folder", "match_model", "read_rank_content", "read_tensors"],
    ids=["before it is opened", "before the check", "before its state", "before the tensors"],
)
@pytest.mark.parametrize("fallback", [True, False])
def test_a_step_that_goes_is_no_damage(
    name: str, fallback: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.save_checkpoint(tmp_path, 1, model=_model(1), train_state={"step": 1})
    _prune_before(name, tmp_path, iter((2, 3, 4)), monkeypatch)
    model = _model(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = fs.load_checkpoint(tmp_path, model=model, fallback=fallback)
    assert loaded.train_state == {"step": loaded.step}
    assert _value(model) == loaded.step == 4


def test_a_listing_that_another_job_has_outrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs.save_checkpoint(tmp_path, 1, model=_model(1))
    real, newer = Path.iterdir, [2]

    def outrun(folder: Path) -> Iterator[Path]:
        listed = list(real(folder))
        if folder == tmp_path and newer:  # what is listed goes before anybody looks at it
            _prune_aside(tmp_path, newer.pop())
        return iter(listed)

    monkeypatch.setattr(Path, "iterdir", outrun)
    assert fs.load_checkpoint(tmp_path, model=_model(0)).step == 2


def test_steps_that_are_gone_when_they_are_looked_at_are_not_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.save_checkpoint(tmp_path, 1, model=_model(1))
    real, newer = retention.examine, [2]

    def outrun(*args: Any, **kwargs: Any) -> Any:
        if newer:
            _prune_aside(tmp_path, newer.pop())
        return real(*args, **kwargs)

    monkeypatch.setattr(retention, "examine", outrun)
    assert [info.step for info in fs.find_checkpoints(tmp_path)] == [2]


def test_a_path_to_one_step_takes_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs.save_checkpoint(tmp_path, 1, model=_model(1))
    _prune_before("open_folder", tmp_path, itertools.count(2), monkeypatch)
    with pytest.raises(fs.CheckpointCorruptError, match="step-1"):
        fs.load_checkpoint(tmp_path / "step-1", model=_model(0))


def _read_often(root: str) -> list[int]:
    steps = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Both ranks load the same steps, so both see the same number of them and stop together.
        while len(steps) < 10 or (len(set(steps)) < 3 and len(steps) < 500):
            model = _model(0)
            steps.append(fs.load_checkpoint(root, model=model).step)
            assert _value(model) == steps[-1]
    return steps


def test_two_ranks_read_while_another_job_saves_and_prunes(tmp_path: Path) -> None:
    fs.save_checkpoint(tmp_path, 0, model=_model(0))
    ended = threading.Event()

    def save() -> None:
        steps = itertools.count(1)
        while not ended.wait(0.01):
            _prune_aside(tmp_path, next(steps))

    writer = threading.Thread(target=save)
    writer.start()
    try:
        first, second = run_distributed(_read_often, 2, str(tmp_path))
    finally:
        ended.set()
        writer.join()
    assert first == second == sorted(first)
    assert len(set(first)) > 1
