"""Forms in which repositories come: a config that names a bare class, and layers that transformers lacks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import fsdp_sft as fs
from tests.harness.hf_folders import difference, plain, rewrite, tensors_of
from tests.harness.models import tiny_model

BLOOM = {"vocab_size": 101, "hidden_size": 32, "n_layer": 2, "n_head": 4}
LATENT = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "q_lora_rank": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 2,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip


def test_a_config_that_names_the_class_without_a_head(tmp_path: Path) -> None:
    tf.BloomForCausalLM(tf.BloomConfig(**BLOOM)).transformer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BloomModel"]
    model = fs.build_meta_model(tmp_path)
    fs.load_weights(model, tmp_path)
    oracle = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    assert type(model) is type(oracle)
    assert difference(model, oracle) == []
    bare = fs.build_meta_model(tmp_path, architectures=["BloomModel"])
    assert type(bare) is tf.BloomModel


def test_a_model_for_masked_words_keeps_its_class(tmp_path: Path) -> None:
    tiny_model("bert").bert.save_pretrained(tmp_path)
    assert type(fs.build_meta_model(tmp_path)) is tf.BertModel


def test_layers_behind_the_last_are_not_left_unread_without_a_word(tmp_path: Path) -> None:
    tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**LATENT)).save_pretrained(tmp_path / "base")
    further = {"model.layers.2.eh_proj.weight": torch.ones(32, 64)}
    rewrite(tmp_path / "base", tensors_of(tmp_path / "base") | further)
    model: Any = fs.build_meta_model(tmp_path / "base")
    with pytest.raises(fs.CheckpointFormatError, match=r"eh_proj.*unexpected='ignore'"):
        fs.load_weights(model, tmp_path / "base")
    fs.load_weights(model, tmp_path / "base", unexpected="ignore")
    fs.export_hf(model, tmp_path / "out", dtype=torch.float32)
    assert model.config.num_nextn_predict_layers == 1, "the model's own"
    assert difference(model, plain(tmp_path / "out")) == []
