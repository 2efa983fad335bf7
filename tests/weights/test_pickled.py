"""Pickled checkpoints: refused unless asked for, then read by position; nothing in them is ever run."""

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from fsdp_sft._tensors.torch_file import read_pickled
from fsdp_sft.weights import CheckpointFormatError, build_meta_model, load_weights
from fsdp_sft.weights.resolve import open_checkpoint, resolve_folder
from tests.harness.composed import composed
from tests.harness.device import mesh_here
from tests.harness.hf_folders import difference, plain, save_tiny, tensors_of
from tests.harness.hub_server import serve, use_hub
from tests.harness.ranks import run_distributed


def _pickled(folder: Path, family: str = "llama", *, files: int = 1, **sizes: int) -> Path:
    """A checkpoint as old versions of transformers wrote it: ``torch.save``, tied names sharing storages."""
    save_tiny(folder, family, **sizes)
    tensors = tensors_of(folder)
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    if family == "qwen2-tied":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    if files == 1:
        torch.save(OrderedDict(tensors), folder / "pytorch_model.bin")
        return folder
    weight_map = {name: f"pytorch_model-{i % files}.bin" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        torch.save({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "pytorch_model.bin.index.json").write_text(index)
    return folder


def _check_loads(folder: Path, families: list[str]) -> None:
    mesh = mesh_here()
    for family in families:
        oracle = plain(folder / family)
        model = build_meta_model(folder / family, allow_pickle=True)
        fs.shard_model(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
        report = load_weights(model, folder / family, allow_pickle=True)
        assert difference(model, oracle) == [], family
        assert report.job_bytes_read <= 1.05 * report.checkpoint_bytes
        model = composed(folder / family, mesh=mesh, allow_pickle=True)
        assert difference(model, oracle) == [], family


def test_bitwise_what_from_pretrained_loads(tmp_path: Path) -> None:
    families = ["llama", "qwen2-tied", "mixtral", "gpt2"]
    for number, family in enumerate(families):
        _pickled(tmp_path / family, family, files=1 + number % 2)
    run_distributed(_check_loads, 2, tmp_path, families)


def test_refused_unless_asked_for(tmp_path: Path) -> None:
    for files in (1, 2):
        folder = _pickled(tmp_path / str(files), files=files)
        for load in (lambda f: open_checkpoint(f), lambda f: load_weights(build_meta_model(f), f)):
            with pytest.raises(CheckpointFormatError, match="allow_pickle=True"):
                load(folder)


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    assert all(
        path.suffix == ".safetensors" for path in open_checkpoint(folder, allow_pickle=True).file_bytes
    )


class _Opens:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


class _Executes(_Opens):
    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.mark)!r}, 'w')",)


class _InAnItem(_Opens):
    """A class that every state dict may name, with an item that none should have."""

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter([("key", _Executes(self.mark))])


