"""Ranks that bring other tensors to a save than rank 0: refused before anything is written."""

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
