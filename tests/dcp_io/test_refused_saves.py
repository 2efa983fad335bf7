"""Saves that are refused before anything is written: ranks with other tensors, state that no file holds."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fsdp_sft as fs
from tests.harness.ranks import run_distributed


def _save(root: str, difference: str) -> None:
    fs.init_distributed()
    last = torch.distributed.get_rank() == 1
    model = nn.ModuleDict({"a": nn.Linear(4, 5 if last and difference == "shape" else 3)})
    if last and difference == "name":
        model["b"] = nn.Linear(2, 2)
    if last and difference == "dtype":
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    if not (last and difference == "state"):
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
    with pytest.raises(fs.CheckpointError, match=r"1 ranks \(1\) have tensors of other names, shapes"):
        fs.save_checkpoint(root, 1, model=model, optimizer=optimizer)


@pytest.mark.parametrize("difference", ["shape", "name", "dtype", "state"])
def test_they_are_named_and_nothing_is_left(difference: str, tmp_path: Path) -> None:
    run_distributed(_save, 3, str(tmp_path), difference)
    assert not list(tmp_path.glob("*step*"))
    assert not list(tmp_path.glob(".*step*"))


def _unstorable(root: str) -> None:
    fs.init_distributed()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"x/y": torch.zeros(2, 2)}
    with pytest.raises(fs.UnstorableStateError, match="without a slash"):
        fs.save_checkpoint(root, 1, model=model, optimizer=optimizer)
    state = {f"a tensor of its own {number}": torch.zeros(1) for number in range(3)}
    fs.save_checkpoint(root, 1, model=model, rank_state=state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp_sft._tensors.safetensors.MAX_HEADER_BYTES", 900)
        with pytest.raises(fs.CheckpointError, match=r"rank 0 has \d+ tensors, whose names"):
            fs.save_checkpoint(root, 2, model=model, rank_state=state)


def test_what_could_not_be_loaded_is_not_written(tmp_path: Path) -> None:
    run_distributed(_unstorable, 1, str(tmp_path))
    assert [info.step for info in fs.find_checkpoints(tmp_path)] == [1]
    assert not list(tmp_path.glob(".tmp*"))
