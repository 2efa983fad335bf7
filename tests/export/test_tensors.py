"""The tensors that are handed over, beside the files of an export."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.composed import composed
from tests.harness.device import mesh_here
from tests.harness.hf_folders import save_tiny, tensors_of
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.quantised_folders import mxfp4_folder
from tests.harness.ranks import run_distributed

FAMILIES = ("llama", "qwen2-tied", "mixtral", "gpt2")
SHARED: dict[str, dict[str, Any]] = {
    "hsdp": {"mesh": {"dp_replicate": 2}},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "shared experts": {"ep_size": 2},
}


def _same(model: Any, folder: Path, dtype: torch.dtype | None = torch.bfloat16) -> None:
    fs.export_hf(model, folder, dtype=dtype)
    expected = tensors_of(folder)
    found = dict(fs.iter_hf_tensors(model, dtype=dtype))
    assert sorted(found) == sorted(expected)
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor.cpu(), expected[name]), name


def _check(folder: Path) -> None:
    for family in FAMILIES:
        model = tiny_model(family)
        _same(model, folder / f"{family}-plain", None)
        fs.shard_model(model, mesh=mesh_here())
        _same(model, folder / family)
        fs.evaluate(model, ragged_batches(1))
        _same(model, folder / f"{family}-float32", torch.float32)


@pytest.mark.parametrize("ranks", [1, 3])
def test_they_are_those_of_an_export(ranks: int, tmp_path: Path) -> None:
    run_distributed(_check, ranks, tmp_path)


def _check_shared(folder: Path, options: dict[str, Any]) -> None:
    options = dict(options)
    mesh = mesh_here(**options.pop("mesh", {}))
    model: Any = composed(folder / "base", mesh=mesh, mp_policy=MixedPrecisionPolicy(), **options)
    _same(model, folder / "out")


@pytest.mark.parametrize("how", SHARED)
def test_on_other_meshes(how: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", "mixtral")
    run_distributed(_check_shared, 4 if how == "hsdp" else 2, tmp_path, SHARED[how])


def _check_adapters(folder: Path) -> None:
    from peft import LoraConfig

    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=2, target_modules=["o_proj"], target_parameters=experts, task_type="CAUSAL_LM")
    model: Any = fs.load_pretrained(
        folder / "base", mesh=mesh_here(), peft_config=lora, frozen_dtype="stored"
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    fs.train_step(model, ragged_batches(1), optimizer)
    _same(model, folder / "out")
    fs.train_step(model, ragged_batches(1), optimizer)


def test_adapters_on_a_packed_base(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="adapters need the 'peft' extra")
    mxfp4_folder(tmp_path / "base")
    run_distributed(_check_adapters, 2, tmp_path)
