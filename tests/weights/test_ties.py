"""Checkpoints that store both names of tied weights, on ranks that hold copies of each other's shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from fsdp_sft.weights import meta
from tests.harness.hf_folders import difference, loaded, plain, rewrite, save_tiny, tensors_of
from tests.harness.models import full
from tests.harness.multimodal import tiny
from tests.harness.ranks import run_distributed

FLOAT32 = MixedPrecisionPolicy()
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
REPLICAS = [(2, {"dp_replicate": 2, "dp_shard": 1}), (4, {"dp_replicate": 2})]


def _stored_twice(folder: Path, change: float = 0.0) -> Path:
    save_tiny(folder, "qwen2-tied")
    tensors = tensors_of(folder)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][70] += change
    rewrite(folder, tensors, files=2)
    return folder


def _check_equal(folder: Path, mesh_shape: dict[str, int]) -> None:
    model = loaded(folder, mesh_shape)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert difference(model, plain(folder)) == []


@pytest.mark.parametrize(("ranks", "mesh_shape"), REPLICAS)
def test_the_same_values_under_both_names(tmp_path: Path, ranks: int, mesh_shape: dict[str, int]) -> None:
    run_distributed(_check_equal, ranks, _stored_twice(tmp_path), mesh_shape)


def _check_different(folder: Path, mesh_shape: dict[str, int]) -> None:
    meta._PROBES = 1  # the first row only is seen
    with pytest.raises(fs.CheckpointFormatError, match=r"lm_head.*tie_word_embeddings=False"):
        loaded(folder, mesh_shape)
    model = fs.build_meta_model(folder, tie_word_embeddings=False)
    fs.load_weights(model, folder)
    assert torch.equal(full(model.lm_head.weight), tensors_of(folder)[HEAD].float())


def test_values_that_differ_where_no_sample_looks(tmp_path: Path) -> None:
    folder = _stored_twice(tmp_path, 1.0)
    run_distributed(_check_different, 2, folder, {"dp_replicate": 2, "dp_shard": 1})


def test_names_that_the_checkpoint_has_otherwise(tmp_path: Path) -> None:
    """A vision-language folder, whose two tensors have other names in it than in the model."""
    tiny("internvl", tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = tensors_of(tmp_path)
    embedding = tensors["language_model.model.embed_tokens.weight"]
    for apart in (0.0, 1.0):
        rewrite(tmp_path, tensors | {"language_model.lm_head.weight": embedding + apart})
        model = fs.build_meta_model(tmp_path)
        fs.load_weights(model, tmp_path)
        assert difference(model, plain(tmp_path)) == []
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == (not apart)


def _check_converted(folder: Path, mesh_shape: dict[str, int], equal: bool) -> None:
    """The head alone is stored in two parts."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Concatenate, WeightConverter

    converter = WeightConverter(["head_a.weight", "head_b.weight"], "lm_head.weight", [Concatenate(0)])
    conversion_mapping.register_checkpoint_conversion_mapping("Qwen2ForCausalLM", [converter], overwrite=True)
    if equal:
        model = loaded(folder, mesh_shape)
        expected = tensors_of(folder)[EMBEDDING].float()
        assert torch.equal(full(model.lm_head.weight), expected)
    else:
        with pytest.raises(fs.CheckpointFormatError, match="head_b"):
            loaded(folder, mesh_shape)


@pytest.mark.parametrize("equal", [True, False])
def test_a_second_name_that_is_converted_is_compared_too(tmp_path: Path, equal: bool) -> None:
    folder = _stored_twice(tmp_path, 0.0 if equal else 1.0)
    tensors = tensors_of(folder)
    head = tensors.pop(HEAD)
    tensors |= {"head_a.weight": head[:40].clone(), "head_b.weight": head[40:].clone()}
    rewrite(folder, tensors)
    run_distributed(_check_converted, 4, folder, {"dp_replicate": 2}, equal)


def test_ties_that_to_empty_has_broken_are_made_again(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2-tied")
    model: Any = fs.build_meta_model(tmp_path)
    model.to_empty(device="cpu")
    fs.load_weights(model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert difference(model, plain(tmp_path)) == []
