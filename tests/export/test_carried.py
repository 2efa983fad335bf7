"""What an export takes over from its source: code, and no reference into the void."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

import fsdp_sft as fs
from tests.harness.hf_folders import save_tiny
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
