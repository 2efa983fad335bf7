"""Checkpoints: exact at the same and at another number of ranks, with any mesh; and their parts."""

import hashlib
import json
import logging
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

import fsdp_sft as fs
from fsdp_sft._process.codec import dumps
from fsdp_sft.dcp_io import retention
from tests.harness.models import full, tiny_model
from tests.harness.ranks import device_here, mesh_here, run_distributed
from tests.harness.trained import (
    DDP,
    HSDP,
    assert_same,
    everything,
    make_adamw,
    make_model,
    this_rank,
    train,
)

TRAIN_STATE = {
    "scheduler": {"_last_lr": [1e-3], "milestones": Counter({30: 1}), "best": -math.inf},
    "counters": {"tokens": 2**60, "nothing": None, "done": False, "by_step": {1: "a", 2: (1, [2.5])}},
    "odd": {(1, "x"): {"__fsdp_sft__": 3}, "b": -0.0, "a": {}},
}


def _rank_state() -> dict[str, Any]:
    return {"position": this_rank(), "buffer": torch.arange(3) + this_rank(), "blob": b"\x00\xff"}


def _tokens() -> torch.Tensor:
    return torch.ones(1, 4, dtype=torch.int64, device=device_here())


def _evaluate(model: Any) -> None:
    """A forward that leaves the root gathered."""
    model.eval()
    with torch.no_grad():
        model(input_ids=_tokens())
    model.train()


@pytest.fixture
def linear() -> torch.nn.Linear:
    return torch.nn.Linear(3, 2)


def _save(root: Path, mesh_shape: dict[str, int] | None, family: str) -> None:
    """Train two steps, save, then go on; what was saved and what followed goes to a file."""
    torch.manual_seed(100 + this_rank())
    random.seed(this_rank())
    np.random.seed(this_rank())
    model = make_model(1, mesh_shape, family=family)
    optimizer = make_adamw(model, amsgrad=True)
    train(model, optimizer, 0, 2)
    _evaluate(model)
    fs.save_checkpoint(
        root, 2, model=model, optimizer=optimizer, train_state=TRAIN_STATE, rank_state=_rank_state()
    )
    torch.save(
        {
            "state": everything(model, optimizer),
            "drawn": [torch.rand(1).item(), random.random(), float(np.random.rand())],
            "losses": train(model, optimizer, 2, 2),
            "after": everything(model, optimizer),
        },
        root / f"expected-{this_rank()}",
    )


def _load(root: Path, mesh_shape: dict[str, int] | None, family: str, prepare: str = "") -> None:
    expected = [torch.load(path, weights_only=False) for path in sorted(root.glob("expected-*"))]
    torch.manual_seed(7)
    model = make_model(2, mesh_shape, family=family)
    optimizer = make_adamw(model, amsgrad=True)
    if prepare == "stepped":
        train(model, optimizer, 0, 1)
        _evaluate(model)
    if prepare == "pending":
        model(input_ids=_tokens()).logits.sum().backward()
    loaded = fs.load_checkpoint(root, model=model, optimizer=optimizer)
    optimizer.zero_grad()
    assert_same(everything(model, optimizer), expected[0]["state"])
    assert (loaded.step, loaded.path.name, loaded.train_state) == (2, "step-2", TRAIN_STATE)
    assert isinstance(loaded.train_state["scheduler"]["milestones"], Counter)
    assert list(loaded.train_state["odd"]) == list(TRAIN_STATE["odd"]), "in its order"
    if torch.distributed.get_world_size() != len(expected):
        assert loaded.rank_state is None
        return
    mine = expected[this_rank()]
    assert_same(loaded.rank_state, _rank_state())
    assert [torch.rand(1).item(), random.random(), float(np.random.rand())] == mine["drawn"]
    if prepare != "other mesh":
        assert train(model, optimizer, 2, 2) == mine["losses"]
        assert_same(everything(model, optimizer), mine["after"])


def _load_many(root: Path, cases: list[tuple[Any, str]]) -> None:
    for mesh_shape, prepare in cases:
        _load(root, mesh_shape, "qwen2-tied", prepare)


def test_two_ranks_load_at_any_number(tmp_path: Path) -> None:
    run_distributed(_save, 2, tmp_path, {}, "qwen2-tied")
    assert fs.verify_checkpoint(tmp_path / "step-2") == []
    run_distributed(
        _load_many,
        2,
        tmp_path,
        [({}, ""), ({}, "stepped"), ({}, "pending"), (DDP, "other mesh"), (None, "other mesh")],
    )
    for ranks, mesh_shape in ((1, None), (3, {}), (4, HSDP)):
        run_distributed(_load_many, ranks, tmp_path, [(mesh_shape, "")])


