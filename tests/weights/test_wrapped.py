"""A module around a transformers model is told what to pass."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.hf_folders import difference, plain, save_tiny
from tests.harness.ranks import run_distributed


class Actor(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


def _wrapped(folder: Path) -> None:
    model: Any = Actor(fs.build_meta_model(folder / "base"))
    fs.shard_model(model, mesh=mesh_here())
    for call in (
        lambda: fs.load_weights(model, folder / "base"),
        lambda: fs.export_hf(model, folder / "out"),
        lambda: fs.check_export(folder / "out", model=model),
        lambda: fs.iter_hf_tensors(model),
    ):
        with pytest.raises(TypeError, match=r"pass the one inside, model\.model, which"):
            call()
    fs.load_weights(model.model, folder / "base")
    assert difference(model.model, plain(folder / "base")) == []
    fs.export_hf(model.model, folder / "out")
    with pytest.raises(TypeError, match="load_full_state_dict reads a module of one's own"):
        fs.load_weights(nn.Linear(2, 2), folder / "base")


def test_wrappers_are_told_what_to_pass(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", "mixtral")
    run_distributed(_wrapped, 2, tmp_path)
