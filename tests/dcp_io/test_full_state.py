"""One file with the whole model: written from and read into any sharding, and what is refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fsdp_sft as fs
from fsdp_sft._tensors import gather
from fsdp_sft.dcp_io import full_state
from tests.harness.models import full, tiny_model
from tests.harness.ranks import device_here, mesh_here, on_ranks
from tests.harness.trained import HSDP, assert_same


def _model(seed: int, mesh_shape: dict[str, int] | None, **shard_options: Any) -> Any:
    model = tiny_model("qwen2-tied", seed=seed).to(device_here())
    model.model.register_buffer("steps", torch.tensor(seed))
    model.model.register_buffer("mean", torch.full((3,), float(seed), dtype=torch.float64))
    if mesh_shape is not None:
        fs.shard_model(model, mesh=mesh_here(**mesh_shape), **shard_options)
    return model


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(tensor).detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}


def _forward(model: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.ones(1, 4, dtype=torch.int64, device=device_here()))  # leaves the root gathered


@pytest.mark.parametrize(("ranks", "mesh_shape"), [(2, {}), (4, HSDP), (1, None), (2, None)])
@on_ranks()
def test_any_model_comes_back(ranks: int, mesh_shape: Any, tmp_path: Path) -> None:
    model, expected = _model(1, mesh_shape), _full(_model(1, None))
    path = f"{tmp_path}/model.safetensors"
    _forward(model)
    fs.save_full_state_dict(model, path)
    assert_same(_full(model), expected)
    assert_same(
        load_file(path), {name: tensor for name, tensor in expected.items() if name != "lm_head.weight"}
    )
    other = _model(2, mesh_shape)
    _forward(other)
    fs.load_full_state_dict(other, path)
    assert_same(_full(other), expected)
    _forward(other)
    torch.distributed.barrier()
    fs.save_full_state_dict(model, path, dtype=torch.bfloat16)
    fs.load_full_state_dict(other, path)
    assert_same(
        _full(other),
        {n: t.bfloat16().to(t.dtype) if t.is_floating_point() else t for n, t in expected.items()},
    )
    assert os.path.getsize(path) < 0.6 * sum(t.nbytes for t in expected.values())
    torch.distributed.barrier()
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors"]


@pytest.fixture
def bad_files(tmp_path: Path) -> dict[str, tuple[type[Exception], str]]:
    """The errors that files end in, by their paths."""
    state = {name: tensor.clone() for name, tensor in _model(1, None).state_dict().items()}
    without = {name: tensor for name, tensor in state.items() if "layers.1.mlp.up" not in name}
    others = {
        "missing": (without, "not in it.*layers.1.mlp.up"),
        "extra": ({**state, "surplus": torch.ones(2)}, "not the model's.*surplus"),
        "shape": ({**state, "model.norm.weight": torch.ones(7)}, "model.norm.weight"),
        "kind": ({**state, "model.steps": torch.tensor(1.5)}, "model.steps"),
        "untied": ({**state, "lm_head.weight": state["lm_head.weight"] + 1}, "one tensor in the model"),
    }
    for name, (content, _) in others.items():
        save_file(content, tmp_path / f"{name}.safetensors")
    cut = tmp_path / "cut.safetensors"
    save_file(state, cut)
    os.truncate(cut, cut.stat().st_size - 1000)
    torch.save(state, tmp_path / "model.pt")
    return {
        **{
            str(tmp_path / f"{name}.safetensors"): (fs.CheckpointMismatchError, message)
            for name, (_, message) in others.items()
        },
        str(cut): (fs.CheckpointCorruptError, "cut|file"),
        str(tmp_path / "model.pt"): (fs.CheckpointCorruptError, "by save_file of safetensors.torch"),
        str(tmp_path / "absent.safetensors"): (fs.CheckpointNotFoundError, "no file"),
    }


def _refused_loads(folder: Path, cases: dict[str, tuple[type[Exception], str]]) -> None:
    model = _model(2, {})
    before = _full(model)
    for path, (kind, message) in cases.items():
        with pytest.raises(kind, match=message) as error:
            fs.load_full_state_dict(model, path)
        assert type(error.value) is kind, path
        assert_same(_full(model), before)
    with torch.device("meta"), pytest.raises(fs.CheckpointMismatchError, match="of another model"):
        fs.load_full_state_dict(nn.Linear(2, 2), folder / "missing.safetensors")


def _refused_saves(folder: Path) -> None:
    model, path = _model(1, {}), folder / "model.safetensors"
    fs.save_full_state_dict(model, path)
    torch.distributed.barrier()
    before = path.read_bytes()

    def full_disk(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    for rank, module, name in (
        (0, full_state, "create"),
        (0, full_state, "write_at"),
        (0, os, "replace"),
        (1, gather, "values_of"),  # has no memory for its part
    ):
        torch.distributed.barrier()
        with pytest.MonkeyPatch.context() as patch:
            if torch.distributed.get_rank() == rank:
                patch.setattr(module, name, full_disk)
            with pytest.raises(OSError, match="No space left"):
                fs.save_full_state_dict(model, path)
        torch.distributed.barrier()
        assert (os.listdir(folder), path.read_bytes()) == (["model.safetensors"], before)
    with pytest.raises(ValueError, match="suffix"):
        fs.save_full_state_dict(model, folder / "model.pt")
    with pytest.raises(ValueError, match="dtype"):
        fs.save_full_state_dict(model, path, dtype=torch.int64)


def _only_rank_0_sees(folder: Path) -> None:
    """The other rank has a folder of its own, as without a shared file system: it cannot load there."""
    path = folder / str(torch.distributed.get_rank()) / "model.safetensors"
    fs.save_full_state_dict(_model(1, {}), path)
    assert os.listdir(folder) == ["0"]
    other = _model(2, {})
    before = _full(other)
    with pytest.raises(fs.CheckpointNotFoundError, match="as rank 1 sees it"):
        fs.load_full_state_dict(other, path)
    assert_same(_full(other), before)


@on_ranks(2)
def test_what_is_refused_leaves_model_and_file_alone(
    bad_files: dict[str, tuple[type[Exception], str]], tmp_path: Path
) -> None:
    _refused_loads(tmp_path, bad_files)
    (tmp_path / "saves").mkdir(exist_ok=True)
    _refused_saves(tmp_path / "saves")
    _only_rank_0_sees(tmp_path / "apart")


def test_without_a_process_group(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2).bfloat16(), nn.Linear(3, 2)
    fs.save_full_state_dict(model, tmp_path / "a.safetensors")
    fs.load_full_state_dict(other, tmp_path / "a.safetensors")
    assert torch.equal(other.weight, model.weight.float())
