"""Checkpoints: exact at the same and at another number of ranks; all damage is found before loading."""

import json
import math
import os
import random
import shutil
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fsdp_sft as fs
from fsdp_sft import dcp_io
from fsdp_sft.dcp_io import manifest as manifest_module
from fsdp_sft.dcp_io.codec import decode, dumps, encode, loads
from fsdp_sft.dcp_io.layout import Box, box_at, tiling_problem
from tests.distributed import run_distributed
from tests.models import full, ragged_batches, tiny_model

HSDP = {"dp_replicate": 2}
DDP = {"dp_replicate": 2, "dp_shard": 1}
BATCHES = ragged_batches(9)[:8]


class Extra(nn.Module):
    """A model around a model, with the buffers and parameters that language models seldom have."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config
        self.scale = nn.Parameter(torch.randn(5, 3))  # fewer rows than some meshes have ranks
        self.register_buffer("count", torch.tensor(int(torch.randint(1000, ()))))
        self.register_buffer("flags", torch.rand(7) > 0.5)
        self.register_buffer("mean", torch.randn(4, dtype=torch.float64))
        self.register_buffer("scratch", torch.randn(3), persistent=False)

    def get_decoder(self) -> nn.Module:
        return self.inner.get_decoder()

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


def _model(
    seed: int, mesh_shape: dict[str, int] | None, *, family: str = "qwen2-tied", wrap: bool = True
) -> Any:
    inner = tiny_model(family, seed=seed, **({"attention_dropout": 0.1} if family != "gpt2" else {}))
    blocks = fs.find_blocks(inner)
    inner.get_input_embeddings().requires_grad_(family != "llama")  # llama: frozen embedding
    model: Any = Extra(inner) if wrap else inner
    if mesh_shape is not None:
        mesh = fs.build_mesh(**mesh_shape, device_type="cpu")
        fs.shard_model(model, mesh=mesh, blocks={f"inner.{k}" if wrap else k: b for k, b in blocks.items()})
    return model


def _adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, **options)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    losses = []
    for batch in BATCHES[first : first + count]:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), ignore_index=-100
        )
        if isinstance(model, Extra):
            loss = (
                loss
                + (full(model.scale) if not hasattr(model, "unshard") else model.scale).square().sum() * 0
            )
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter) * 0.1
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Everything that must come back: full tensors by name, on every rank."""
    from fsdp_sft.distributed import reshard

    reshard(model)
    state = {f"model/{n}": full(t).detach().clone() for n, t in model.state_dict(keep_vars=True).items()}
    for name, parameter in model.named_parameters() if optimizer is not None else ():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}/{key}"] = (
                full(value).detach().clone() if isinstance(value, torch.Tensor) else value
            )
    for index, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        state.update({f"group/{index}/{k}": v for k, v in group.items() if k != "params"})
    return state


def _assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert actual[name].dtype == value.dtype, name
            assert torch.equal(actual[name], value), name
        else:
            assert actual[name] == value, name


def _rank() -> int:
    return torch.distributed.get_rank()


TRAIN_STATE = {
    "scheduler": {"_last_lr": [1e-3], "milestones": Counter({30: 1}), "best": -math.inf},
    "counters": {"tokens": 2**60, "nothing": None, "done": False, "by_step": {1: "a", 2: (1, [2.5])}},
}


def _save(root: str, mesh_shape: dict[str, int] | None, family: str) -> None:
    """Train two steps, save, then go on; what was saved and what followed goes to a file."""
    torch.manual_seed(100 + _rank())
    random.seed(_rank())
    np.random.seed(_rank())
    model = _model(1, mesh_shape, family=family)
    optimizer = _adamw(model, amsgrad=True)
    _train(model, optimizer, 0, 2)
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))  # leaves the root gathered
    model.train()
    rank_state = {"position": _rank(), "buffer": torch.arange(3) + _rank(), "blob": b"\x00\xff"}
    fs.save_checkpoint(
        root, 2, model=model, optimizer=optimizer, train_state=TRAIN_STATE, rank_state=rank_state
    )
    saved = _state(model, optimizer)
    drawn = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    losses = _train(model, optimizer, 2, 2)
    expected = {"state": saved, "drawn": drawn, "losses": losses, "after": _state(model, optimizer)}
    torch.save(expected, f"{root}/expected-{_rank()}")


