"""Configs and tokenizers of strangers: odd fields, and numbers that no model has."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import fsdp_sft as fs
from fsdp_sft._model.configs import config_of, tokenizer_of
from tests.harness.hf_folders import save_tiny

ODD: dict[str, dict[str, Any]] = {
    "ten million layers": {"num_hidden_layers": 10**7, "layer_types": None},
    "a billion labels": {"num_labels": 10**9},
    "a million layers further in": {"text_config": {"n_layer": 10**6}},
    "a text for a number": {"hidden_size": "abc"},
    "a number for a text": {"hidden_act": 3},
    "a fraction of a layer": {"num_hidden_layers": 2.5},
    "below zero": {"hidden_size": -3},
    "more than can be": {"hidden_size": 2**62},
    "a division by zero": {"num_attention_heads": 0},
    "positions of an unknown kind": {"rope_parameters": {"rope_type": "unknown"}},
    "positions as a list": {"rope_parameters": [1]},
    "many layers of an unknown kind": {"layer_types": ["unknown"] * 10**5},
    "an unknown activation": {"hidden_act": "unknown"},
    "an unknown dtype": {"dtype": "unknown"},
    "padding outside the vocabulary": {"pad_token_id": 10**9},
    "a list for a name": {"model_type": ["llama"]},
    "code as a number": {"auto_map": 7},
    "labels without numbers": {"id2label": {"first": 1}},
}


def _with(folder: Path, name: str, fields: Any) -> Path:
    path = folder / name
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **fields} if isinstance(fields, dict) else fields))
    return folder


@pytest.mark.parametrize("fields", ODD.values(), ids=ODD)
def test_an_odd_field_is_an_error_about_the_folder(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = _with(save_tiny(tmp_path), "config.json", fields)
    started = time.perf_counter()
    with pytest.raises(fs.CheckpointFormatError, match="config of ") as found:
        fs.build_meta_model(folder)
    assert str(folder) in str(found.value)
    assert len(str(found.value)) < 1000
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("generation_config", text) for text in ("[]", "{", '{"dtype": 7}', "\0")),
        *(("tokenizer", text) for text in ("[]", "{", '{"version": 1}', "\0")),
        ("tokenizer", '{"model": {"type": "BPE", "vocab": 3}}'),
    ],
)
def test_odd_settings_of_generation_or_of_a_tokenizer(name: str, text: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    (folder / f"{name}.json").write_text(text)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(fs.CheckpointFormatError, match=f"{name.removeprefix('generation_')} of "):
        (tokenizer_of if name == "tokenizer" else fs.build_meta_model)(folder)


@pytest.mark.parametrize("read", [config_of, tokenizer_of])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_pipe_among_the_settings(read: Callable[[Path], Any], name: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(fs.CheckpointFormatError, match="not a regular file"):
        read(folder)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(OSError(), fs.CheckpointNotFoundError), (fs.CheckpointFormatError("odd"), fs.CheckpointFormatError)],
)
def test_errors_of_the_hub(raised: Exception, seen: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a text, and one of a config that claims too much."""
    monkeypatch.setattr("fsdp_sft._model.configs.auto_config", Mock(side_effect=raised))
    with pytest.raises(seen):
        config_of("no/such-model")


def test_layers_as_many_as_models_have(tmp_path: Path) -> None:
    folder = _with(save_tiny(tmp_path), "config.json", {"num_hidden_layers": 200, "layer_types": None})
    assert fs.build_meta_model(folder).config.num_hidden_layers == 200


def test_a_model_under_another_name_is_read_as_told(tmp_path: Path) -> None:
    """Kimi-K2 is DeepSeek-V3 with code of its own; what its config says is no type of transformers'."""
    folder = save_tiny(tmp_path / "base", "llama")
    own = {"AutoModelForCausalLM": "modeling_other.LlamaForCausalLM"}
    for fields in ({}, {"auto_map": own}):
        _with(folder, "config.json", {"model_type": "other", **fields})
        for model_type, message in (
            (None, "does not recognize this architecture"),
            ("nothing", "knows no models of type 'nothing'"),
            ("mistral", "for models of type 'llama'"),
        ):
            with pytest.raises(fs.CheckpointFormatError, match=message):
                fs.build_meta_model(folder, model_type=model_type)
        model = fs.build_meta_model(folder, model_type="llama")
        assert (type(model).__name__, model.config.model_type) == ("LlamaForCausalLM", "llama")
    fs.load_weights(model, folder)
    fs.export_hf(model, tmp_path / "out", dtype=None)
    assert config_of(tmp_path / "out").model_type == "llama"
    _with(folder, "config.json", {"architectures": ["OtherForCausalLM"]})
    with pytest.raises(fs.CheckpointFormatError, match=r"other|brings code"):
        fs.build_meta_model(folder)
