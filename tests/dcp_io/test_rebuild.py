"""A manifest that is lost or damaged, made again from the files; and what must not be made whole."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft import dcp_io
from fsdp_sft.dcp_io.rebuild import rebuild_manifest
from tests.faults.hostile import other_index
from tests.harness.device import mesh_here
from tests.harness.ranks import run_distributed
from tests.harness.trained import assert_same, everything, make_adamw, make_model, train


def _save(root: str, mesh: Any) -> None:
    fs.init_distributed()
    model = make_model(1, mesh)
    optimizer = make_adamw(model)
    for step in (1, 2):
        train(model, optimizer, step, 1)
        fs.save_checkpoint(
            root,
            step,
            model=model,
            optimizer=optimizer,
            train_state={"epoch": step},
            rank_state={"rows": torch.arange(3)},
            metric=0.5,
        )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of four ranks, two replicas of two shards."""
    root = tmp_path_factory.mktemp("saved")
    run_distributed(_save, 4, str(root), {"dp_replicate": 2})
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(saved, tmp_path / "root")
    return tmp_path / "root"


def _load(root: str) -> None:
    fs.init_distributed()
    models = [make_model(seed, {}) for seed in (4, 5)]
    optimizers = [make_adamw(model) for model in models]
    loaded = fs.load_checkpoint(f"{root}/step-2", model=models[0], optimizer=optimizers[0])
    assert loaded.train_state == {"epoch": 2}
    fs.load_checkpoint(f"{root}/intact", model=models[1], optimizer=optimizers[1])
    assert_same(everything(models[0], optimizers[0]), everything(models[1], optimizers[1]))


