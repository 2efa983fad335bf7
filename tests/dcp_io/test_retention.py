"""Which steps stay: all of them, unless the caller says otherwise, and then what goes is named."""

import logging
from pathlib import Path

import pytest
import torch

import fsdp_sft as fs


def _steps(root: Path) -> list[int]:
    return [info.step for info in fs.find_checkpoints(root)]


@pytest.mark.parametrize("async_", [False, True])
def test_nothing_is_deleted_unless_asked_for(async_: bool, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    for step in range(5):
        fs.save_checkpoint(tmp_path, step, model=model, metric=float(step), keep_best=1, async_=async_).wait()
    assert _steps(tmp_path) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("async_", [False, True])
def test_what_is_deleted_is_said(async_: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(3, 2)
    for step in (1, 2, 10):
        fs.save_checkpoint(tmp_path, step, model=model)
    with caplog.at_level(logging.WARNING, "fsdp_sft"):
        fs.save_checkpoint(tmp_path, 11, model=model, keep_last=4, async_=async_).wait()
        assert caplog.text == ""
        fs.save_checkpoint(tmp_path, 12, model=model, keep_last=2, async_=async_).wait()
    assert _steps(tmp_path) == [11, 12]
    (record,) = caplog.records
    assert f"deleted step-1, step-2, step-10 from {tmp_path}" in record.getMessage()
    assert record.levelno == logging.WARNING  # Python prints it unless told otherwise