def _load(root: str, mesh_shape: dict[str, int] | None, family: str, prepare: str = "") -> None:
    expected = [torch.load(path, weights_only=False) for path in sorted(Path(root).glob("expected-*"))]
    torch.manual_seed(7)
    model = _model(2, mesh_shape, family=family)
    optimizer = _adamw(model, amsgrad=True)
    if prepare == "stepped":
        _train(model, optimizer, 0, 1)
        model.eval()
        with torch.no_grad():
            model(input_ids=torch.ones(1, 4, dtype=torch.int64))  # leaves the root gathered
        model.train()
    if prepare == "pending":
        model(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits.sum().backward()
    loaded = fs.load_checkpoint(root, model=model, optimizer=optimizer)
    optimizer.zero_grad()
    _assert_same(_state(model, optimizer), expected[0]["state"])
    assert (loaded.step, loaded.path.name, loaded.train_state) == (2, "step-2", TRAIN_STATE)
    assert isinstance(loaded.train_state["scheduler"]["milestones"], Counter)
    if torch.distributed.get_world_size() != len(expected):
        assert loaded.rank_state is None
        return
    mine = expected[_rank()]
    assert loaded.rank_state["position"] == _rank()
    assert torch.equal(loaded.rank_state["buffer"], torch.arange(3) + _rank())
    assert loaded.rank_state["blob"] == b"\x00\xff"
    assert [torch.rand(1).item(), random.random(), float(np.random.rand())] == mine["drawn"]
    if prepare != "other mesh":
        assert _train(model, optimizer, 2, 2) == mine["losses"]
        _assert_same(_state(model, optimizer), mine["after"])


def _load_many(root: str, cases: list[tuple[Any, ...]]) -> None:
    for mesh_shape, family, prepare in cases:
        _load(root, mesh_shape, family, prepare)


def test_two_ranks_load_at_any_number(tmp_path: Path) -> None:
    root = str(tmp_path)
    run_distributed(_save, 2, root, {}, "qwen2-tied")
    assert dcp_io.verify_checkpoint(tmp_path / "step-2") == []
    again = [({}, "qwen2-tied", ""), ({}, "qwen2-tied", "stepped"), ({}, "qwen2-tied", "pending")]
    others = [(DDP, "qwen2-tied", "other mesh"), (None, "qwen2-tied", "other mesh")]
    run_distributed(_load_many, 2, root, again + others)
    run_distributed(_load, 1, root, None, "qwen2-tied")
    run_distributed(_load, 3, root, {}, "qwen2-tied")
    run_distributed(_load, 4, root, HSDP, "qwen2-tied")


@pytest.mark.parametrize(
    ("save_ranks", "save_mesh", "load_ranks", "load_mesh"),
    [(4, HSDP, 2, {}), (2, DDP, 4, {}), (1, None, 2, {}), (2, None, 1, {})],
)
def test_other_meshes(
    save_ranks: int, save_mesh: Any, load_ranks: int, load_mesh: Any, tmp_path: Path
) -> None:
    root = str(tmp_path)
    run_distributed(_save, save_ranks, root, save_mesh, "llama")
    run_distributed(_load, load_ranks, root, load_mesh, "llama")
    manifest = json.loads((tmp_path / "step-2" / "MANIFEST.json").read_text())
    stored = sum(math.prod(shape) for t in manifest["model"].values() for _, _, shape in t["chunks"])
    assert stored == sum(math.prod(tensor["shape"]) for tensor in manifest["model"].values())
    if save_ranks == 4:  # replicas take turns
        assert len({file for t in manifest["model"].values() for file, _, _ in t["chunks"]}) == 4


def _compiled_and_checkpointed(root: str) -> None:
    plain = _model(1, None, wrap=False)
    saved = plain.state_dict()
    prepared = _model(1, None, wrap=False)
    fs.apply_sac(prepared, "1/2")
    fs.compile_blocks(prepared, backend="aot_eager")
    fs.shard_model(prepared, mesh=fs.build_mesh(device_type="cpu"))
    fs.save_checkpoint(root, 0, model=prepared)
    other = _model(5, {}, wrap=False)
    fs.load_checkpoint(root, model=other)
    _assert_same(_state(other), {f"model/{name}": tensor for name, tensor in saved.items()})


def _optimizer_kinds(folder: str) -> None:
    """save_optimizer_state for many optimizers; loads into fresh ones and saves from fresh ones."""

    def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        kinds: dict[str, Any] = {
            "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
            "foreach": lambda: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
            "fused": lambda: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
            "sgd": lambda: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
            "plain sgd": lambda: torch.optim.SGD(parameters, lr=1e-2),
            "tensor lr": lambda: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False),
            "nadam": lambda: torch.optim.NAdam(parameters, lr=1e-2),
        }
        return kinds[kind]()

    for kind in ("adamw", "foreach", "fused", "sgd", "plain sgd", "tensor lr", "nadam"):
        path = f"{folder}/{kind}/state"
        model = _model(1, {}, family="llama")
        optimizer = make(kind, model)
        fs.save_optimizer_state(model, optimizer, path)
        assert not optimizer.state
        assert all(p.grad is None for p in model.parameters())
        target = _model(1, {}, family="llama")
        stepped = make(kind, target)
        _train(target, stepped, 0, 1)
        fs.load_optimizer_state(target, stepped, path)  # a fresh state empties it
        assert not stepped.state
        _train(model, optimizer, 0, 2)
        if kind == "sgd":
            optimizer.state[next(iter(optimizer.state))]["momentum_buffer"] = None
            optimizer.state[next(iter(optimizer.state))]["count"] = 3
        optimizer.param_groups[0]["weight_decay"] = 0.25
        fs.save_optimizer_state(model, optimizer, path)  # over the old one
        fresh = make(kind, target)
        fs.load_optimizer_state(target, fresh, path)
        loaded, saved = _state(target, fresh), _state(model, optimizer)
        _assert_same(
            {name: v for name, v in loaded.items() if not name.startswith("model/")},
            {name: v for name, v in saved.items() if not name.startswith("model/")},
        )
        for a, b in zip(optimizer.state.values(), fresh.state.values(), strict=True):
            assert {k: type(v) for k, v in a.items()} == {k: type(v) for k, v in b.items()}
        for a, b in zip(model.parameters(), target.parameters(), strict=True):
            b.data.to_local().copy_(a.data.to_local())
        torch.manual_seed(5)
        losses = _train(model, optimizer, 2, 2)
        torch.manual_seed(5)
        assert _train(target, fresh, 2, 2) == losses, kind


