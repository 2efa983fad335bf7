"""All damage is found before the model is touched, and a save that fails leaves nothing behind."""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_sft as fs
from fsdp_sft._tensors import disk
from fsdp_sft._tensors.boxes import local_of
from fsdp_sft._tensors.stored import StoredFolder
from fsdp_sft.dcp_io import folder, saving
from tests.faults.hostile import sign
from tests.harness.ranks import mesh_here, on_ranks, run_distributed
from tests.harness.trained import (
    assert_same,
    everything,
    make_adamw,
    make_model,
    this_rank,
    train,
)


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def _flip_rank_state(step: Path) -> None:
    _flip(step / SECOND, StoredFolder(step).header(SECOND).entries["rank.1"].start + 2)


def _swap(step: Path, first: str, second: str) -> None:
    content = (step / first).read_bytes()
    (step / first).write_bytes((step / second).read_bytes())
    (step / second).write_bytes(content)


def _change_dtype(raw: dict[str, Any]) -> None:
    raw["model"]["model.norm.weight"][0] = "I32"


def _change_sharding(raw: dict[str, Any], **changes: Any) -> None:
    raw["shardings"][raw["model"]["model.norm.weight"][2]].update(changes)


def _link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to("../elsewhere")


def _folder_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _edited(step: Path) -> None:
    manifest = step / "MANIFEST.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":2', b'"step":3'))


def _names(root: str) -> list[str]:
    return sorted(set(os.listdir(root)) - {*saving.FILES})


FIRST, SECOND = "shards/00000.safetensors", "shards/00001.safetensors"
# What is done to a step, and words of the reason.
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda s: (s / FIRST).write_bytes((s / FIRST).read_bytes()[:-4]), "bytes"),
    "longer": (lambda s: (s / FIRST).write_bytes((s / FIRST).read_bytes() + b"\0"), "bytes"),
    "flipped bit": (lambda s: _flip(s / FIRST, -5), ""),
    "flipped bit in another file": (lambda s: _flip(s / SECOND, -5), ""),
    "flipped bit in a header": (lambda s: _flip(s / FIRST, 30), ""),
    "flipped bit in a rank's state": (_flip_rank_state, ""),
    "flipped bit in the manifest": (lambda s: _flip(s / "MANIFEST.json", 400), ""),
    "deleted": (lambda s: (s / FIRST).unlink(), "missing"),
    "a folder in its place": (lambda s: _folder_in_its_place(s / FIRST), ""),
    "swapped": (lambda s: _swap(s, FIRST, SECOND), ""),
    "stale": (lambda s: shutil.copy(s.parent / "step-1" / FIRST, s / FIRST), ""),
    "of another job": (lambda s: shutil.copy(s.parent.parent / "three/step-2" / FIRST, s / FIRST), ""),
    "no manifest": (lambda s: (s / "MANIFEST.json").unlink(), ""),
    "empty manifest": (lambda s: (s / "MANIFEST.json").write_bytes(b""), ""),
    "no files at all": (lambda s: [shutil.rmtree(s), s.mkdir()], ""),
    "manifest of another step": (
        lambda s: shutil.copy(s.parent / "step-1/MANIFEST.json", s / "MANIFEST.json"),
        "it is of step 1",
    ),
    "edited manifest": (_edited, "its digest does not match"),
    "other version": (lambda s: sign(s, lambda r: r.update(version=99)), ""),
    "missing part": (lambda s: sign(s, lambda r: r["files"].pop()), "it lists 1 files of 2 ranks"),
    "a dimension that is not there": (
        lambda s: sign(s, lambda r: _change_sharding(r, splits=[[0, 1]])),
        "the place of",
    ),
    "a rank twice": (lambda s: sign(s, lambda r: _change_sharding(r, ranks=[1, 1])), "sharding is not valid"),
    "a sharding of a later release": (
        lambda s: sign(s, lambda r: _change_sharding(r, folder="step-1")),
        "unknown here",
    ),
    "a copy that is not there": (
        lambda s: sign(s, lambda r: r["model"]["model.norm.weight"].append(3)),
        "the place of",
    ),
    "other dtype": (lambda s: sign(s, _change_dtype), "holds other tensors"),
    "a list": (lambda s: (s / "MANIFEST.json").write_text("[]"), ""),
    "linked file": (lambda s: _link(s / FIRST), "is not a regular file"),
    "linked folder": (lambda s: _link(s / "shards"), "is not a regular file"),
}


