"""Towers of vision-language models: found, frozen in 16 bits, and left out of what is counted and adapted."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from fsdp_sft._model.blocks import towers_of
from fsdp_sft.shard.packing import choose_packed
from tests.harness.device import mesh_here
from tests.harness.models import full, oracle_loss, ragged_batches, tiny_model
from tests.harness.multimodal import CONFIGS, tiny
from tests.harness.ranks import run_distributed

BATCHES = ragged_batches(4)


@pytest.mark.parametrize("family", CONFIGS)
def test_they_are_what_text_gives_no_gradient(family: str) -> None:
    model = tiny(family)
    oracle_loss(model, BATCHES).backward()
    towers = {p for name in towers_of(model) for p in model.get_submodule(name).parameters()}
    assert towers
    for name, parameter in model.named_parameters():
        is_used = parameter.grad is not None and bool(parameter.grad.any())
        if name.endswith("e_score_correction_bias") or ".vision_moe." in name:
            continue  # no gradient moves the one; ERNIE's experts of images lie within the blocks
        assert is_used != (parameter in towers), name


def test_models_of_text_have_none() -> None:
    for family in ("llama", "gpt2", "t5", "bert", "mixtral"):
        assert fs.freeze_towers(tiny_model(family)) == []


def _by_default(folder: Path) -> None:
    model: Any = fs.load_pretrained(folder, mesh=mesh_here(), sac_ratio="1/2")
    first = next(model.model.language_model.parameters())
    assert (model.model.vision_tower.dtype, first.dtype) == (torch.bfloat16, torch.float32)
    trained: Any = fs.load_pretrained(folder, mesh=mesh_here(), freeze_towers=False)
    assert {(p.dtype, p.requires_grad) for p in trained.parameters()} == {(torch.float32, True)}


def test_frozen_in_16_bits_unless_told(tmp_path: Path) -> None:
    tiny("llava").save_pretrained(tmp_path)
    run_distributed(_by_default, 2, tmp_path)


def test_fractions_and_packing_leave_them_out() -> None:
    model = tiny("llava")
    assert len(fs.find_blocks(model)) == 4
    fs.freeze_towers(model)
    assert fs.apply_sac(model, 1) == [f"model.language_model.layers.{i}" for i in range(2)]
    assert fs.apply_sac(model, "1/2") == ["model.language_model.layers.0"]
    packed = choose_packed(model.requires_grad_(False), {"model": model.model}, "nf4", (), reshard=True)
    assert set() < packed < {id(parameter) for parameter in model.model.language_model.parameters()}


@pytest.mark.parametrize("given", [None, ["o_proj"], ".*layers.1.*"])
def test_adapters_are_not_put_into_them_or_frozen_with_them(given: Any) -> None:
    peft = pytest.importorskip("peft", reason="adapters need the 'peft' extra")
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"], r=2, exclude_modules=given)
    everywhere = fs.add_adapters(tiny("mistral3"), config)
    assert any("vision_tower" in name and "lora_" in name for name, _ in everywhere.named_parameters())
    fs.freeze_towers(everywhere)
    trained = [name for name, p in everywhere.named_parameters() if p.requires_grad]
    assert trained
    assert not [name for name in trained if "vision_tower" in name]
    model = tiny("mistral3")
    fs.freeze_towers(model)
    adapted = {name for name, _ in fs.add_adapters(model, config).named_parameters() if "lora_" in name}
    assert adapted
    assert not [name for name in adapted if "vision_tower" in name]
    assert any("o_proj" in name for name in adapted) == (given != ["o_proj"])
    assert any("layers.1" in name for name in adapted) == (given != ".*layers.1.*")
    assert config.exclude_modules == (set(given) if isinstance(given, list) else given), "as it was"


def _with_pixels(batch: dict[str, Any]) -> dict[str, Any]:
    """An image, of four tokens, at the beginning of each row."""
    rows = len(batch["input_ids"])
    return {
        "input_ids": torch.cat([torch.full((rows, 4), 2), batch["input_ids"]], 1),
        "labels": torch.cat([torch.full((rows, 4), -100), batch["labels"]], 1),
        "attention_mask": torch.cat([torch.ones(rows, 4, dtype=torch.long), batch["attention_mask"]], 1),
        "pixel_values": torch.randn(rows, 3, 28, 28, generator=torch.Generator().manual_seed(0)),
    }


def _accumulate(folder: Path, freeze_towers: bool, pixels_in: int | None) -> None:
    rank = dist.get_rank()
    window = [ragged_batches(6)[2 * i + rank] for i in range(3)]
    if pixels_in is not None:
        window[pixels_in] = _with_pixels(window[pixels_in])
    found = []
    for grad_sync in ("each", "last"):
        model: Any = fs.load_pretrained(folder, mesh=mesh_here(), freeze_towers=freeze_towers)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        losses = [
            fs.train_step(model, window, optimizer, grad_sync=grad_sync, max_grad_norm=None).loss
            for _ in range(2)
        ]
        found.append((losses, {name: full(p).detach() for name, p in model.named_parameters()}))
    (each, expected), (last, trained) = found
    assert last == pytest.approx(each, rel=1e-2)
    assert each[1] < each[0]
    torch.testing.assert_close(trained, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("freeze_towers", "pixels_in"), [(True, None), (True, 1), (False, None), (False, 0), (False, 1)]
)
def test_towers_that_no_forward_has_gathered(
    freeze_towers: bool, pixels_in: int | None, tmp_path: Path
) -> None:
    tiny("llava").save_pretrained(tmp_path)
    run_distributed(_accumulate, 2, tmp_path, freeze_towers, pixels_in)