def _optimizer_mismatches(folder: str) -> None:
    model = _model(1, {}, family="llama")
    optimizer = _adamw(model)
    _train(model, optimizer, 0, 1)
    fs.save_optimizer_state(model, optimizer, f"{folder}/state")
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = _state(model, optimizer)
    cases = [
        (torch.optim.AdamW(parameters), "groups of"),
        (torch.optim.AdamW(parameters[:-1]), "lacks 1 of its parameters"),
        (torch.optim.SGD(parameters, momentum=0.9), "it is of AdamW, the optimizer is SGD"),
    ]
    for other, message in cases:
        with pytest.raises(fs.CheckpointMismatchError, match=message):
            fs.load_optimizer_state(model, other, f"{folder}/state")
        assert not other.state
    half = _model(1, None, family="llama").bfloat16()
    with pytest.raises(fs.CheckpointMismatchError, match="F32"):
        fs.load_optimizer_state(half, _adamw(half), f"{folder}/state")
    with pytest.raises(fs.CheckpointNotFoundError):
        fs.load_optimizer_state(model, optimizer, f"{folder}/nothing")
    if _rank() == 0:
        os.makedirs(f"{folder}/notes/mine")
        victim = next(Path(folder, "state", "optimizer").iterdir())
        victim.write_bytes(victim.read_bytes()[:-1])
    torch.distributed.barrier()
    with pytest.raises(FileExistsError):
        fs.save_optimizer_state(model, optimizer, f"{folder}/notes")
    with pytest.raises(fs.CheckpointCorruptError, match="bytes instead of"):
        fs.load_optimizer_state(model, optimizer, f"{folder}/state")
    with pytest.raises(ValueError, match="not the model's"):
        fs.save_optimizer_state(_model(3, {}), optimizer, f"{folder}/other")
    optimizer.state[parameters[0]]["row"] = torch.zeros(3)
    with pytest.raises(ValueError, match="sharded again"):
        fs.save_optimizer_state(model, optimizer, f"{folder}/other")
    del optimizer.state[parameters[0]]["row"]
    _assert_same(_state(model, optimizer), before)


