"""torch's own distributed checkpoint reads a step of ours, from its folder of shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.models import full, tiny_model
from tests.harness.ranks import run_distributed
from tests.harness.trained import assert_same, everything, make_adamw, train


def _job(seed: int, mesh: dict[str, int]) -> tuple[Any, torch.optim.Optimizer]:
    model = tiny_model("mixtral", num_local_experts=3, seed=seed)  # uneven experts: other dimensions
    fs.shard_model(model, mesh=mesh_here(**mesh))
    return model, make_adamw(model)


def _save(root: str, mesh: dict[str, int]) -> dict[str, torch.Tensor]:
    fs.init_distributed()
    model, optimizer = _job(0, mesh)
    train(model, optimizer, 0, 2)
    fs.save_checkpoint(root, 2, model=model, optimizer=optimizer, rank_state={"rows": torch.arange(3)})
    state = everything(model, optimizer)
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _load(root: str, mesh: dict[str, int], expected: dict[str, Any]) -> None:
    fs.init_distributed()
    model, optimizer = _job(7, mesh)
    train(model, optimizer, 0, 1)  # so that there is state of other values
    state: dict[str, Any] = {
        "model": {name: p.detach() for name, p in model.named_parameters()},
        "optimizer": {
            f"{name}.{key}": value
            for name, p in model.named_parameters()
            for key, value in optimizer.state[p].items()
        },
    }
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(Path(root, "step-2", "shards"))))
    found = {f"model/{name}": full(p.detach()) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        found |= {f"{name}/{key}": full(value) for key, value in optimizer.state[p].items()}
    assert_same(found, {name: expected[name] for name in found})


@pytest.mark.parametrize(
    ("save_ranks", "save_mesh", "load_ranks"),
    [(2, {}, 2), (4, {"dp_replicate": 2}, 2), (3, {}, 1), (1, {}, 2)],
)
def test_torchs_reader_loads_a_step(
    save_ranks: int, save_mesh: dict[str, int], load_ranks: int, tmp_path: Path
) -> None:
    expected = run_distributed(_save, save_ranks, str(tmp_path), save_mesh)[0]
    assert len(expected) > 60
    run_distributed(_load, load_ranks, str(tmp_path), {}, expected)
