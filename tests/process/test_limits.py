"""Descriptors: asked for in time, few enough, and never taken for a damaged file or a lost rank."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft._process import limits
from fsdp_sft._ranks import agree
from fsdp_sft._tensors import disk, reader, stored
from fsdp_sft.collate import collator, encoded
from fsdp_sft.dcp_io import folder
from fsdp_sft.jobs.watchdog import process_state, this_process
from tests.harness.models import tiny_model
from tests.harness.ranks import on_ranks, run_distributed
from tests.harness.trained import make_model


@contextmanager
def _limit(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def _no_descriptor_left() -> Iterator[None]:
    taken: list[int] = []
    with _limit(max(int(name) for name in os.listdir("/proc/self/fd")) + 1):
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            yield
        finally:
            for fd in taken:
                os.close(fd)


def _soft() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_soft_limit_is_raised() -> None:
    before = _soft()
    with _limit(64):
        limits.raise_limit()
        assert _soft() == min(1 << 16, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        limits.raise_limit()
    assert _soft() == before


def _save_one(root: Path) -> None:
    fs.save_checkpoint(root, 3, model=make_model(0, {}, wrap=False))


@on_ranks(2)
def test_a_checkpoint_is_not_damaged_because_no_file_can_be_opened(tmp_path: Path) -> None:
    _save_one(tmp_path)
    model = make_model(1, {}, wrap=False)
    saved = fs.load_checkpoint(tmp_path, model=model).step
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    for place in (tmp_path, tmp_path / "step-3"):
        with (
            _no_descriptor_left(),
            pytest.raises(OSError, match=r"(?i)too many open files") as no,
        ):
            fs.load_checkpoint(place, model=model)
        assert no.value.errno == errno.EMFILE
        assert not isinstance(no.value, fs.CheckpointCorruptError)
    assert all(torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters())
    assert fs.load_checkpoint(tmp_path, model=model).step == saved == 3


def _refusing(path: Any, *_: Any, **__: Any) -> Any:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def test_no_loader_calls_a_file_damaged_that_it_must_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    safe = tmp_path / "model.safetensors"
    fs.save_full_state_dict(model, safe)
    fs.save_checkpoint(tmp_path / "steps", 1, model=model)
    for module, name, load in (
        (stored, "open_file", lambda: fs.load_weights(model, tmp_path / "hf")),
        (reader, "open_file", lambda: fs.load_weights(model, tmp_path / "hf")),
        (disk, "open_file", lambda: fs.load_weights(model, tmp_path / "hf")),
        (disk, "open_file", lambda: fs.load_checkpoint(tmp_path / "steps", model=model)),
        (stored, "open_file", lambda: fs.load_full_state_dict(model, safe)),
        (encoded, "safe_open", lambda: encoded._read_shard(safe, collator.FilterCounts())),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, _refusing)
            with pytest.raises(PermissionError, match="Permission denied"):
                load()


def test_a_save_stands_where_older_steps_must_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 2)
    for step in (1, 2):
        fs.save_checkpoint(tmp_path, step, model=model)
    with monkeypatch.context() as patch:
        patch.setattr(folder, "read_manifest", _refusing)
        with pytest.warns(UserWarning, match="none was deleted: .*Permission denied"):
            fs.save_checkpoint(tmp_path, 3, model=model, keep_last=1)
    assert [info.step for info in fs.find_checkpoints(tmp_path) if info.sound] == [1, 2, 3]


def test_few_files_of_a_checkpoint_are_open_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_distributed(_save_one, 6, tmp_path)
    opened: list[int] = []
    descriptor = reader._Reader._descriptor

    def counted(self: Any, batch: Any) -> int:
        fd = descriptor(self, batch)
        opened.append(len(self.descriptors))
        return fd

    monkeypatch.setattr(reader, "_AHEAD", 1)
    monkeypatch.setattr(reader, "MAX_WORKERS", 1)
    monkeypatch.setattr(reader._Reader, "_descriptor", counted)
    model: Any = make_model(1, None, wrap=False)
    assert fs.load_checkpoint(tmp_path, model=model).step == 3
    assert len(opened) > 12
    assert max(opened) == 2


def test_gloo_without_descriptors_is_no_lost_rank() -> None:
    with (
        pytest.raises(OSError, match=r"connecting to another rank \(.*\): this process may have"),
        agree.answered(),
    ):
        raise RuntimeError("[pair.cc:1] socket: Too many open files")
    with pytest.raises(fs.LostRankError), agree.answered():
        raise RuntimeError("Connection closed by peer")


# --- processes are told apart by their machine's start, not by its name -------------------------------------


def test_processes_are_told_apart() -> None:
    pid, born, machine = this_process()
    assert process_state(pid, born, machine) == "running"
    assert process_state(pid, born + "1", machine) == "dead", "another one had this number"
    assert process_state(2**22 + 1, born, machine) == "dead"
    # Two hosts of one name whose process namespaces have one number, as nearly all hosts have.
    boot, _, namespace = machine.partition(" ")
    assert namespace.startswith("pid:")
    others = ((2**22 + 1, born, f"{boot[::-1]} {namespace}"), (pid, born, f"{boot} pid:[1]"), (pid, "", ""))
    assert [process_state(*other) for other in others] == ["", "", ""]


def test_the_end_of_a_process_shows() -> None:
    code = """if True:
        from fsdp_sft.jobs.watchdog import this_process
        print(*this_process(), sep=chr(31), flush=True)
        input()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    pid, born, machine = child.stdout.readline().rstrip("\n").split(chr(31))
    process = int(pid), born, machine
    assert process_state(*process) == "running"
    child.kill()
    while child.poll() is None:  # a corpse until somebody has asked
        assert process_state(*process) in ("running", "dead")
    assert process_state(*process) == "dead"