def _load_damaged(root: str, names: list[str]) -> None:
    model = make_model(2, {}, wrap=False)
    optimizer = make_adamw(model)
    train(model, optimizer, 0, 1)
    before, rng = everything(model, optimizer, local_of), torch.get_rng_state()
    for name in names:
        for path, options in ((f"{root}/{name}/step-2", {}), (f"{root}/{name}", {"fallback": False})):
            with pytest.raises(fs.CheckpointCorruptError) as error:
                fs.load_checkpoint(path, model=model, optimizer=optimizer, **options)
            assert type(error.value) is fs.CheckpointCorruptError
            assert_same(everything(model, optimizer, local_of), before)
    assert torch.equal(torch.get_rng_state(), rng)
    for name, verify in (("deleted", True), ("cut short", False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = fs.load_checkpoint(f"{root}/{name}", model=model, optimizer=optimizer, verify=verify)
        told = [str(w.message) for w in caught if "step-2 is not sound" in str(w.message)]
        assert (loaded.step, len(told)) == (1, 1 - this_rank())
    # Without checksums a flipped bit gets through, and a wrong size does not.
    assert fs.load_checkpoint(f"{root}/flipped bit", model=model, verify=False).step == 2


def _save_two(root: str) -> None:
    model = make_model(1, {}, wrap=False)
    optimizer = make_adamw(model)
    for step in (1, 2):
        train(model, optimizer, step, 1)
        fs.save_checkpoint(root, step, model=model, optimizer=optimizer, train_state={"step": step})


def test_every_damage_is_found_before_the_model_is_touched(tmp_path: Path) -> None:
    run_distributed(_save_two, 2, str(tmp_path / "good"))
    run_distributed(_save_two, 3, str(tmp_path / "three"))
    for name, (damage, words) in DAMAGE.items():
        shutil.copytree(tmp_path / "good", tmp_path / name)
        damage(tmp_path / name / "step-2")
        problems = fs.verify_checkpoint(tmp_path / name / "step-2")
        assert problems, name
        assert words in problems[0]
        assert fs.verify_checkpoint(tmp_path / name / "step-1") == [], name
    run_distributed(_load_damaged, 2, str(tmp_path), list(DAMAGE))
    sound = {info.step: info.sound for info in fs.find_checkpoints(tmp_path / "cut short")}
    assert sound == {1: True, 2: False}


def _rejected_loads(root: str, model: Any, optimizer: Any) -> None:
    before = everything(model, optimizer)
    for other, message in (
        (make_model(1, {}, wrap=False), r"not in it \(model.embed.*are not the model's \(count"),
        (make_model(1, {}, family="qwen2"), r"lm_head.weight is tied to \S+ in the checkpoint but not"),
        (make_model(1, None).bfloat16(), r"is torch.float32 .*, the model's is torch.bfloat16"),
    ):
        untouched = everything(other)
        with pytest.raises(fs.CheckpointMismatchError, match=message):
            fs.load_checkpoint(root, model=other)
        assert_same(everything(other), untouched)
    with torch.device("meta"), pytest.raises(fs.CheckpointMismatchError, match="of another model"):
        fs.load_checkpoint(root, model=nn.Linear(2, 2))
    for absent in ("nothing", "step-77"):
        with pytest.raises(fs.CheckpointNotFoundError):
            fs.load_checkpoint(f"{root}/{absent}", model=model)
    other_root = f"{root}-of-rank-{this_rank()}"
    with pytest.raises(fs.CheckpointError, match=r"told to load different things: .*of-rank-0.*of-rank-1"):
        fs.load_checkpoint(other_root, model=model)
    assert_same(everything(model, optimizer), before)


def _rejected_saves(root: str, model: Any) -> None:
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"step": 1}, fs.CheckpointExistsError, "never overwritten"),
        ({"step": -1}, ValueError, "step must be"),
        ({"step": 5, "keep_last": 0}, ValueError, "keep_last"),
        (
            {"step": 5, "keep_last": 2.0},
            ValueError,
            r"keep_last \(None keeps every step\) must be an integer",
        ),
        ({"step": 5, "keep_last": 1, "keep_best": -1}, ValueError, "keep_best must be an integer, 0 or more"),
        (
            {"step": 5, "train_state": {"a": [{"b": torch.ones(2000)}]}},
            TypeError,
            r"train_state\['a'\]\[0\]\['b'\]",
        ),
        ({"step": 5, "rank_state": {"f": {1, 2}}}, TypeError, r"rank_state\['f'\] is a set"),
        (
            {"step": 5, "rank_state": [next(model.parameters())]},
            TypeError,
            r"part alone \(DTensor.to_local\)",
        ),
        ({"step": 5 + this_rank()}, fs.CheckpointError, "different things"),
        ({"step": 5, "metric": float(this_rank())}, fs.CheckpointError, "different things"),
    ]
    for arguments, kind, message in bad:
        with pytest.raises(kind, match=message):
            fs.save_checkpoint(root, model=model, **arguments)
    assert [info.step for info in fs.find_checkpoints(root)] == [1]


