"""Checkpoints of earlier format versions, written by the releases that had them, load bit by bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fsdp_sft as fs
from fsdp_sft import dcp_io
from tests.faults.hostile import sign
from tests.harness.device import mesh_here
from tests.harness.models import full, tiny_model
from tests.harness.ranks import run_distributed
from tests.harness.trained import assert_same

DATA = Path(__file__).parent / "data"
VERSIONS = ("version-1", "version-2")  # of one optimizer, and of two


def _job(version: str) -> tuple[Any, list[torch.optim.Optimizer]]:
    fs.init_distributed()
    model = tiny_model(
        "llama",
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
        head_dim=8,
        seed=9,
    )
    fs.shard_model(model, mesh=mesh_here())
    own = list(model.parameters())
    if version == "version-1":
        return model, [torch.optim.AdamW(own)]
    return model, [torch.optim.AdamW(own[:4]), torch.optim.SGD(own[4:], lr=1.0, momentum=0.1)]


def _state(model: Any, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    state = {f"model/{name}": full(p).detach() for name, p in model.state_dict().items()}
    for optimizer in optimizers:
        for name, parameter in model.named_parameters():
            state |= {
                f"{name}/{key}": full(value) for key, value in optimizer.state.get(parameter, {}).items()
            }
    return state


def _load(root: str, version: str) -> None:
    model, optimizers = _job(version)
    loaded = fs.load_checkpoint(Path(root, version), model=model, optimizer=optimizers)
    assert loaded.train_state == {"epoch": 1, "seen": (1, 2)}
    if torch.distributed.get_world_size() == 2:
        assert loaded.rank_state["rank"] == torch.distributed.get_rank()
        assert torch.equal(loaded.rank_state["order"], torch.arange(3))
    else:
        assert loaded.rank_state is None
    assert_same(_state(model, optimizers), load_file(Path(root, f"{version}-expected.safetensors")))
    # Saved again, it is of this release's format.
    fs.save_checkpoint(f"{root}/again", 3, model=model, optimizer=optimizers)
    assert json.loads(Path(root, "again/step-3/MANIFEST.json").read_text())["version"] == 3
    other, others = _job(version)
    fs.load_checkpoint(f"{root}/again", model=other, optimizer=others)
    assert_same(_state(other, others), _state(model, optimizers))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("version", VERSIONS)
def test_they_load_at_any_number_of_ranks(version: str, ranks: int, tmp_path: Path) -> None:
    shutil.copytree(DATA, tmp_path / "data")
    assert dcp_io.verify_checkpoint(tmp_path / "data" / version / "step-3") == []
    assert [info.sound for info in fs.find_checkpoints(tmp_path / "data" / version)] == [True]
    run_distributed(_load, ranks, str(tmp_path / "data"), version)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)


def _drop_part(raw: dict[str, Any]) -> None:
    raw["model"]["model.norm.weight"]["chunks"].pop()


def _rename(raw: dict[str, Any]) -> None:
    raw["files"]["model/../../x.safetensors"] = raw["files"].pop("model/00000.safetensors")


def _staircase(raw: dict[str, Any]) -> None:
    """Parts that tile a triangle-like band, each in a file of its own: slow for whoever compares pairs."""
    count = 5_000
    record = raw["files"]["model/00000.safetensors"]
    files = [f"model/{i:05d}.safetensors" for i in range(count)]
    raw["files"].update(dict.fromkeys(files, record))
    chunks = [[name, [i, i], [count - i, 1]] for i, name in enumerate(files)]
    next(iter(raw["model"].values())).update(shape=[count, (count + 1) // 2], chunks=chunks)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda s: _flip(s / "model/00000.safetensors"), "SHA-256 differs"),
        (lambda s: _flip(s / "optimizer/00001.safetensors"), "SHA-256 differs"),
        (lambda s: _flip(s / "rank/00001.safetensors"), "SHA-256 differs"),
        (lambda s: (s / "rank/00000.json").unlink(), "is missing"),
        (lambda s: shutil.copy(s / "model/00000.safetensors", s / "model/00001.safetensors"), "SHA-256"),
        (lambda s: sign(s, _drop_part), "are not complete"),
        (lambda s: sign(s, _rename), "which no checkpoint has"),
        (lambda s: sign(s, _staircase), "are not complete|overlap"),
    ],
)
def test_their_damage_is_found_as_ever(damage: Any, reason: str, tmp_path: Path) -> None:
    step = tmp_path / "step-3"
    shutil.copytree(DATA / "version-1" / "step-3", step)
    damage(step)
    model = tiny_model("llama", seed=9)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(fs.CheckpointCorruptError, match=reason):
        fs.load_checkpoint(step, model=model)
    assert_same(model.state_dict(), before)