def _prepared_and_optimizers(folder: str) -> None:
    _compiled_and_checkpointed(f"{folder}/prepared")
    _optimizer_kinds(folder)
    _optimizer_mismatches(folder)


def test_prepared_models_and_optimizers(tmp_path: Path) -> None:
    run_distributed(_prepared_and_optimizers, 2, str(tmp_path))


def test_an_optimizer_goes_to_another_number_of_ranks(tmp_path: Path) -> None:
    run_distributed(_save_optimizer, 2, str(tmp_path))
    run_distributed(_load_optimizer, 1, str(tmp_path))


def _save_optimizer(folder: str) -> None:
    model = _model(1, {}, family="llama")
    optimizer = _adamw(model)
    _train(model, optimizer, 0, 2)
    fs.save_optimizer_state(model, optimizer, f"{folder}/state")
    fs.save_full_state_dict(model, f"{folder}/model.pt")
    state = _state(model, optimizer)
    if _rank() == 0:
        torch.save({k: v for k, v in state.items() if isinstance(v, torch.Tensor)}, f"{folder}/expected")


def _load_optimizer(folder: str) -> None:
    model = _model(3, None, family="llama")
    optimizer = _adamw(model, fused=True)
    fs.load_full_state_dict(model, f"{folder}/model.pt")
    fs.load_optimizer_state(model, optimizer, f"{folder}/state")
    actual = {k: v for k, v in _state(model, optimizer).items() if isinstance(v, torch.Tensor)}
    _assert_same(actual, torch.load(f"{folder}/expected"))
    assert optimizer.param_groups[0]["fused"] is True
    _train(model, optimizer, 2, 1)


# --- damage -----------------------------------------------------------------------------------------------


def _edit_manifest(step: Path, change: Any, *, sign: bool) -> None:
    import hashlib

    raw = json.loads((step / "MANIFEST.json").read_text())
    change(raw)
    if sign:
        raw.pop("digest")
        raw["digest"] = hashlib.sha256(dumps(raw)).hexdigest()
    (step / "MANIFEST.json").write_text(json.dumps(raw))


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def _swap(a: Path, b: Path) -> None:
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)


def _rename_file(raw: dict[str, Any], name: str) -> None:
    raw["files"][name] = raw["files"].pop("model/00000.safetensors")
    for tensor in raw["model"].values():
        for chunk in tensor["chunks"]:
            chunk[0] = name if chunk[0] == "model/00000.safetensors" else chunk[0]


