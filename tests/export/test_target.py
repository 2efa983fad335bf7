"""Where an export goes: told before training, and never a reason to lose a trained model."""

import errno
import hashlib
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import fsdp_sft as fs
from fsdp_sft.export import target as target_module
from tests.harness.models import tiny_model
from tests.harness.ranks import mesh_here, on_ranks


def _digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def _loads(folder: Path, model: Any) -> bool:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    return all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def _busy(folder: Path) -> None:
    """An ``output_dir`` as runs leave them."""
    (folder / "checkpoints" / "step-5").mkdir(parents=True)
    (folder / "checkpoints" / "step-5" / "MANIFEST.json").write_text("{}")
    (folder / "log.jsonl").write_text("{}\n")


def test_a_busy_folder_is_found_before_training(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert fs.check_export(out) == out
    assert not out.exists()
    _busy(out)
    with pytest.raises(
        fs.CheckpointExistsError, match=r"not an empty folder; choose another.*overwrite=True"
    ):
        fs.check_export(out)
    assert fs.check_export(out, overwrite=True) == out
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match=r"is not a folder; choose another name, or move it away$"):
        fs.check_export(tmp_path / "file", overwrite=True)
    with pytest.raises(PermissionError, match=r"file cannot be written to \(Not a directory\)"):
        fs.check_export(tmp_path / "file" / "below" / "it")


def test_a_place_that_may_not_be_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", options["dir"])

    if os.path.isdir("/proc/self"):  # where os.access says yes to root
        with pytest.raises(PermissionError, match="/proc cannot be written to"):
            fs.check_export("/proc/out")
    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(PermissionError, match=r"cannot be written to \(Read-only file system\)"):
        fs.check_export(tmp_path / "deep" / "er")


def test_a_full_disk_is_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, usage = tiny_model("llama"), shutil.disk_usage(tmp_path)
    need = sum(p.numel() * 2 for p in model.parameters())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=need))
    fs.check_export(tmp_path / "out", model=model)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=need - 1))
    fs.check_export(tmp_path / "out")
    for call in (fs.check_export, fs.export_hf):
        with pytest.raises(
            OSError, match=r"the export to .*out takes .* GiB and .* has .* GiB free"
        ) as found:
            call(out_dir=tmp_path / "out", model=model)
        assert found.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_a_folder_that_filled_meanwhile_costs_nothing(tmp_path: Path) -> None:
    model, out = tiny_model("llama", seed=3), tmp_path / "out"
    _busy(out)
    (tmp_path / "out-2").write_text("taken too")
    before = _digests(tmp_path)
    with pytest.warns(UserWarning, match=r"written to .*out-3\. check_export.*overwrite=True"):
        folder = fs.export_hf(model, out, dtype=None)
    assert folder == tmp_path / "out-3"
    assert _loads(folder, model)
    assert {name: d for name, d in _digests(tmp_path).items() if not name.startswith("out-3/")} == before


def test_where_a_file_system_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == out)
    with pytest.warns(UserWarning, match=r"mounted.*written to .*out/export"):
        assert fs.check_export(out) == out / "export"
    model = tiny_model("gpt2")
    with pytest.warns(UserWarning, match=r"mounted.*written to .*out/export"):
        assert fs.export_hf(model, out, dtype=None) == out / "export"
    assert _loads(out / "export", model)
    assert os.listdir(out) == ["export"]


def test_overwriting_replaces_an_earlier_export_and_nothing_else(tmp_path: Path) -> None:
    first, second, out = tiny_model("llama", seed=3), tiny_model("llama", seed=4), tmp_path / "out"
    _busy(out)
    kept = _digests(out)
    fs.export_hf(first, out, dtype=None, max_shard_size=20_000, overwrite=True)  # in many files
    (out / "adapter_config.json").write_text("{}")  # from_pretrained would look for a base model elsewhere
    assert fs.export_hf(second, out, dtype=None, overwrite=True) == out
    made = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert {name for name in os.listdir(out) if not (out / name).is_dir()} == made | {"log.jsonl"}
    assert _loads(out, second)
    assert {name: d for name, d in _digests(out).items() if name not in made} == kept
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("moves", range(2, 9))
def test_a_folder_in_which_an_exchange_failed_has_no_configuration(
    moves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, out = tiny_model("gpt2", seed=3), tiny_model("gpt2", seed=4), tmp_path / "out"
    fs.export_hf(first, out, dtype=None)
    rename, calls = os.rename, []

    def fails_once(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == moves:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(target_module.os, "rename", fails_once)
    with pytest.raises(OSError, match="Input/output error"):
        fs.export_hf(second, out, dtype=None, overwrite=True)
    monkeypatch.undo()
    assert not (out / "config.json").exists(), "nobody loads a mixture of two models"
    assert _loads(fs.export_hf(second, out, dtype=None, overwrite=True), second)
    assert os.listdir(tmp_path) == ["out"]


@on_ranks(2)
def test_ranks_go_to_one_place(tmp_path: Path) -> None:
    rank, out = torch.distributed.get_rank(), Path(tmp_path, "out")
    assert fs.check_export(out) == out
    model = fs.shard_model(tiny_model("llama", seed=3), mesh=mesh_here())
    torch.distributed.barrier()
    if rank == 0:
        _busy(out)
    torch.distributed.barrier()
    with pytest.raises(FileExistsError, match="not an empty folder"):
        fs.check_export(out)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert fs.export_hf(model, out) == Path(tmp_path, "out-2"), "the same on all ranks"
    assert len([w for w in caught if "written to" in str(w.message)]) == (rank == 0)
    assert fs.export_hf(model, out, overwrite=True) == out
