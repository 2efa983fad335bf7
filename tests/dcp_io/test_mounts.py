"""Mounts of object stores: folders that cannot be fsynced, renames that copy."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_sft as fs
from fsdp_sft import dcp_io
from tests.harness.ranks import run_distributed


def _save(root: str) -> None:
    fs.init_distributed()
    model = nn.Linear(3, 2)
    fs.save_checkpoint(root, 1, model=model)
    other = nn.Linear(3, 2)
    fs.load_checkpoint(root, model=other)
    assert torch.equal(model.weight, other.weight)
    assert dcp_io.verify_checkpoint(Path(root, "step-1")) == []


def _no_fsync_of_folders(root: str, number: int) -> None:
    fsync = os.fsync

    def refused(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(number, os.strerror(number))
        fsync(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", refused)
        if number == 5:
            with pytest.raises(OSError, match="Input/output error"):
                _save(root)
        else:
            _save(root)


@pytest.mark.parametrize("number", [22, 95, 5])  # EINVAL, ENOTSUP; EIO is an error of the disk
def test_folders_that_cannot_be_put_on_the_disk(number: int, tmp_path: Path) -> None:
    run_distributed(_no_fsync_of_folders, 1, str(tmp_path), number)


def _copied_renames(root: str) -> None:
    rename = os.rename

    def copied(source: Any, target: Any) -> None:
        if os.path.isdir(source):
            shutil.copytree(source, target)
            shutil.rmtree(source)
        else:
            rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", copied)
        _save(root)
        fs.save_checkpoint(root, 2, model=nn.Linear(3, 2), keep_last=1)
    assert [info.step for info in fs.find_checkpoints(root)] == [2]
    assert not list(Path(root).glob(".tmp*"))


def test_renames_that_copy(tmp_path: Path) -> None:
    run_distributed(_copied_renames, 1, str(tmp_path))
