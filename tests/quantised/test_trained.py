"""From a quantised folder by training, a save and other ranks to an export, beside one plain process."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.hf_folders import plain, rewrite, state_of
from tests.harness.models import oracle_loss, ragged_batches
from tests.harness.quantised_folders import configure, deepseek_folder, mxfp4_folder
from tests.harness.ranks import run_distributed

FLOAT32 = MixedPrecisionPolicy()
WINDOWS = [ragged_batches(6, seed=seed) for seed in range(4)]


def _trained(model: Any, windows: list[Any], optimizer: Any) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return [fs.train_step(model, window[rank::ranks], optimizer).loss for window in windows]


def _model(folder: Path) -> tuple[Any, Any]:
    model = fs.load_pretrained(folder, mesh=mesh_here(), mp_policy=FLOAT32, sac_ratio="1/2")
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _begin(folder: Path) -> list[float]:
    model, optimizer = _model(folder / "stored")
    assert len(model.load_report.formats) == 2
    losses = _trained(model, WINDOWS[:2], optimizer)
    fs.save_checkpoint(folder / "steps", 2, model=model, optimizer=optimizer)
    return losses


def _end(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer = _model(folder / "stored")
    fs.load_checkpoint(folder / "steps", model=model, optimizer=optimizer)
    losses = _trained(model, WINDOWS[2:], optimizer)
    fs.export_hf(model, folder / "export")
    return losses, state_of(model)


@pytest.mark.parametrize("write", [mxfp4_folder, deepseek_folder], ids=["gpt-oss", "deepseek-v3"])
def test_from_folder_to_export(write: Any, tmp_path: Path) -> None:
    values = write(tmp_path / "stored")
    shutil.copytree(tmp_path / "stored", tmp_path / "published")
    configure(tmp_path / "published", quantization_config=None)
    rewrite(tmp_path / "published", {name: value.float() for name, value in values.items()})
    oracle = plain(tmp_path / "published")
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for window in WINDOWS:
        loss = oracle_loss(oracle, window)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(oracle.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    losses = run_distributed(_begin, 2, tmp_path)[0]
    more, trained = run_distributed(_end, 3, tmp_path)[0]
    assert losses + more == pytest.approx(expected, rel=1e-5)
    for name, value in oracle.state_dict().items():
        assert torch.allclose(trained[name], value, rtol=1e-4, atol=1e-6), name

    exported = json.loads((tmp_path / "export" / "config.json").read_text())
    assert "quantization_config" not in exported
    cls = getattr(transformers, exported["architectures"][0])
    again = cls.from_pretrained(tmp_path / "export")
    assert again.dtype == torch.bfloat16
    assert not getattr(again, "is_quantized", False)
    for name, value in again.state_dict().items():
        assert torch.equal(value, trained[name].to(value.dtype)), name
    card = (tmp_path / "export" / "README.md").read_text()
    assert "quantised" in card
    assert "bfloat16" in card