@pytest.mark.parametrize("lost", [("MANIFEST.json",), ("MANIFEST.json", "INDEX.json")])
@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_it_is_byte_for_byte_what_it_was(root: Path, lost: tuple[str, ...], how: str) -> None:
    step = root / "step-2"
    shutil.copytree(step, root / "intact")
    expected = {name: (step / name).read_bytes() for name in ("MANIFEST.json", "INDEX.json")}
    for name in lost:
        if how == "gone":
            (step / name).unlink()
        else:
            (step / name).write_bytes(expected[name][: len(expected[name]) // 2])
    assert dcp_io.verify_checkpoint(step)
    assert rebuild_manifest(step) == ("INDEX.json" not in lost)
    assert {name: (step / name).read_bytes() for name in expected} == expected
    assert dcp_io.verify_checkpoint(step) == []
    run_distributed(_load, 2, str(root))


def test_a_sound_manifest_is_left_alone(root: Path) -> None:
    with pytest.raises(fs.CheckpointExistsError, match="nothing to rebuild"):
        rebuild_manifest(root / "step-2")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def _of_the_other_step(step: Path, name: str) -> None:
    shutil.copy(step.parent / "step-1" / "shards" / name, step / "shards" / name)


def _make_link(step: Path) -> None:
    (step / "train_state.json").rename(step.parent / "elsewhere")
    (step / "train_state.json").symlink_to(step.parent / "elsewhere")


def _edited(key: str, old: str, new: str) -> Callable[[Path], None]:
    """Another text in the metadata of rank 0's file."""

    def edit(step: Path) -> None:
        path = step / "shards/00000.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert old in header["__metadata__"][key]
        header["__metadata__"][key] = header["__metadata__"][key].replace(old, new, 1)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return edit


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "rank 0's file gone": (lambda s: (s / "shards/00000.safetensors").unlink(), "is missing"),
    "another file gone": (lambda s: (s / "shards/00002.safetensors").unlink(), "INDEX.json says|is missing"),
    "a file of another step": (
        lambda s: _of_the_other_step(s, "00001.safetensors"),
        "INDEX.json says|another rank or checkpoint",
    ),
    "two files swapped": (
        lambda s: shutil.copy(s / "shards/00001.safetensors", s / "shards/00003.safetensors"),
        "INDEX.json says|another rank or checkpoint",
    ),
    "its train state gone": (lambda s: (s / "train_state.json").unlink(), "INDEX.json says|is missing"),
    "its train state edited": (lambda s: (s / "train_state.json").write_text("{}"), "have changed"),
    "its train state a link": (_make_link, "INDEX.json says|cannot be read"),
    "a version of no release": (
        _edited("fsdp_sft_manifest", '"version":3', '"version":3.5'),
        "INDEX.json says|format is version",
    ),
    "a step without end": (_edited("fsdp_sft_manifest", '"step":2', '"step":1e999'), "another kind"),
    "a rank without end": (
        _edited("fsdp_sft", '"rank":0', '"rank":1e999'),
        "INDEX.json says|does not say what it is",
    ),
    "a copy without bottom": (_edited("fsdp_sft_manifest", "{", "[" * 100_000 + "{"), "another kind"),
    "a file cut short": (lambda s: (s / "shards/00003.safetensors").write_bytes(b"x" * 99), "cannot be read"),
}


@pytest.mark.parametrize("index", ["with the index", "without"])
@pytest.mark.parametrize("name", DAMAGE)
def test_what_lacks_more_than_the_manifest_is_refused(root: Path, name: str, index: str) -> None:
    step = root / "step-2"
    damage, message = DAMAGE[name]
    damage(step)
    (step / "MANIFEST.json").unlink()
    if index == "without":
        (step / "INDEX.json").unlink()
    before = sorted(path.name for path in step.iterdir())
    with pytest.raises(fs.CheckpointCorruptError, match=message):
        rebuild_manifest(step)
    assert sorted(path.name for path in step.iterdir()) == before


def test_other_files_beside_the_shards_do_not_matter(root: Path) -> None:
    step = root / "step-2"
    (step / "shards" / "notes.safetensors").touch()
    (step / "MANIFEST.json").unlink()
    assert rebuild_manifest(step)


def _alike(root: str, load: bool) -> None:
    fs.init_distributed()
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
    names = [f"shards/{rank:05d}.safetensors" for rank in (1, 2)]
    contents = [(step / name).read_bytes() for name in names]
    for name, data in zip(names, contents[::-1], strict=True):
        (step / name).write_bytes(data)
    index = json.loads((step / "INDEX.json").read_text())
    index[names[0]], index[names[1]] = index[names[1]], index[names[0]]  # as if they had been of one size
    other_index(step, json.dumps(index, sort_keys=True, separators=(",", ":")).encode())
    run_distributed(_alike, 4, str(tmp_path), True)


def test_an_index_of_no_sizes_is_none(root: Path) -> None:
    step = root / "step-2"
    index = json.loads((step / "INDEX.json").read_text())
    text = json.dumps({name: [1e999, digest] for name, (_, digest) in index.items()})
    (step / "INDEX.json").write_text(text)
    (step / "MANIFEST.json").unlink()
    assert not rebuild_manifest(step)
    assert dcp_io.verify_checkpoint(step) == []


def test_a_flipped_bit_is_told_by_the_index(root: Path) -> None:
    step = root / "step-2"
    _flip(step / "shards/00001.safetensors")
    (step / "MANIFEST.json").unlink()
    with pytest.raises(fs.CheckpointCorruptError, match=r"not what INDEX\.json says"):
        rebuild_manifest(step)


def test_older_formats_cannot_be_rebuilt(tmp_path: Path) -> None:
    old = Path(__file__).parent / "data" / "version-1" / "step-3"
    shutil.copytree(old, tmp_path / "step-3")
    (tmp_path / "step-3" / "MANIFEST.json").unlink()
    for path in (tmp_path / "step-3", tmp_path, tmp_path / "nothing"):
        with pytest.raises(fs.CheckpointNotFoundError, match="no step of format version 3"):
            rebuild_manifest(path)
