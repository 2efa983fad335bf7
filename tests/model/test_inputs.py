"""Packs of vision-language models: caches that a forward does not name, and positions of several axes."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from fsdp_sft._model.forward import no_cache
from tests.harness.device import device_here, mesh_here
from tests.harness.long_rows import PACKED, batch_of, plain_gradients, rows_of
from tests.harness.models import full, largest_error, tiny_model
from tests.harness.multimodal import CONFIGS, tiny
from tests.harness.ranks import run_distributed

LENGTHS = [6, 15, 1, 9]


def _spread_out(family: str) -> Any:
    """A model whose weights are so large that rows which see each other show."""
    model = tiny(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_rows_are_kept_apart(family: str) -> None:
    model = _spread_out(family)
    assert no_cache(model) == {"use_cache": False}
    report = fs.verify_packing(model, max_length=64)
    assert report.error < report.tolerance < report.unpacked
    pack = batch_of(rows_of(LENGTHS), PACKED)
    ids, positions = pack["input_ids"], pack["position_ids"]
    together = model.eval()(input_ids=ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(input_ids=row, use_cache=False).logits for row in ids.split(LENGTHS, 1)], 1)
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-4), "in a loop of one's own too"


def test_models_of_text_are_left_alone() -> None:
    model = tiny_model("llama")
    fs.verify_packing(_spread_out("qwen3-vl"), max_length=64)
    fs.verify_packing(model, max_length=64)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert no_cache(tiny_model("gpt2")) == {"use_cache": False}
    assert no_cache(torch.nn.Linear(2, 2)) == {}


def _check_step(family: str, cp: int) -> None:
    model = _spread_out(family)
    oracle = copy.deepcopy(model)
    fs.freeze_towers(model)
    mesh = mesh_here(cp=cp)
    model = fs.shard_model(model.to(device_here()), mesh=mesh, mp_policy=MixedPrecisionPolicy())
    if cp > 1:
        fs.use_context_parallel(model, mesh=mesh)
    rows = [rows_of(LENGTHS, seed=seed) for seed in range(dist.get_world_size() // cp)]
    window = [batch_of(rows[dist.get_rank() // cp], PACKED)]
    before = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    result = fs.train_step(model, window, optimizer, max_grad_norm=None)
    loss, gradients = plain_gradients(oracle, [row for own in rows for row in own])
    assert result.loss == pytest.approx(loss, rel=1e-5)
    moved = {name: before[name] - full(p.detach()) for name, p in model.named_parameters()}
    assert not any(moved.pop(name).any() for name in moved.keys() - gradients.keys())
    assert largest_error(moved, gradients) <= 2e-4


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("family", CONFIGS)
def test_packs_train_as_rows_alone(family: str, cp: int) -> None:
    run_distributed(_check_step, 2, family, cp)