@pytest.mark.parametrize(
    ("save_ranks", "save_mesh", "load_ranks", "load_mesh"),
    [(4, HSDP, 2, {}), (2, DDP, 4, {}), (1, None, 2, {}), (2, None, 1, {})],
)
def test_other_meshes(
    save_ranks: int, save_mesh: Any, load_ranks: int, load_mesh: Any, tmp_path: Path
) -> None:
    run_distributed(_save, save_ranks, tmp_path, save_mesh, "llama")
    run_distributed(_load, load_ranks, tmp_path, load_mesh, "llama")
    manifest = json.loads((tmp_path / "step-2" / "MANIFEST.json").read_text())
    files = {path.name: load_file(path) for path in (tmp_path / "step-2" / "shards").iterdir()}
    written = sum(t.numel() for held in files.values() for key, t in held.items() if key.startswith("model."))
    assert written == sum(math.prod(shape) for _, shape, *_ in manifest["model"].values())
    assert set(files) == {f"{rank:05d}.safetensors" for rank in range(save_ranks)}
    assert manifest["versions"].keys() >= {"fsdp_sft", "torch", "python"}
    if save_ranks == 4:  # replicas take turns
        assert all(any(key.startswith("model.") for key in held) for held in files.values())


def _as_version_3(folder: Path) -> None:
    """What is in a manifest now, in files of its own."""
    raw = json.loads((folder / "MANIFEST.json").read_text())
    body = {
        key: value for key, value in raw.items() if key not in ("digest", "files", "train_state", "settings")
    }
    small = {"train_state.json": raw["train_state"].encode()}
    small |= {f"settings/{subject}.json": dumps(own) for subject, own in raw["settings"].items()}
    (folder / "settings").mkdir()
    for name, data in small.items():
        (folder / name).write_bytes(data)
    index = {f"shards/{rank:05d}.safetensors": own for rank, own in enumerate(raw["files"])}
    index |= {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in small.items()}
    (folder / "INDEX.json").write_bytes(dumps(index))
    body |= {
        "version": 3,
        "index": {"size": len(dumps(index)), "sha256": hashlib.sha256(dumps(index)).hexdigest()},
    }
    (folder / "MANIFEST.json").write_bytes(dumps({**body, "digest": hashlib.sha256(dumps(body)).hexdigest()}))