@pytest.mark.parametrize("kind", [_Opens, _Executes, _InAnItem])
@pytest.mark.parametrize("place", ["the whole file", "a value", "a list"])
def test_a_pickle_that_wants_to_run_code(
    tmp_path: Path, kind: type[_Opens], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _pickled(tmp_path)
    path, mark = folder / "pytorch_model.bin", tmp_path / "the code ran"
    payload = kind(mark)
    contents: dict[str, Any] = {
        "the whole file": payload,
        "a value": {"model.norm.weight": payload},
        "a list": {"model.norm.weight": [torch.zeros(1), payload]},
    }
    torch.save(contents[place], path)
    torch.load(path, weights_only=False)
    assert mark.exists(), "the payload does nothing, so the test would show nothing"
    mark.unlink()
    # What torch takes from the environment must not open the door again.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    model = build_meta_model(folder, allow_pickle=True)
    with pytest.raises(CheckpointFormatError, match="more than tensors, and was not run"):
        load_weights(model, folder, allow_pickle=True)
    path.write_bytes(pickle.dumps(contents[place]))  # as formats before the archive: code from the first byte
    with pytest.raises(CheckpointFormatError, match="not a zip archive"):
        load_weights(model, folder, allow_pickle=True)
    assert not mark.exists()


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def _without_tail(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _legacy(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    torch.save(state, path, _use_new_zipfile_serialization=False)


def _rezipped(path: Path, **changes: Any) -> None:
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    root = next(iter(records)).partition("/")[0]
    compression = changes.pop("compression", zipfile.ZIP_STORED)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, changes.get(name.removeprefix(root + "/"), data))


def _compressed(path: Path) -> None:
    _rezipped(path, compression=zipfile.ZIP_DEFLATED)


def _big_endian(path: Path) -> None:
    _rezipped(path, byteorder=b"big")


def _short_record(path: Path) -> None:
    _rezipped(path, **{"data/3": b"too little"})


def _transposed(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    state["model.layers.0.self_attn.q_proj.weight"] = state["model.layers.0.self_attn.q_proj.weight"].t()
    torch.save(state, path)


def _expanded(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    state["model.norm.weight"] = torch.ones(1).expand(32)
    torch.save(state, path)


def _sparse(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    state["lm_head.weight"] = state["lm_head.weight"].float().to_sparse()
    torch.save(state, path)


def _complex(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    state["model.norm.weight"] = torch.ones(32, dtype=torch.complex128)
    torch.save(state, path)


def _negated(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    state["model.norm.weight"] = torch.ones(32, dtype=torch.complex64).conj().imag
    torch.save(state, path)


def _nested(path: Path) -> None:
    torch.save({"state_dict": torch.load(path, weights_only=True), "epoch": 3}, path)


def _a_list(path: Path) -> None:
    torch.save([torch.zeros(3)], path)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (_truncated, "cannot be used"),
    (_without_tail, "cannot be used"),
    (_empty, "not a zip archive"),
    (_legacy, "before torch 1.6"),
    (_compressed, "compressed"),
    (_big_endian, "big-endian"),
    (_short_record, "outside of the archive"),
    (_expanded, "of its own"),
    (_sparse, "of its own|of meta tensor"),  # torch 2.15 refuses to load it without data
    (_complex, "stored as torch.complex128"),
    (_negated, "of its own"),
    (_nested, "'state_dict' is OrderedDict, not a tensor"),
    (_a_list, "list, not a dictionary"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=lambda value: getattr(value, "__name__", "")[1:])
def test_what_cannot_be_read_by_position(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    folder = _pickled(tmp_path)
    damage(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointFormatError, match=words):
        load_weights(build_meta_model(folder), folder, allow_pickle=True)


def test_a_tensor_that_is_stored_transposed(tmp_path: Path) -> None:
    folder = _pickled(tmp_path, hidden_size=1024, num_attention_heads=8, num_key_value_heads=8)
    expected = torch.load(folder / "pytorch_model.bin", weights_only=True)
    _transposed(folder / "pytorch_model.bin")
    name = "model.layers.0.self_attn.q_proj.weight"
    model = build_meta_model(folder)
    report = load_weights(model, folder, allow_pickle=True)
    assert torch.equal(model.get_parameter(name), expected[name].t().float())
    assert report.class_bytes["region"] == expected[name].nbytes


def test_an_archive_that_others_wrote(tmp_path: Path) -> None:
    """Places are those of the archive's records, and not those at which torch would have put them."""
    folder = _pickled(tmp_path)
    oracle = plain(folder)
    _rezipped(folder / "pytorch_model.bin")
    model = build_meta_model(folder, dtype=torch.float32)
    load_weights(model, folder, allow_pickle=True)
    assert difference(model, oracle) == []


def test_views_of_one_storage_scalars_and_nothing_at_all(tmp_path: Path) -> None:
    base = torch.randn(6, 5)
    state = {
        "first": base[:2],
        "rest": base[2:],
        "again": base,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "bools": torch.tensor([True, False]),
        "half": torch.randn(3).half(),
    }
    torch.save(state, tmp_path / "file.bin")
    header = read_pickled(tmp_path / "file.bin")
    stored = (tmp_path / "file.bin").read_bytes()
    assert header.entries.keys() == state.keys()
    for name, entry in header.entries.items():
        raw = bytearray(stored[entry.start : entry.end])
        found = torch.frombuffer(raw, dtype=entry.dtype) if raw else torch.empty(0, dtype=entry.dtype)
        assert torch.equal(found.view(entry.shape), state[name]), name


def test_an_index_of_pickles_names_pickles_in_its_folder(tmp_path: Path) -> None:
    for name, words in (("../pytorch_model-0.bin", "leads out"), ("model.safetensors", "not a .bin")):
        folder = _pickled(tmp_path / name[-3:], files=2)
        path = folder / "pytorch_model.bin.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["model.norm.weight"] = name
        path.write_text(json.dumps(index))
        with pytest.raises(CheckpointFormatError, match=words):
            open_checkpoint(folder, allow_pickle=True)


def _check_all_ranks_refuse(folder: Path) -> None:
    mine = folder / ("sound" if dist.get_rank() == 0 else "damaged")
    model = build_meta_model(mine)
    with pytest.raises(CheckpointFormatError, match="cannot be used"):
        load_weights(model, mine, allow_pickle=True)


def test_one_rank_whose_file_is_damaged(tmp_path: Path) -> None:
    _pickled(tmp_path / "sound")
    _truncated(_pickled(tmp_path / "damaged") / "pytorch_model.bin")
    run_distributed(_check_all_ranks_refuse, 2, tmp_path)


def _check_hub(address: str, cache: Path, folder: Path) -> None:
    use_hub(address, cache)
    with pytest.raises(CheckpointFormatError, match="neither model"):
        resolve_folder("someone/model")
    assert not list(cache.rglob("*.bin"))
    found = resolve_folder("someone/model", allow_pickle=True)
    model = build_meta_model(found)
    load_weights(model, found, allow_pickle=True)
    assert difference(model, plain(folder)) == []


@pytest.mark.parametrize("files", [1, 2])
def test_from_the_hub(tmp_path: Path, files: int) -> None:
    folder = _pickled(tmp_path / "model", files=files)
    (folder / "optimizer.bin").write_bytes(b"not to be downloaded")
    with serve(folder, drops=0) as (address, downloads):
        run_distributed(_check_hub, 2, address, tmp_path / "cache", folder)
    assert "optimizer.bin" not in {name for name, _ in downloads}
    assert sum(name.endswith(".bin") for name, _ in downloads) == files
