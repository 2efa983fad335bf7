"""The class that is asked for is the class that is built; what is none of transformers is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_sft as fs
from tests.harness.composed import composed
from tests.harness.device import mesh_here
from tests.harness.hf_folders import difference, plain, save_tiny
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
    ("names", "words"),
    [
        (["MistralForCausalLM"], "models of type 'mistral'.*'llama'"),
        (["LlamaForNothing"], "has no LlamaForNothing"),
        ([], "architectures="),
        ([7], "has no 7"),
    ],
)
def test_a_class_that_cannot_be_built(tmp_path: Path, names: Any, words: str) -> None:
    save_tiny(tmp_path)
    with pytest.raises(fs.CheckpointFormatError, match=words):
        fs.build_meta_model(tmp_path, architectures=names)


class Actor(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def _wrapped(folder: Path) -> None:
    model: Any = Actor(fs.build_meta_model(folder / "base"))
    fs.shard_model(model, mesh=mesh_here())
    for call in (
        lambda: fs.load_weights(model, folder / "base"),
        lambda: fs.export_hf(model, folder / "out"),
        lambda: fs.check_export(folder / "out", model=model),
        lambda: fs.iter_hf_tensors(model),
    ):
        with pytest.raises(TypeError, match=r"pass the one inside, model\.model, which"):
            call()
    fs.load_weights(model.model, folder / "base")
    assert difference(model.model, plain(folder / "base")) == []
    with pytest.raises(TypeError, match="load_full_state_dict reads a module of one's own"):
        fs.load_weights(nn.Linear(2, 2), folder / "base")


def test_a_module_around_a_model_is_told_what_to_pass(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", "mixtral")
    run_distributed(_wrapped, 2, tmp_path)
