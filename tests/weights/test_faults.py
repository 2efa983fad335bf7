"""Damaged, unsafe and unfitting checkpoints: one typed error on all ranks, soon; and oddities that load."""

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from fsdp_sft import weights
from fsdp_sft.weights import build_meta_model, load_weights
from fsdp_sft.weights.resolve import resolve_folder
from tests.harness.device import mesh_here
from tests.harness.hf_folders import difference, plain, rewrite, save_tiny, tensors_of
from tests.harness.hub_server import COMMIT, serve, use_hub
from tests.harness.ranks import run_distributed

_SECONDS = 10


def _sharded(folder: Path) -> Any:
    model = build_meta_model(folder)
    return fs.shard_model(model, mesh=mesh_here())


def _try(folder: Path, kind: str, **options: Any) -> tuple[str, str, float]:
    model = _sharded(folder)
    dist.barrier()
    started = time.monotonic()
    with pytest.raises(getattr(weights, kind)) as caught:
        load_weights(model, folder, **options)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - started


def _expect(folder: Path, kind: str, *words: str, **options: Any) -> None:
    results = run_distributed(_try, 2, folder, kind, **options)
    for name, message, seconds in results:
        assert name == kind
        assert all(word in message for word in words), message
        assert seconds < _SECONDS
    assert results[0][1] == results[1][1]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _edit_index(folder: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def test_a_truncated_file(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    victim = _files(tmp_path)[1]
    os.truncate(victim, victim.stat().st_size - 10)
    _expect(tmp_path, "CheckpointFormatError", victim.name, "damaged")


def test_a_file_truncated_after_its_header_was_checked(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    _expect_injected(tmp_path, "end_early", "CheckpointFormatError", "ends at byte")


def test_a_missing_file(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    _files(tmp_path)[1].unlink()
    _expect(tmp_path, "CheckpointFormatError", "complete")


def test_no_weights_at_all(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    for path in [*_files(tmp_path), *tmp_path.glob("*.index.json")]:
        path.unlink()
    _expect(tmp_path, "CheckpointFormatError", "model.safetensors.index.json", "config.json")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    tensors = tensors_of(tmp_path)
    for path in [*_files(tmp_path), *tmp_path.glob("*.index.json")]:
        path.unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    _expect(tmp_path, "CheckpointFormatError", "pickled", "save_pretrained")


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    tensors = tensors_of(tmp_path)
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    assert tensors[name].shape == (33, 32)
    rewrite(tmp_path, tensors)
    _expect(tmp_path, "CheckpointFormatError", name, "(33, 32)", "(32, 32)")


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    victim = _files(tmp_path)[0]
    data = victim.read_bytes()
    victim.write_bytes(struct.pack("<Q", len(data)) + data[8:])
    _expect(tmp_path, "CheckpointFormatError", victim.name, "no safetensors file")


def test_an_index_that_names_an_absent_key(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    _edit_index(tmp_path, lambda names: names.update({"model.ghost": next(iter(names.values()))}))
    _expect(tmp_path, "CheckpointFormatError", "model.ghost")


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/outside.safetensors", "a/../../b.safetensors"]
)
def test_an_index_that_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = save_tiny(tmp_path / "inside")
    (tmp_path / "outside.safetensors").write_bytes(_files(folder)[0].read_bytes())
    _edit_index(folder, lambda names: names.update(dict.fromkeys(list(names)[:1], name)))
    _expect(folder, "CheckpointFormatError", "leads out")


def test_a_link_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "inside")
    victim = _files(folder)[0]
    victim.rename(tmp_path / "outside.safetensors")
    victim.symlink_to(tmp_path / "outside.safetensors")
    _expect(folder, "CheckpointFormatError", "leads out")


def test_missing_and_unexpected_keys(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    tensors = tensors_of(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    kept = tensors.pop(name)
    rewrite(tmp_path, tensors)
    _expect(tmp_path, "CheckpointFormatError", name, "initialise")
    rewrite(tmp_path, {**tensors, name: kept, "model.extra": kept})
    _expect(tmp_path, "CheckpointFormatError", "model.extra", "ignore")


def test_a_quantised_checkpoint(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    tensors = tensors_of(tmp_path)
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    rewrite(tmp_path, tensors)
    _expect(tmp_path, "CheckpointFormatError", name, "quantised")


def _try_injected(folder: Path, what: str, kind: str) -> tuple[str, str, float]:
    original = os.preadv
    armed = dist.get_rank() == 1

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        # Headers are read through a buffer of their own size; the shards through pieces.
        if armed and offset > 5000 and what == "fail":
            raise OSError(5, "Input/output error")
        if armed and offset > 5000 and what == "end_early":
            return 0
        return original(fd, buffers, offset)

    model = _sharded(folder)
    os.preadv = preadv
    try:
        dist.barrier()
        started = time.monotonic()
        with pytest.raises(getattr(weights, kind)) as caught:
            load_weights(model, folder)
        return type(caught.value).__name__, str(caught.value), time.monotonic() - started
    finally:
        os.preadv = original


def _expect_injected(folder: Path, what: str, kind: str, *words: str) -> None:
    results = run_distributed(_try_injected, 2, folder, what, kind)
    for name, message, seconds in results:
        assert name == kind
        assert all(word in message for word in words), message
        assert seconds < _SECONDS


def test_one_rank_whose_disk_fails(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    _expect_injected(tmp_path, "fail", "CheckpointFormatError", "Input/output error", "cannot be read")


def _check_different_folders(folder: Path) -> None:
    mine = folder / ("a" if dist.get_rank() == 0 else "b")
    model = _sharded(mine)
    with pytest.raises(weights.CheckpointFormatError, match="another checkpoint"):
        load_weights(model, mine)


def test_ranks_that_see_different_checkpoints(tmp_path: Path) -> None:
    save_tiny(tmp_path / "a")
    save_tiny(tmp_path / "b", max_shard_size="15KB")
    run_distributed(_check_different_folders, 2, tmp_path)


def _check_only_one_has_it(folder: Path) -> None:
    model = _sharded(folder / "a")
    with pytest.raises(weights.CheckpointFormatError, match="on some ranks but not on"):
        load_weights(model, folder / ("a" if dist.get_rank() == 0 else "b"))


def test_a_folder_that_one_node_lacks(tmp_path: Path) -> None:
    save_tiny(tmp_path / "a")
    run_distributed(_check_only_one_has_it, 2, tmp_path)


def _check_loads(folder: Path) -> None:
    model = _sharded(folder)
    load_weights(model, folder)
    assert difference(model, plain(folder)) == []


def test_a_stray_file_beside_is_not_looked_at(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    from safetensors.torch import save_file

    save_file({name: t * 0 for name, t in tensors_of(tmp_path).items()}, tmp_path / "adapter.safetensors")
    run_distributed(_check_loads, 2, tmp_path)


def _check_short_reads(folder: Path) -> None:
    original = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        return original(fd, [buffers[0][: max(1, len(buffers[0]) // 3)]], offset)

    os.preadv = preadv
    try:
        _check_loads(folder)
    finally:
        os.preadv = original


def test_a_disk_that_returns_less_than_asked(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    run_distributed(_check_short_reads, 2, tmp_path)


def test_arguments_out_of_range_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    model = build_meta_model(tmp_path)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"missing": "ignore"}, "missing"),
        ({"unexpected": "initialise"}, "unexpected"),
    ]
    for options, word in wrong:
        with pytest.raises(ValueError, match=word):
            load_weights(model, tmp_path, **options)
    with pytest.raises(TypeError, match="no_such_field"):
        build_meta_model(tmp_path, no_such_field=1)
    with pytest.raises(weights.CheckpointFormatError, match="no Hub id"):
        load_weights(model, tmp_path / "absent")


def _check_hub(address: str, cache: Path, shared: bool, folder: Path) -> str:
    own = cache if shared else cache / str(dist.get_rank())
    use_hub(address, own)
    found = resolve_folder("someone/model")
    model = build_meta_model(found)
    fs.shard_model(model, mesh=mesh_here())
    load_weights(model, found)
    assert difference(model, plain(folder)) == []
    return str(found)


@pytest.mark.parametrize("shared", [True, False])
def test_each_cache_gets_each_file_once(tmp_path: Path, shared: bool) -> None:
    folder = save_tiny(tmp_path / "model")
    (folder / "unrelated.safetensors").write_bytes(b"not to be downloaded")
    with serve(folder, drops=0) as (address, downloads):
        found = run_distributed(_check_hub, 2, address, tmp_path / "cache", shared, folder)
    assert all(path.endswith(COMMIT) for path in found)
    assert (len(set(found)) == 1) == shared
    weights_files = [name for name, _ in downloads if name.endswith(".safetensors")]
    assert "unrelated.safetensors" not in weights_files
    caches = 1 if shared else 2
    assert len(weights_files) == caches * (len(_files(folder)) - 1)


def _check_hub_error(address: str, cache: Path) -> str:
    use_hub(address, cache)
    with pytest.raises(Exception) as caught:  # whatever huggingface_hub raises, the same everywhere
        resolve_folder("someone/model")
    return type(caught.value).__name__


def test_a_repository_without_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with serve(folder, drops=0) as (address, _):
        names = run_distributed(_check_hub_error, 2, address, tmp_path / "cache")
    assert names == ["CheckpointFormatError"] * 2