def _failing_write(root: str, model: Any, optimizer: Any) -> None:
    """One rank cannot write, at several places: all raise, nothing is left, the old step stands."""

    def full_disk(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    for rank, module, name in (
        (1, disk, "write_at"),
        (1, folder, "write_tensors"),
        (0, folder, "write_bytes"),
        (0, folder, "sync_folder"),
        (0, disk, "sync_folder"),
        (0, os, "rename"),
        (1, os, "fsync"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if this_rank() == rank:
                patch.setattr(module, name, full_disk)
            with pytest.raises(OSError, match="No space left") as error:
                fs.save_checkpoint(root, 2, model=model, optimizer=optimizer)
            assert error.value.errno == 28
            assert f"rank {rank} failed first" in "".join(error.value.__notes__)
        torch.distributed.barrier()
        assert _names(root) == ["step-1"], (rank, name)
        torch.distributed.barrier()
    assert fs.verify_checkpoint(f"{root}/step-1") == []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "_VISIBLE_SECONDS", 0.1)
        if this_rank() == 1:
            patch.setattr(Path, "is_dir", lambda self: False)
        with pytest.raises(fs.CheckpointError, match="shared file system"):
            fs.save_checkpoint(root, 2, model=model)


def _retention(root: str, model: Any) -> None:
    if this_rank() == 0:
        os.makedirs(f"{root}/.tmp-step-9-{'0123abcd' * 4}/model")
    for step in (2, 3):
        fs.save_checkpoint(root, step, model=model, keep_last=2)
    torch.distributed.barrier()
    assert _names(root) == ["step-2", "step-3"]
    torch.distributed.barrier()
    if this_rank() == 0:
        _flip(Path(root, "step-3", FIRST), -5)
        Path(root, "step-2", FIRST).unlink()
    fs.save_checkpoint(root, 3, model=model, keep_last=2)  # replaces the unsound one
    torch.distributed.barrier()
    assert [name[:16] for name in _names(root)] == [".unsound-step-3-", "step-2", "step-3"]
    fs.save_checkpoint(root, 4, model=model, keep_last=2)
    torch.distributed.barrier()
    assert [(i.step, i.sound) for i in fs.find_checkpoints(root)] == [(2, False), (3, True), (4, True)]


@on_ranks(2)
def test_saving(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    model = make_model(1, {})
    optimizer = make_adamw(model)
    train(model, optimizer, 0, 1)
    with pytest.raises(fs.CheckpointNotFoundError):
        fs.load_checkpoint(root, model=model)
    saved = fs.save_checkpoint(root, 1, model=model, optimizer=optimizer)
    saved.wait()
    assert saved.path == Path(root, "step-1")
    expected = everything(model, optimizer)
    for state in optimizer.state.values():
        state["step"].zero_()
    loaded = fs.load_checkpoint(saved.path, model=model, optimizer=optimizer)
    assert (loaded.train_state, loaded.rank_state) == (None, None)
    assert_same(everything(model, optimizer), expected)
    wrapped = torch.compile(make_model(3, None), backend="eager")  # puts _orig_mod. into every name
    fs.load_checkpoint(root, model=wrapped)
    assert_same(everything(wrapped._orig_mod), {k: v for k, v in expected.items() if k.startswith("model/")})
    _rejected_loads(root, model, optimizer)
    _rejected_saves(root, model)
    _failing_write(root, model, optimizer)
    _retention(root, model)


def _alike(root: str, load: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    fs.shard_model(model, mesh=mesh_here(), blocks={})
    if not load:
        fs.save_checkpoint(root, 1, model=model)
        return
    before = everything(model)
    with pytest.raises(fs.CheckpointCorruptError, match="is of another rank"):
        fs.load_checkpoint(f"{root}/step-1", model=model, verify=False)
    assert_same(everything(model), before)


def test_swapped_files_are_found_without_checksums(tmp_path: Path) -> None:
    """Files with the same tensors in them: each says whose it is."""
    run_distributed(_alike, 4, str(tmp_path), False)
    step = tmp_path / "step-1"
    _swap(step, SECOND, "shards/00002.safetensors")
    # As if they had been of one size.
    sign(step, lambda raw: raw["files"].insert(1, raw["files"].pop(2)))
    run_distributed(_alike, 4, str(tmp_path), True)