def _change_dtype(raw: dict[str, Any]) -> None:
    raw["model"]["model.norm.weight"]["dtype"] = "I32"


def _link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to("../elsewhere")


FIRST = "model/00000.safetensors"
REASONS = {
    "absolute name": "which no checkpoint has",
    "name outside": "which no checkpoint has",
    "other dtype": "holds other tensors",
    "linked file": "is not a regular file",
    "linked folder": "is not a regular file",
    "missing part": "are not complete",
    "edited manifest": "its digest does not match",
    "manifest of another step": "it is of step 1",
}
DAMAGE: dict[str, Any] = {
    "cut short": lambda s: (s / FIRST).write_bytes((s / FIRST).read_bytes()[:-4]),
    "flipped bit": lambda s: _flip(s / FIRST, -5),
    "flipped bit in the optimizer": lambda s: _flip(s / "optimizer/00001.safetensors", -5),
    "flipped bit in a header": lambda s: _flip(s / FIRST, 30),
    "flipped bit in train_state": lambda s: _flip(s / "train_state.json", 5),
    "flipped bit in a rank's state": lambda s: _flip(s / "rank/00001.safetensors", -1),
    "flipped bit in the manifest": lambda s: _flip(s / "MANIFEST.json", 400),
    "deleted": lambda s: (s / FIRST).unlink(),
    "deleted rank file": lambda s: (s / "rank/00000.json").unlink(),
    "swapped": lambda s: _swap(s / FIRST, s / "model/00001.safetensors"),
    "stale": lambda s: shutil.copy(s.parent / "step-1" / FIRST, s / FIRST),
    "no manifest": lambda s: (s / "MANIFEST.json").unlink(),
    "empty manifest": lambda s: (s / "MANIFEST.json").write_bytes(b""),
    "no files at all": lambda s: [shutil.rmtree(s), s.mkdir()],
    "manifest of another step": lambda s: shutil.copy(s.parent / "step-1/MANIFEST.json", s / "MANIFEST.json"),
    "edited manifest": lambda s: _edit_manifest(s, lambda r: r.update(step=3), sign=False),
    "other version": lambda s: _edit_manifest(s, lambda r: r.update(version=99), sign=True),
    "missing part": lambda s: _edit_manifest(
        s, lambda r: next(iter(r["model"].values()))["chunks"].pop(), sign=True
    ),
    "absolute name": lambda s: _edit_manifest(s, lambda r: _rename_file(r, "/etc/passwd"), sign=True),
    "name outside": lambda s: _edit_manifest(
        s, lambda r: _rename_file(r, "model/../../x.safetensors"), sign=True
    ),
    "other dtype": lambda s: _edit_manifest(s, _change_dtype, sign=True),
    "a list": lambda s: (s / "MANIFEST.json").write_text("[]"),
    "deep": lambda s: (s / "MANIFEST.json").write_text("[" * 100_000),
    "linked file": lambda s: _link(s / FIRST),
    "linked folder": lambda s: _link(s / "model"),
}


def _load_damaged(root: str, names: list[str]) -> None:
    model = _model(2, {}, wrap=False)
    optimizer = _adamw(model)
    _train(model, optimizer, 0, 1)
    before, rng = _state(model, optimizer), torch.get_rng_state()
    for name in names:
        with pytest.raises(fs.CheckpointCorruptError) as error:
            fs.load_checkpoint(f"{root}/{name}/step-2", model=model, optimizer=optimizer)
        assert type(error.value) is fs.CheckpointCorruptError
        _assert_same(_state(model, optimizer), before)
        with pytest.raises(fs.CheckpointCorruptError):
            fs.load_checkpoint(f"{root}/{name}", model=model, optimizer=optimizer, fallback=False)
        _assert_same(_state(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), rng)
    for name in names[:3]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = fs.load_checkpoint(f"{root}/{name}", model=model, optimizer=optimizer)
        told = [str(w.message) for w in caught if "step-2 is not sound" in str(w.message)]
        assert loaded.step == 1
        assert len(told) == (1 if _rank() == 0 else 0)
    # without checksums, a flipped bit gets through, and a wrong size does not
    assert fs.load_checkpoint(f"{root}/flipped bit", model=model, verify=False).step == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fs.load_checkpoint(f"{root}/cut short", model=model, verify=False).step == 1


