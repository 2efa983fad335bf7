"""Mounts of object stores: folders that cannot be fsynced, renames that copy."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_sft as fs


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
