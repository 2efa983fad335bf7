"""Where an export goes, and whether it reads back as trained: told before training, if it is asked then."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fsdp_sft as fs
from fsdp_sft.export import target as target_module
from tests.harness.hf_folders import save_tiny, tensors_of
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.packs import assert_same
from tests.harness.quantised_folders import fp8_experts_folder, fp8_folder, mxfp4_folder
from tests.harness.ranks import mesh_here, on_ranks


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _loads(folder: Path, model: Any) -> bool:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
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


# --- what would not read back as it was trained, and what was quantised, edited or put in -----------------

DEQUANTISED = {
    "fp8": (fp8_folder, "LlamaForCausalLM", "FineGrainedFP8Config"),
    "experts in fp8": (fp8_experts_folder, "MixtralForCausalLM", "FineGrainedFP8Config"),
    "mxfp4": (mxfp4_folder, "GptOssForCausalLM", "Mxfp4Config"),
}


@pytest.mark.parametrize("kind", DEQUANTISED)
def test_what_transformers_dequantised_is_exported_in_16_bits(kind: str, tmp_path: Path) -> None:
    write, cls, settings = DEQUANTISED[kind]
    write(tmp_path / "stored")
    config = getattr(transformers, settings)(dequantize=True)
    model = getattr(transformers, cls).from_pretrained(
        tmp_path / "stored", quantization_config=config, dtype=torch.bfloat16
    )
    fs.check_export(tmp_path / "out", model=model)
    folder = fs.export_hf(model, tmp_path / "out")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    read, info = getattr(transformers, cls).from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(model.state_dict(), read.state_dict())
    assert fs.build_meta_model(folder).state_dict().keys() == model.state_dict().keys()


@pytest.fixture
def llama() -> Any:
    return tiny_model("llama")


class _Lora(nn.Module):
    """A layer of one's own, as many scripts write it, around the weight."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.base = inner
        self.down, self.up = nn.Linear(inner.in_features, 2), nn.Linear(2, inner.out_features)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


def _around(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = _Lora(layer.self_attn.q_proj)


def _beside(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj.lora_a = nn.Parameter(torch.randn(2, 32))


def _wider(model: Any) -> None:
    model.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size + 3, bias=False)


PUT_IN = {
    _around: "no values for model.layers.0.self_attn.q_proj.weight",
    _beside: "no place for model.layers.0.self_attn.q_proj.lora_a",
    _wider: "'lm_head.weight' has shape",
}


@pytest.mark.parametrize("put_in", PUT_IN)
def test_parts_that_the_class_does_not_have_are_refused(put_in: Any, llama: Any, tmp_path: Path) -> None:
    put_in(llama)
    for call in (
        lambda: fs.check_export(tmp_path / "o", model=llama),
        lambda: fs.export_hf(llama, tmp_path / "o"),
    ):
        with pytest.raises(
            fs.UnsupportedModelError, match=f"not be read as it was trained: .*{PUT_IN[put_in]}"
        ):
            call()
    assert not list(tmp_path.iterdir())


def test_a_buffer_that_the_class_does_not_have_is_told(llama: Any, tmp_path: Path) -> None:
    llama.model.register_buffer("seen", torch.zeros(3))
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM does not read: model\.seen"):
        fs.export_hf(llama, tmp_path / "out")
    assert "model.seen" in tensors_of(tmp_path / "out")


def test_a_class_of_ones_own_passes_and_adapters_of_a_tied_head_do_not(tmp_path: Path) -> None:
    class WithValue(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.value = nn.Linear(config.hidden_size, 1)

    own = WithValue(tiny_model("llama").config)
    fs.check_export(tmp_path / "own", model=own)
    read = WithValue.from_pretrained(fs.export_hf(own, tmp_path / "own", dtype=None))
    assert torch.equal(read.value.weight, own.value.weight)
    peft = pytest.importorskip("peft")
    tied = fs.add_adapters(tiny_model("qwen2-tied"), peft.LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="tied to another"):
        fs.check_export(tmp_path / "tied", model=tied)


def test_weights_that_transformers_holds_quantised_are_refused(llama: Any, tmp_path: Path) -> None:
    # What bitsandbytes and FP8 on a GPU leave; neither runs here.
    llama.is_quantized = True
    llama.config.quantization_config = {"quant_method": "bitsandbytes"}
    for call in (
        lambda: fs.shard_model(llama, mesh=None),  # refused before the mesh is looked at
        lambda: fs.check_export(tmp_path / "out", model=llama),
        lambda: fs.export_hf(llama, tmp_path / "out"),
        lambda: fs.shard_model(nn.Sequential(llama), mesh=None),
    ):
        with pytest.raises(fs.UnsupportedModelError, match=r"quantised \(bitsandbytes\).*load_pretrained"):
            call()


def test_a_model_that_transformers_read_from_a_gguf_is_exported(llama: Any, tmp_path: Path) -> None:
    llama.is_quantized = True  # also of weights that were dequantised while they were read
    llama.config.quantization_config = {"quant_method": "gguf"}
    folder = fs.export_hf(llama, tmp_path / "out")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    llama.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.ones(4, dtype=torch.uint8), False)
    with pytest.raises(fs.UnsupportedModelError, match=r"quantised \(gguf\)"):
        fs.check_export(tmp_path / "packed", model=llama)


EDITED = {"rms_norm_eps": 0.1, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
AT_WILL = {"use_cache": True, "eos_token_id": 3, "attention_dropout": 0.1, "router_aux_loss_coef": 0.1}


def test_a_config_that_is_edited_after_the_model_was_built_is_named(llama: Any, tmp_path: Path) -> None:
    built: Any = fs.build_meta_model(save_tiny(tmp_path / "base"))
    fs.check_export(tmp_path / "out", model=llama)
    vars(llama.config).update(AT_WILL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.check_export(tmp_path / "out", model=llama)
    for each in (built, llama):
        vars(each.config).update(EDITED)
    for call in (
        lambda: fs.shard_model(built),  # which then fails, as no ranks have met
        lambda: fs.check_export(tmp_path / "out", model=llama),
        lambda: fs.train_step(llama, ragged_batches(1), torch.optim.SGD(llama.parameters(), lr=0.0)),
        lambda: fs.export_hf(llama, tmp_path / "out"),
    ):
        with suppress(RuntimeError), pytest.warns(UserWarning, match="^rms_norm_eps, rope_parameters of"):
            call()