def _save_two(root: str) -> None:
    model = _model(1, {}, wrap=False)
    optimizer = _adamw(model)
    for step in (1, 2):
        _train(model, optimizer, step, 1)
        fs.save_checkpoint(f"{root}/good", step, model=model, optimizer=optimizer, train_state={"step": step})


def test_every_damage_is_found_before_the_model_is_touched(tmp_path: Path) -> None:
    run_distributed(_save_two, 2, str(tmp_path))
    for name, damage in DAMAGE.items():
        shutil.copytree(tmp_path / "good", tmp_path / name)
        damage(tmp_path / name / "step-2")
        problems = dcp_io.verify_checkpoint(tmp_path / name / "step-2")
        assert problems, name
        assert REASONS.get(name, "") in problems[0]
        assert dcp_io.verify_checkpoint(tmp_path / name / "step-1") == [], name
    run_distributed(_load_damaged, 2, str(tmp_path), list(DAMAGE))
    sound = {info.step: info.sound for info in fs.find_checkpoints(tmp_path / "cut short")}
    assert sound == {1: True, 2: False}


# --- saving -----------------------------------------------------------------------------------------------


def _rejected_loads(root: str, model: Any, optimizer: Any) -> None:
    before = _state(model, optimizer)
    others: list[tuple[Any, str]] = [
        (_model(1, {}, wrap=False), r"only in the model \(model.embed.*only in the checkpoint \(count"),
        (_model(1, {}, family="qwen2"), "inner.lm_head.weight is tied to another name in only one"),
        (_model(1, None).bfloat16(), "was torch.float32"),
    ]
    for other, message in others:
        untouched = _state(other)
        with pytest.raises(fs.CheckpointMismatchError, match=message):
            fs.load_checkpoint(root, model=other)
        _assert_same(_state(other), untouched)
    with torch.device("meta"), pytest.raises(ValueError, match="to_empty"):
        fs.load_checkpoint(root, model=nn.Linear(2, 2))
    with pytest.raises(fs.CheckpointMismatchError, match="it is of AdamW"):
        fs.load_checkpoint(root, model=model, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(fs.CheckpointNotFoundError):
        fs.load_checkpoint(f"{root}/nothing", model=model)
    with pytest.raises(fs.CheckpointNotFoundError):
        fs.load_checkpoint(f"{root}/step-77", model=model)
    with pytest.raises(FileNotFoundError):
        fs.load_checkpoint(f"{root}/nothing", model=model)
    _assert_same(_state(model, optimizer), before)


def _rejected_saves(root: str, model: Any) -> None:
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"step": 1}, fs.CheckpointExistsError, "never overwritten"),
        ({"step": -1}, ValueError, "step must be"),
        ({"step": 5, "keep_last": 0}, ValueError, "keep_last"),
        (
            {"step": 5, "train_state": {"a": [{"b": torch.ones(1)}]}},
            TypeError,
            r"train_state\['a'\]\[0\]\['b'\]",
        ),
        ({"step": 5, "train_state": {"f": print}}, TypeError, r"train_state\['f'\] is a builtin"),
        ({"step": 5, "rank_state": {"f": {1, 2}}}, TypeError, r"rank_state\['f'\] is a set"),
        ({"step": 5 + _rank()}, fs.CheckpointError, "different things"),
    ]
    for arguments, kind, message in bad:
        with pytest.raises(kind, match=message):
            fs.save_checkpoint(root, model=model, **arguments)
    assert [info.step for info in fs.find_checkpoints(root)] == [1]


