"""Twenty steps that move between meshes by their checkpoints, beside twenty of one plain process."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

import fsdp_sft as fs
from tests import plain
from tests.harness.device import device_here, mesh_here
from tests.harness.long_rows import plain_loss, rows_of
from tests.harness.models import full, tiny_model
from tests.harness.ranks import run_distributed

ROWS, EACH_STEP, STEPS = 80, 8, 20  # two epochs
# ranks, mesh, the step after the last
STAGES: list[tuple[int, dict[str, int], int]] = [
    (2, {"cp": 2}, 7),
    (4, {"cp": 4}, 11),
    (4, {"cp": 2, "dp_shard": 2}, 15),
    (1, {}, STEPS),
]


def _rows() -> list[dict[str, list[int]]]:
    rows = [rows_of([2, 3 + index % 9], seed=index)[1] for index in range(ROWS)]
    return [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in rows]


def _with_optimizer(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    # With Adam's own eps a gradient of rounding alone moves a parameter by as much as any other.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5, foreach=False)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)


def _losses_of_stage(folder: str, shape: dict[str, int], end: int) -> tuple[list[float], list[Any]]:
    """Its losses and its parameters at the end."""
    fs.init_distributed(device_type=device_here().type)
    mesh = mesh_here(**shape)
    model = tiny_model("qwen3", seed=1).to(device_here())
    fs.shard_model(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    fs.use_context_parallel(model, mesh=mesh)
    optimizer, scheduler = _with_optimizer(model)
    rows = _rows()
    sampler = fs.ResumableSampler(rows, seed=5, mesh=mesh)
    step = 0
    if Path(folder).exists():
        loaded = fs.load_checkpoint(folder, model=model, optimizer=optimizer)
        step = loaded.step
        sampler.load_state_dict(loaded.train_state["sampler"])
        scheduler.load_state_dict(loaded.train_state["scheduler"])
    micro_batch = EACH_STEP // 2 // shape.get("dp_shard", 1)
    loader: Any = DataLoader(rows, micro_batch, sampler=sampler, collate_fn=fs.PackedCollator(max_length=99))  # type: ignore[arg-type]
    losses: list[float] = []
    while step < end:
        for window in fs.windows(loader, 2, mesh=mesh):
            losses.append(fs.train_step(model, window, optimizer).loss)
            scheduler.step()
            step += 1
            if step == end:
                break
    state = {"sampler": sampler.state_dict(), "scheduler": scheduler.state_dict()}
    fs.save_checkpoint(folder, step, model=model, optimizer=optimizer, train_state=state)
    return losses, [full(parameter.detach()) for parameter in model.parameters()]


def _plain_losses() -> tuple[list[float], Any]:
    model = copy.deepcopy(tiny_model("qwen3", seed=1))
    optimizer, scheduler = _with_optimizer(model)
    rows = _rows()
    order = fs.ResumableSampler(rows, seed=5, num_replicas=1, rank=0)
    losses: list[float] = []
    for epoch in range(STEPS * EACH_STEP // ROWS):
        order.set_epoch(epoch)
        indices = list(order)
        for start in range(0, ROWS, EACH_STEP):
            chosen = [rows[index] for index in indices[start : start + EACH_STEP]]
            loss = plain_loss(
                model, [(torch.tensor(row["input_ids"]), torch.tensor(row["labels"])) for row in chosen]
            )
            losses.append(plain.step(model, [loss], [optimizer], max_norm=1.0)[0])
            scheduler.step()
    return losses, model


def test_twenty_steps_move_between_meshes(tmp_path: Path) -> None:
    """cp of 2, of 4, of 2 beside 2 shards, and a process without: float32, two epochs, a falling rate."""
    losses: list[float] = []
    for ranks, shape, end in STAGES:
        found, parameters = run_distributed(_losses_of_stage, ranks, str(tmp_path / "steps"), shape, end)[0]
        losses += found
        assert len(losses) == end
    expected, oracle = _plain_losses()
    apart = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    moved = max(
        float((a - b.detach()).abs().max() / b.detach().abs().max())
        for a, b in zip(parameters, oracle.parameters(), strict=True)
    )
    print(f"losses {losses[0]:.3f} to {losses[-1]:.3f}: apart by {apart:.1e}, parameters by {moved:.1e}")
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[-1] < losses[0] - 0.3
    assert moved < 5e-5