def test_a_step_of_version_3_is_read(linear: torch.nn.Linear, tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    fs.save_checkpoint(tmp_path, 1, model=linear, optimizer=optimizer, train_state=TRAIN_STATE)
    _as_version_3(tmp_path / "step-1")
    other = torch.nn.Linear(3, 2)
    resumed = torch.optim.AdamW(other.parameters())
    assert fs.load_checkpoint(tmp_path, model=other, optimizer=resumed).train_state == TRAIN_STATE
    assert torch.equal(other.weight, linear.weight)
    assert torch.equal(resumed.state[other.weight]["exp_avg"], optimizer.state[linear.weight]["exp_avg"])
    state = tmp_path / "step-1" / "train_state.json"
    state.write_bytes(state.read_bytes().replace(b"done", b"gone"))
    assert "train_state.json is not what was written" in fs.verify_checkpoint(tmp_path / "step-1")[0]


def test_a_step_that_a_link_leads_to_is_loaded(linear: torch.nn.Linear, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    fs.save_checkpoint(root, 7, model=linear)
    (root / "step-7").symlink_to((root / "step-7").rename(tmp_path / "disk"))
    (root / "latest").symlink_to("step-7")
    assert [info.sound for info in fs.find_checkpoints(root)] == [True]
    for path in (root, root / "step-7", root / "latest"):
        other = torch.nn.Linear(3, 2)
        assert fs.load_checkpoint(path, model=other).step == 7
        assert torch.equal(other.weight, linear.weight)
    assert fs.verify_checkpoint(root / "latest") == []


def test_a_step_below_newer_ones_is_warned_about(linear: torch.nn.Linear, tmp_path: Path) -> None:
    for step in (100, 200, 300):
        fs.save_checkpoint(tmp_path, step, model=linear)
    with pytest.warns(UserWarning, match=r"step-150 is saved beside newer steps \(\[200, 300\]\)"):
        fs.save_checkpoint(tmp_path, 150, model=linear)


@pytest.mark.filterwarnings("ignore:.*saved beside newer steps")
def test_only_steps_of_this_run_are_pruned(
    linear: torch.nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root := tmp_path.with_name(f"{tmp_path.name}-link")).symlink_to(tmp_path)

    def save(*steps: int, **options: Any) -> list[int]:
        for step in steps:
            fs.save_checkpoint(root if step % 20 else tmp_path, step, model=linear, **options)
        return [info.step for info in fs.find_checkpoints(root)]

    def restarted() -> None:
        monkeypatch.setattr(retention, "_own_steps", {})

    assert save(4, 5, 1000, metric=0.1) == [4, 5, 1000], "all stay where nothing is said"
    restarted()
    assert save(10, 20, keep_last=1) == [4, 5, 20, 1000], "an earlier run's steps stay, before and after"
    restarted()
    fs.load_checkpoint(tmp_path / "step-20", model=linear)
    assert save(30, keep_last=1) == [30, 1000], "a run that goes on prunes the steps up to the one loaded"
    restarted()
    fs.load_checkpoint(tmp_path, model=linear)
    assert save(40, keep_last=1) == [40, 1000], "a step that is loaded and counted back from stays"
    assert save(1010, metric=0.2, keep_last=1, keep_best=1) == [1000, 1010]


@pytest.mark.parametrize("async_", [False, True])
def test_nothing_is_deleted_unless_asked_for_and_then_said(
    async_: bool, linear: torch.nn.Linear, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 10):
        fs.save_checkpoint(
            tmp_path, step, model=linear, metric=float(step), keep_best=1, async_=async_
        ).wait()
    assert [info.step for info in fs.find_checkpoints(tmp_path)] == [1, 2, 10], "nothing was asked for"
    with caplog.at_level(logging.WARNING, "fsdp_sft"):
        fs.save_checkpoint(tmp_path, 11, model=linear, keep_last=4, async_=async_).wait()
        assert caplog.text == ""
        fs.save_checkpoint(tmp_path, 12, model=linear, keep_last=2, async_=async_).wait()
    assert [info.step for info in fs.find_checkpoints(tmp_path)] == [11, 12]
    (record,) = caplog.records
    assert f"deleted step-1, step-2, step-10 from {tmp_path}" in record.getMessage()
    assert record.levelno == logging.WARNING  # Python prints it unless told otherwise


@torch.no_grad()
def _load_into_meta(root: str) -> None:
    model = tiny_model("qwen2-tied", max_position_embeddings=64)
    fs.shard_model(model, mesh=mesh_here())
    fs.save_checkpoint(root, 1, model=model)
    fs.save_full_state_dict(model, f"{root}/full.safetensors")
    expected, before = model(input_ids=_tokens()).logits, torch.get_rng_state()
    for load in (
        lambda other: fs.load_full_state_dict(other, f"{root}/full.safetensors"),
        lambda other: fs.load_checkpoint(root, model=other),
    ):
        with torch.device("meta"):
            other: Any = AutoModelForCausalLM.from_config(model.config)
        fs.shard_model(other, mesh=mesh_here())
        load(other)
        assert torch.equal(other(input_ids=_tokens()).logits, expected)
        assert torch.equal(torch.get_rng_state(), before)
    other = torch.nn.Linear(3, 2, device="meta")
    other.register_buffer("table", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=r"table.* on the meta device, and belong in no"):
        fs.load_checkpoint(root, model=other)


@pytest.mark.usefixtures("fresh_memory_is_nan")
def test_a_model_on_the_meta_device_gets_all_of_its_values(tmp_path: Path) -> None:
    """Those of buffers that are in no file too: rotary tables, for which ``to_empty`` has no values."""
    run_distributed(_load_into_meta, 2, str(tmp_path))


# --- torch's own distributed checkpoint reads a step of ours, from its folder of shards --------------------


def _job(seed: int, mesh: dict[str, int]) -> tuple[Any, torch.optim.Optimizer]:
    model = tiny_model("mixtral", num_local_experts=3, seed=seed)  # uneven experts: other dimensions
    fs.shard_model(model, mesh=mesh_here(**mesh))
    return model, make_adamw(model)


def _save_for_torch(root: str, mesh: dict[str, int]) -> dict[str, torch.Tensor]:
    model, optimizer = _job(0, mesh)
    train(model, optimizer, 0, 2)
    fs.save_checkpoint(root, 2, model=model, optimizer=optimizer, rank_state={"rows": torch.arange(3)})
    return {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in everything(model, optimizer).items()
    }


def _load_by_torch(root: str, mesh: dict[str, int], expected: dict[str, Any]) -> None:
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
    expected = run_distributed(_save_for_torch, save_ranks, str(tmp_path), save_mesh)[0]
    assert len(expected) > 60
    run_distributed(_load_by_torch, load_ranks, str(tmp_path), {}, expected)
