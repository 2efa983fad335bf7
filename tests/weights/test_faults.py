"""Damaged, unsafe and unfitting checkpoints: one typed error on all ranks, soon; and oddities that load."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from tests.harness.hf_folders import difference, loaded, plain, rewrite, save_tiny, tensors_of
from tests.harness.ranks import mesh_here, run_distributed


def _refused(folder: Path, what: str) -> str:
    """What a load that has to fail says; a bad disk is that of rank 1."""
    original = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        # Headers are read through a buffer of their own size; the shards through pieces.
        if what == "a disk that fails" and offset > 5000:
            raise OSError(5, "Input/output error")
        return 0 if what == "a disk that ends early" and offset > 5000 else original(fd, buffers, offset)

    model = fs.shard_model(fs.build_meta_model(folder), mesh=mesh_here())
    dist.barrier()
    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(os, "preadv", preadv)
        with pytest.raises(fs.CheckpointFormatError) as caught:
            fs.load_weights(model, folder)
    assert type(caught.value) is fs.CheckpointFormatError
    assert time.monotonic() - started < 10
    return str(caught.value)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _edit_index(folder: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def _without_weights(folder: Path) -> None:
    for path in [*_files(folder), *folder.glob("*.index.json")]:
        path.unlink()


def _pickled(folder: Path) -> None:
    tensors = tensors_of(folder)
    _without_weights(folder)
    torch.save(tensors, folder / "pytorch_model.bin")


def _a_name_too_many(folder: Path) -> None:
    _edit_index(folder, lambda names: names.update({"model.ghost": next(iter(names.values()))}))


def _led_out(folder: Path, name: str) -> None:
    (folder.parent / "outside.safetensors").write_bytes(_files(folder)[0].read_bytes())
    _edit_index(folder, lambda names: names.update(dict.fromkeys(list(names)[:1], name)))


def _not_fetched(folder: Path) -> None:
    victim = _files(folder)[0]
    victim.unlink()
    victim.symlink_to(folder.parent / "annex" / "object")


Q_PROJ, UP_PROJ, DOWN_PROJ = (
    f"model.layers.1.{name}.weight" for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
)


def _changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = tensors_of(folder)
    change(tensors)
    rewrite(folder, tensors)


# What is done to a folder, and what the load then says.
DAMAGES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "a truncated file": (
        lambda f: os.truncate(_files(f)[1], _files(f)[1].stat().st_size - 10),
        ("model-00002-of-", "damaged"),
    ),
    "a missing file": (lambda f: _files(f)[1].unlink(), ("complete",)),
    "no weights": (_without_weights, ("model.safetensors.index.json", "config.json")),
    "pickled weights": (_pickled, ("Pickled weights", "save_pretrained")),
    "another shape": (
        lambda f: _changed(f, lambda t: t.update({Q_PROJ: torch.cat([t[Q_PROJ], t[Q_PROJ][:1]])})),
        (Q_PROJ, "(33, 32)", "(32, 32)"),
    ),
    "an index with a name too many": (_a_name_too_many, ("model.ghost",)),
    "a path up": (lambda f: _led_out(f, "../outside.safetensors"), ("leads out",)),
    "a path from the root": (lambda f: _led_out(f, "/etc/outside.safetensors"), ("leads out",)),
    "a path down and up": (lambda f: _led_out(f, "a/../../b.safetensors"), ("leads out",)),
    "a link to what was not fetched": (_not_fetched, ("cannot be opened", "complete")),
    "a missing key": (lambda f: _changed(f, lambda t: t.pop(UP_PROJ)), (UP_PROJ, "initialise")),
    "a key too many": (
        lambda f: _changed(f, lambda t: t.update({"model.extra": t[UP_PROJ]})),
        ("model.extra", "ignore"),
    ),
    "integers": (
        lambda f: _changed(f, lambda t: t.update({DOWN_PROJ: t[DOWN_PROJ].to(torch.int8)})),
        (DOWN_PROJ, "quantised"),
    ),
    "a disk that fails": (lambda f: None, ("Input/output error", "cannot be read")),
    "a disk that ends early": (lambda f: None, ("ends at byte",)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_one_error_on_all_ranks_and_soon(name: str, saved: Path) -> None:
    damage, words = DAMAGES[name]
    damage(saved)
    first, second = run_distributed(_refused, 2, saved, name)
    for message in (first, second):
        assert all(word in message for word in words), message
    assert first == second or name.startswith("a disk")  # of which the other ranks are told


def _check_different_folders(folder: Path) -> None:
    model = fs.shard_model(fs.build_meta_model(folder / "a"), mesh=mesh_here())
    for other, words in (("b", "ranks differ in checkpoint="), ("absent", "on some ranks but not on")):
        with pytest.raises(ValueError, match=words):
            fs.load_weights(model, folder / ("a" if dist.get_rank() == 0 else other))


def test_ranks_that_see_different_checkpoints(tmp_path: Path) -> None:
    save_tiny(tmp_path / "a")
    save_tiny(tmp_path / "b", max_shard_size="15KB")
    run_distributed(_check_different_folders, 2, tmp_path)


def test_a_disk_that_returns_less_than_asked(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        return original(fd, [buffers[0][: max(1, len(buffers[0]) // 3)]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert difference(loaded(saved), plain(saved)) == []