def _failing_write(root: str, model: Any, optimizer: Any) -> None:
    """One rank cannot write, at several places: all raise, nothing is left, the old step stands."""
    from fsdp_sft.dcp_io import files, folder, rank_files

    def full_disk(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    places = [
        (1, files, "write_at"),
        (1, folder, "write_tensors"),
        (0, rank_files, "write_bytes"),
        (0, folder, "write_bytes"),
        (0, folder, "sync_folder"),
        (0, os, "rename"),
        (1, os, "fsync"),
    ]
    for rank, module, name in places:
        with pytest.MonkeyPatch.context() as patch:
            if _rank() == rank:
                patch.setattr(module, name, full_disk)
            with pytest.raises(OSError, match="No space left") as error:
                fs.save_checkpoint(root, 2, model=model, optimizer=optimizer)
            assert error.value.errno == 28
            assert f"rank {rank} failed first" in "".join(error.value.__notes__)
        torch.distributed.barrier()
        assert sorted(os.listdir(root)) == ["step-1"], (rank, name)
        torch.distributed.barrier()
    assert dcp_io.verify_checkpoint(f"{root}/step-1") == []

    def invisible(folder: Path) -> None:
        raise fs.CheckpointError("does not see")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "_VISIBLE_SECONDS", 0.1)
        if _rank() == 1:
            patch.setattr(Path, "is_dir", lambda self: False)
        with pytest.raises(fs.CheckpointError, match="shared file system"):
            fs.save_checkpoint(root, 2, model=model)


def _retention(root: str, model: Any) -> None:
    barrier = torch.distributed.barrier
    if _rank() == 0:
        os.makedirs(f"{root}/.tmp-step-9-abc/model")
    barrier()
    for step in (2, 3):
        fs.save_checkpoint(root, step, model=model, keep_last=2)
    barrier()
    assert sorted(os.listdir(root)) == ["step-2", "step-3"]
    barrier()
    if _rank() == 0:
        _flip(Path(root, "step-3", FIRST), -5)
        Path(root, "step-2", FIRST).unlink()
    barrier()
    fs.save_checkpoint(root, 3, model=model, keep_last=2)  # replaces the unsound one
    barrier()
    names = sorted(os.listdir(root))
    assert [name[:16] for name in names] == [".unsound-step-3-", "step-2", "step-3"]
    assert dcp_io.verify_checkpoint(f"{root}/step-3") == []
    barrier()
    fs.save_checkpoint(root, 4, model=model, keep_last=2)
    barrier()
    assert [(i.step, i.sound) for i in fs.find_checkpoints(root)] == [(2, False), (3, True), (4, True)]
    barrier()
    fs.save_checkpoint(root, 1, model=model, keep_last=1)  # the one just saved stays, whatever its number
    barrier()
    assert [(i.step, i.sound) for i in fs.find_checkpoints(root)] == [(1, True), (2, False)]
    fs.save_checkpoint(root, 5, model=model, keep_last=None)
    assert [i.step for i in fs.find_checkpoints(root) if i.sound] == [1, 5]


def _saving(root: str) -> None:
    model = _model(1, {})
    optimizer = _adamw(model)
    _train(model, optimizer, 0, 1)
    with pytest.raises(fs.CheckpointNotFoundError):
        fs.load_checkpoint(root, model=model)
    saved = fs.save_checkpoint(root, 1, model=model, optimizer=optimizer)
    saved.wait()
    assert saved.path == Path(root, "step-1")
    loaded = fs.load_checkpoint(saved.path, model=model, optimizer=optimizer)
    assert (loaded.train_state, loaded.rank_state) == (None, None)
    expected = _state(model, optimizer)
    for state in optimizer.state.values():
        state["step"].zero_()
    fs.load_optimizer_state(model, optimizer, saved.path)
    _assert_same(_state(model, optimizer), expected)
    wrapped = torch.compile(_model(3, None), backend="eager")  # puts _orig_mod. into every name
    fs.load_checkpoint(root, model=wrapped)
    _assert_same(_state(wrapped._orig_mod), {k: v for k, v in expected.items() if k.startswith("model/")})
    _rejected_loads(root, model, optimizer)
    _rejected_saves(root, model)
    _failing_write(root, model, optimizer)
    _retention(root, model)


