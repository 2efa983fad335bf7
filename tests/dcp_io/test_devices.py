"""Saving from devices that are not the first, while copies are slow and training goes on."""

from pathlib import Path
from typing import Any

import torch

import fsdp_sft as fs
from tests.harness.models import full, tiny_model
from tests.simulated.ranks import run_simulated

SLOW = 0.005  # seconds that a copy to or from the device takes


def _values(model: Any) -> dict[str, torch.Tensor]:
    return {name: full(p).detach().cpu().clone() for name, p in model.named_parameters()}


def _train_on_while_saving(root: Path, async_: bool) -> dict[str, Any]:
    context = fs.init_distributed()
    torch.manual_seed(0)
    mesh = fs.build_mesh()
    model = fs.shard_model(tiny_model("llama").to(context.device), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.arange(24, device=context.device).view(2, 12)
    batch = {"input_ids": ids, "labels": ids}
    fs.train_step(model, [batch], optimizer)
    torch.rand(3, device=context.device)
    wrong: list[str] = []
    for step in (1, 2):  # the second in memory that the first has used
        expected, drawn = _values(model), torch.sim.get_rng_state(context.device.index)
        allocated = torch.sim.memory_allocated()
        torch.sim.reset_peak_memory_stats()
        saved = fs.save_checkpoint(root, step, model=model, optimizer=optimizer, async_=async_)
        on_device = torch.sim.max_memory_allocated() - allocated
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)  # what the next step would do
        torch.rand(3, device=context.device)
        saved.wait()
        fs.load_checkpoint(saved.path, model=model, optimizer=optimizer)
        after = _values(model)
        wrong += [name for name in expected if not torch.equal(expected[name], after[name])]
        if not torch.equal(torch.sim.get_rng_state(context.device.index), drawn):
            wrong.append("generator")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
    return {"wrong": wrong, "on the device": on_device, "touched": torch.sim.touched()}


def test_a_save_beside_training_takes_nothing_of_the_device(tmp_path: Path) -> None:
    for async_ in (False, True):
        found = run_simulated(_train_on_while_saving, 2, tmp_path / str(async_), async_, copy_delay=SLOW)
        assert found == [{"wrong": [], "on the device": 0, "touched": [rank]} for rank in range(2)]
