"""``part="text"``: a multimodal model without its towers, whose bytes come back in an export."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForImageTextToText

import fsdp_sft as fs
from fsdp_sft._model.towers import towers_of
from tests.harness.device import mesh_here
from tests.harness.hf_folders import plain, save_tiny
from tests.harness.hub_server import serve, use_hub
from tests.harness.models import full, oracle_loss, ragged_batches
from tests.harness.multimodal import CONFIGS, tiny
from tests.harness.ranks import run_distributed

BATCHES = ragged_batches(4)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _train(folder: Path) -> tuple[float, dict[str, torch.Tensor], int]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    policy = MixedPrecisionPolicy()
    model: Any = fs.load_pretrained(folder / "base", mesh=mesh_here(), part="text", mp_policy=policy)
    assert model.load_report.missing == model.load_report.unexpected == []
    fs.check_export(folder / "out", model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = fs.train_step(model, BATCHES[rank::ranks], optimizer, max_grad_norm=None, router_loss="off")
    fs.save_checkpoint(folder / "steps", 1, model=model, optimizer=optimizer)
    fs.load_checkpoint(folder / "steps", model=model, optimizer=optimizer)
    fs.export_hf(model, folder / "out", dtype=torch.float32)
    held = sum(p.numel() for p in model.parameters())
    return result.loss, {name: full(p).detach() for name, p in model.named_parameters()}, held


@pytest.mark.parametrize("family", CONFIGS)
def test_text_trains_and_the_tower_comes_back(family: str, tmp_path: Path) -> None:
    model = tiny(family).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base", max_shard_size="40KB")
    oracle = plain(tmp_path / "base").float()
    towers = tuple(f"{name}." for name in towers_of(oracle))
    loss = oracle_loss(oracle, BATCHES)
    loss.backward()
    torch.optim.SGD(oracle.parameters(), lr=0.1).step()
    got, trained, held = run_distributed(_train, 2, tmp_path)[0]
    assert got == pytest.approx(loss.item(), rel=1e-5)
    parameters = dict(oracle.named_parameters())
    assert trained.keys() == {name for name in parameters if not name.startswith(towers)}
    assert held < sum(p.numel() for p in parameters.values())
    for name, values in trained.items():
        assert torch.allclose(values, parameters[name], rtol=1e-4, atol=1e-6), name

    before, after = _tensors(tmp_path / "base"), _tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    untouched = [name for name in before if after[name].dtype == torch.bfloat16]
    assert sum(before[name].numel() for name in untouched) == sum(
        p.numel() for name, p in parameters.items() if name.startswith(towers)
    )
    assert all(torch.equal(before[name], after[name]) for name in untouched)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(again) is type(oracle)
    for name, parameter in again.named_parameters():
        expected = trained.get(name, parameters[name])
        assert torch.equal(parameter, expected), name


def _from_another_folder(folder: Path) -> None:
    model = fs.shard_model(fs.build_meta_model(folder / "base", part="text"), mesh=mesh_here())
    fs.load_weights(model, folder / "other")
    fs.export_hf(model, folder / "out", dtype=None)


def test_towers_come_with_the_weights(tmp_path: Path) -> None:
    for name in ("base", "other"):
        model = tiny("llava")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 if name == "other" else 0.0)
        model.save_pretrained(tmp_path / name)
    run_distributed(_from_another_folder, 1, tmp_path)
    for name, tensor in _tensors(tmp_path / "out").items():
        assert torch.equal(tensor, _tensors(tmp_path / "other")[name]), name


def _from_the_hub(address: str, cache: Path) -> None:
    use_hub(address, cache)
    with pytest.raises(ValueError, match="or use load_pretrained"):
        fs.build_meta_model("someone/model", part="text")
    model: Any = fs.load_pretrained("someone/model", mesh=mesh_here(), part="text")
    fs.export_hf(model, cache / "out", dtype=None)


def test_the_hubs_cache_is_a_folder(tmp_path: Path) -> None:
    tiny("llava").save_pretrained(tmp_path / "model")
    with serve(tmp_path / "model", drops=0) as (address, _):
        run_distributed(_from_the_hub, 1, address, tmp_path / "cache")
    assert _tensors(tmp_path / "cache" / "out").keys() == _tensors(tmp_path / "model").keys()


def _refused_pixels(family: str, folder: Path) -> str:
    model: Any = fs.load_pretrained(folder, mesh=mesh_here(), part="text")
    pixels = {"pixel_values": torch.zeros(4, 1176), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    with pytest.raises(fs.UnsupportedModelError) as found:
        model(input_ids=torch.arange(3, 11)[None], **pixels)
    return str(found.value)


@pytest.mark.parametrize("family", ["qwen2.5-vl", "glm4v"])
def test_pixels_are_refused_before_they_are_cast(family: str, tmp_path: Path) -> None:
    tiny(family).save_pretrained(tmp_path)
    assert "leave part='text' out" in run_distributed(_refused_pixels, 1, family, tmp_path)[0]


def test_adapters_train_no_copy_of_what_was_left_out(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    tiny("llava").save_pretrained(tmp_path)
    model = fs.build_meta_model(tmp_path, part="text")
    for name in ("multi_modal_projector", "vision_tower"):
        lora = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[name])
        with pytest.raises(fs.UnsupportedModelError, match="which part='text' has left out"):
            fs.add_adapters(fs.build_meta_model(tmp_path, part="text"), lora)
    assert fs.freeze_towers(model) == []


def test_pixels_and_what_is_no_folder_are_refused(tmp_path: Path) -> None:
    tiny("llava").save_pretrained(tmp_path / "base")
    model: Any = fs.build_meta_model(tmp_path / "base", part="text")
    with pytest.raises(fs.UnsupportedModelError, match="leave part='text' out, or the pixels"):
        model.model.vision_tower(torch.zeros(1, 3, 28, 28))
    assert fs.freeze_towers(model) == []
    with pytest.raises(ValueError, match="part must be 'all' or 'text'"):
        fs.build_meta_model(tmp_path / "base", part="vision")  # type: ignore[arg-type]
    text = fs.build_meta_model(save_tiny(tmp_path / "text"), part="text")
    assert not any(p.numel() == 0 for p in text.parameters()), "a model of text has nothing to leave out"
    model.to_empty(device="cpu")
    for file in (tmp_path / "base").iterdir():
        file.unlink()
    (tmp_path / "base").rmdir()
    with pytest.raises(fs.CheckpointNotFoundError, match="put the base there again"):
        fs.check_export(tmp_path / "out", model=model)
