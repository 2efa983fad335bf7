"""The class that is asked for is the class that is built, or the name is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from tests.harness.composed import composed
from tests.harness.device import mesh_here
from tests.harness.hf_folders import difference, save_tiny
from tests.harness.ranks import run_distributed

CLASSIFIER = "LlamaForSequenceClassification"


def _classifier_like_from_pretrained(folder: Path) -> None:
    import transformers

    overrides: dict[str, Any] = {"architectures": [CLASSIFIER], "num_labels": 3}
    model = composed(
        folder,
        mesh=mesh_here(),
        missing="initialise",
        unexpected="ignore",
        config_overrides=overrides,
    )
    torch.manual_seed(0)
    expected = transformers.LlamaForSequenceClassification.from_pretrained(
        folder, num_labels=3, dtype=torch.float32
    ).train()
    assert type(model).__name__ == f"FSDP{CLASSIFIER}"
    assert model.config.architectures == [CLASSIFIER]
    assert difference(model, expected) == []


def test_a_class_that_the_config_does_not_name(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    run_distributed(_classifier_like_from_pretrained, 2, tmp_path)
    assert type(fs.build_meta_model(tmp_path, architectures=CLASSIFIER)).__name__ == CLASSIFIER


@pytest.mark.parametrize(
    ("names", "kind", "words"),
    [
        (["MistralForCausalLM"], fs.CheckpointFormatError, "models of type 'mistral'.*'llama'"),
        (["LlamaForNothing"], fs.CheckpointFormatError, "has no LlamaForNothing"),
        ([], fs.CheckpointFormatError, "architectures="),
        ([7], fs.CheckpointFormatError, "has no 7"),
    ],
)
def test_a_class_that_cannot_be_built(tmp_path: Path, names: Any, kind: Any, words: str) -> None:
    save_tiny(tmp_path)
    with pytest.raises(kind, match=words):
        fs.build_meta_model(tmp_path, architectures=names)


def _overridden(folder: Path) -> None:
    mesh = mesh_here()
    fields = {"attention_dropout": 0.25, "rms_norm_eps": 1e-4}
    model = composed(folder, mesh=mesh, config_overrides=fields)
    built = fs.build_meta_model(folder, **fields)
    assert model.config.to_dict() == {**built.config.to_dict(), "_name_or_path": model.config.name_or_path}
    assert model.model.layers[0].self_attn.attention_dropout == 0.25
    with pytest.raises(TypeError, match="no_such_field"):
        composed(folder, mesh=mesh, config_overrides={"no_such_field": 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'config_overrides'"):
        fs.load_pretrained(folder, mesh=mesh, config_overrides=fields)  # type: ignore[call-arg]


def test_fields_of_the_config_are_replaced(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    run_distributed(_overridden, 2, tmp_path)
