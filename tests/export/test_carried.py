"""What an export takes over from its source: processor files and code, and no reference into the void."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fsdp_sft as fs
from tests.harness.hf_folders import save_tiny
from tests.harness.models import tiny_model
from tests.harness.quantised_folders import configure
from tests.harness.ranks import run_distributed
from tests.harness.remote_code import keep_code_in, plain_with_code, save_with_code


def _config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _export_with_code(folder: Path, modules: Path, out: Path) -> None:
    keep_code_in(modules)
    model = plain_with_code(folder)
    fs.check_export(out, model=model)
    fs.export_hf(model, out, dtype=None)
    assert _config_of(out)["auto_map"] == _config_of(folder)["auto_map"]
    read = plain_with_code(out)
    ids = torch.arange(3, 21).view(2, 9)
    assert torch.equal(read(input_ids=ids).logits, model(input_ids=ids).logits)


def test_code_of_the_checkpoint_comes_along(tmp_path: Path) -> None:
    folder = save_with_code(tmp_path / "model")
    run_distributed(_export_with_code, 1, folder, tmp_path / "modules", tmp_path / "out")


def test_an_auto_map_names_nothing_that_is_not_there(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    references = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "someone/model--modeling_own.OwnForCausalLM",
        "AutoTokenizer": ["tokenization_own.OwnTokenizer", None],
    }
    configure(tmp_path / "model", auto_map=references)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    out = fs.export_hf(model, tmp_path / "out")
    assert _config_of(out)["auto_map"] == {
        "AutoModelForCausalLM": "someone/model--modeling_own.OwnForCausalLM"
    }


def test_files_of_the_processor_come_along(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model")
    for name in ("preprocessor_config.json", "processor_config.json", "notes.json"):
        (source / name).write_text(json.dumps({"from": name}))
    model: Any = fs.build_meta_model(source)
    fs.load_weights(model, source)
    out = fs.export_hf(model, tmp_path / "out")
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (out / name).read_text() == (source / name).read_text()
    assert not (out / "notes.json").exists()


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model")
    (tmp_path / "secret.json").write_text("{}")
    (source / "processor_config.json").symlink_to(tmp_path / "secret.json")
    model = transformers.LlamaForCausalLM.from_pretrained(source)
    with pytest.warns(UserWarning, match=r"processor_config\.json.*it is not copied into the export"):
        out = fs.export_hf(model, tmp_path / "out")
    assert not (out / "processor_config.json").exists()
    assert (out / "config.json").exists()


def test_a_model_of_another_kind_or_from_nowhere_takes_nothing(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "model")
    (source / "processor_config.json").write_text("{}")
    configure(source, model_type="qwen2")
    for number, name in enumerate([str(source), "", "no/such/name", "someone/never-cached"]):
        model = tiny_model("llama")
        model.config.name_or_path = name
        out = fs.export_hf(model, tmp_path / f"out{number}")
        assert not (out / "processor_config.json").exists()
