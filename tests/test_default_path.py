"""The default path: bfloat16, sac 1/3, compiled blocks, ragged batches, and all that one does with it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from fsdp_sft._tensors.boxes import memory_of
from tests.harness.models import full, ragged_batches, tiny_model
from tests.harness.ranks import mesh_here, run_distributed

STEPS = 6


def _prepare(seed: int, packed: str | None) -> tuple[Any, Any, Any]:
    model: Any = tiny_model("qwen2-tied", seed=seed, dtype=torch.bfloat16, attention_dropout=0.1)
    if packed is not None:
        from peft import LoraConfig

        lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
        model = fs.add_adapters(model, lora).train()
    checkpointed = fs.apply_sac(model, "1/3", offload=packed is not None)
    assert [name.removeprefix("base_model.model.") for name in checkpointed] == ["model.layers.1"]
    if packed is None:  # compiled blocks keep their inputs on the device
        assert len(fs.compile_blocks(model, backend="aot_eager")) == 3
    fs.shard_model(model, mesh=mesh_here(), frozen_dtype=packed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _steps(model: Any, optimizer: Any, scheduler: Any, windows: list[Any]) -> list[tuple[float, float]]:
    results = [fs.train_step(model, window, optimizer, scheduler=scheduler) for window in windows]
    assert all(result.skipped is False for result in results)
    return [(result.loss, result.grad_norm) for result in results]


def _check(root: Path, packed: str | None = None) -> list[tuple[float, float]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    windows = [ragged_batches(2 * ranks, seed=step)[rank::ranks] for step in range(STEPS)]
    held_out = ragged_batches(5, seed=99)[rank::ranks]

    model, optimizer, scheduler = _prepare(0, packed)
    first = _steps(model, optimizer, scheduler, windows[:3])
    evaluated = fs.evaluate(model, held_out)
    assert evaluated.perplexity == pytest.approx(math.exp(evaluated.loss))
    # The evaluation forward leaves the root gathered unless someone reshards it: saving comes right after.
    with torch.no_grad():
        model(input_ids=torch.tensor([[3, 4]]))
    fs.save_checkpoint(
        root,
        3,
        model=model,
        optimizer=optimizer,
        train_state={"scheduler": scheduler.state_dict()},
        include_base=packed is not None,
    )
    rest = _steps(model, optimizer, scheduler, windows[3:])
    assert all(math.isfinite(loss) and norm > 0 for loss, norm in first + rest)

    again, optimizer, scheduler = _prepare(1, packed)
    loaded = fs.load_checkpoint(root, model=again, optimizer=optimizer)
    scheduler.load_state_dict(loaded.train_state["scheduler"])
    assert (loaded.step, fs.evaluate(again, held_out)) == (3, evaluated)
    # Loading once more after an evaluation, and after a step, brings the same state back.
    fs.load_checkpoint(root, model=again, optimizer=optimizer)
    assert _steps(again, optimizer, scheduler, windows[3:]) == rest, "losses and norms, bit for bit"
    for (name, p), q in zip(again.named_parameters(), model.parameters(), strict=True):
        assert p.dtype == torch.float32 or not p.requires_grad
        assert torch.equal(memory_of(p), memory_of(q)), name
    fs.load_checkpoint(root, model=again, optimizer=optimizer)
    assert fs.evaluate(again, held_out) == evaluated

    exported = fs.export_hf(model, root.parent / "export")
    trained = {} if packed is not None else {name: full(p) for name, p in model.named_parameters()}
    if rank == 0:
        from transformers import AutoModelForCausalLM

        plain = AutoModelForCausalLM.from_pretrained(exported)
        assert plain.dtype == torch.bfloat16
        for name, value in trained.items():
            assert torch.equal(plain.state_dict()[name], value.bfloat16()), name
    return rest


@pytest.mark.accelerator
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("packed", [None, "nf4"])
def test_evaluate_save_load_continue_export(ranks: int, packed: str | None, tmp_path: Path) -> None:
    if packed is not None:
        pytest.importorskip("peft", reason="adapters need the 'peft' extra")
    results = run_distributed(_check, ranks, tmp_path / "checkpoints", packed, timeout=240)
    assert all(result == results[0] for result in results), "every rank reports the same"