def test_saving(tmp_path: Path) -> None:
    run_distributed(_saving, 2, str(tmp_path / "root"))


# --- parts without ranks ----------------------------------------------------------------------------------


def test_nested_state_survives() -> None:
    state = {"a": [1, -0.0, math.inf, (1, (2, None))], "b": {1: {"__fsdp_sft__": 3}, (1, "x"): True}, "c": {}}
    assert decode(loads(dumps(encode(state, "s")), "it")) == state
    assert math.isnan(decode(loads(dumps(encode(math.nan, "s")), "it")))
    assert list(decode(loads(dumps(encode({"b": 1, "a": 2}, "s"), canonical=False), "it"))) == ["b", "a"]
    for hostile in (
        {"__fsdp_sft__": "eval", "items": []},
        {"__fsdp_sft__": "tuple"},
        {"__fsdp_sft__": "tensor", "key": 1},
    ):
        with pytest.raises(ValueError, match="not a valid stored value"):
            decode(hostile)


def test_boxes_are_what_torch_has() -> None:
    from torch.distributed.tensor import Replicate, Shard

    for rows in (0, 1, 3, 7, 8):
        for parts in (1, 2, 3, 4):
            boxes = [box_at((rows, 5), [Replicate(), Shard(0)], (2, parts), (1, i)) for i in range(parts)]
            chunks = list(torch.zeros(rows, 5).chunk(parts)) + [torch.zeros(0, 5)] * parts
            assert [box.shape for box in boxes] == [tuple(c.shape) for c in chunks[:parts]]
            assert tiling_problem((rows, 5), boxes) is None
    grid = [box_at((5, 7), [Shard(0), Shard(1)], (2, 3), (i, j)) for i in range(2) for j in range(3)]
    assert tiling_problem((5, 7), grid) is None
    assert "elements" in str(tiling_problem((5, 7), grid[1:]))
    assert "overlap" in str(tiling_problem((4,), [Box((0,), (2,)), Box((1,), (2,))]))
    assert "outside" in str(tiling_problem((4,), [Box((2,), (4,))]))
    assert "outside" in str(tiling_problem((4,), [Box((0, 0), (2, 2))]))


def test_parts_of_columns_are_read(tmp_path: Path) -> None:
    from fsdp_sft.dcp_io.files import TensorReader, read_into, write_tensors

    tensor = torch.randn(6, 5, 4)
    write_tensors(tmp_path / "a.safetensors", {"x": tensor[:, :3], "y": torch.tensor(2.5)})
    write_tensors(tmp_path / "b.safetensors", {"x": tensor[:, 3:]})
    chunks = [("a.safetensors", Box((0, 0, 0), (6, 3, 4))), ("b.safetensors", Box((0, 3, 0), (6, 2, 4)))]
    with TensorReader(tmp_path) as reader:
        out = torch.zeros(4, 3, 2)
        read_into(reader, "x", chunks, Box((1, 2, 1), (4, 3, 2)), out)
        assert torch.equal(out, tensor[1:5, 2:5, 1:3])
        back = torch.zeros(5, 6, 4).transpose(0, 1)
        read_into(reader, "x", chunks, Box((0, 0, 0), (6, 5, 4)), back)
        assert torch.equal(back, tensor)
        scalar = torch.zeros(())
        read_into(reader, "y", [("a.safetensors", Box((), ()))], Box((), ()), scalar)
        assert scalar.item() == 2.5


def test_versions_are_kept() -> None:
    assert manifest_module.versions().keys() >= {"fsdp_sft", "torch", "python"}
