"""Repositories as some come: other formats beside, leftovers, composite models; and the advice, taken."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.hf_folders import difference, plain, rewrite, save_tiny, tensors_of
from tests.harness.models import TINY
from tests.harness.ranks import run_distributed
from tests.harness.trained import assert_same, everything


def _add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    before = load_file(file) if file.exists() else {}
    save_file({**before, **tensors}, file, metadata={"format": "pt"})


def _load(folder: Path, build: dict[str, Any], load: dict[str, Any]) -> Any:
    model = fs.shard_model(fs.build_meta_model(folder, **build), mesh=mesh_here())
    report = fs.load_weights(model, folder, **load)
    assert report.missing == []
    fs.export_hf(model, folder.parent / "out", dtype=torch.float32)
    return everything(model)


def _refused(folder: Path, build: dict[str, Any]) -> str:
    with pytest.raises(fs.CheckpointFormatError) as found:
        _load(folder, build, {})
    return str(found.value)


OTHERS = {
    "consolidated.safetensors": "put the repository's model*.safetensors beside",
    "tiny-Q8_0.gguf": "GGUF, the format of llama.cpp, is not read",
    "shard-00001-model-00001-of-00001.safetensors": "HuggingFaceStorageReader(folder)",
}


@pytest.mark.parametrize("other", OTHERS)
def test_files_of_another_format_alone(other: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "base", max_shard_size="1GB")
    (folder / "model.safetensors").rename(folder / other)
    assert OTHERS[other] in run_distributed(_refused, 1, folder, {})[0]
    (folder / "model.safetensors").write_bytes((folder / other).read_bytes())
    assert_same(run_distributed(_load, 1, folder, {}, {})[0], everything(plain(folder)))
    (folder / "config.json").unlink()
    with pytest.raises(fs.CheckpointFormatError, match=re.escape(OTHERS[other])):
        fs.build_meta_model(folder)


def test_experts_under_another_name_are_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "base", "mixtral")
    stored = {name: value for name, value in tensors_of(folder).items() if ".experts." not in name}
    rewrite(folder, stored | {"model.layers.0.mlp.switch_mlp.up_proj.weight": torch.ones(4, 4)})
    told = run_distributed(_refused, 1, folder, {})[0]
    assert re.search(r"no values for .*experts.*; it has .*switch_mlp\.up_proj", told)


def test_masks_that_are_no_longer_stored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tf.GPTJConfig(vocab_size=101, n_embd=32, n_layer=2, n_head=4, rotary_dim=8, n_positions=64)
    model = tf.GPTJForCausalLM(config)
    model.save_pretrained(tmp_path / "base")
    mask = torch.ones(64, 64, dtype=torch.bool).tril()[None, None]
    _add(tmp_path / "base", {f"transformer.h.{i}.attn.bias": mask.clone() for i in range(2)})
    if tf.__version__ < "5.24":  # which leaves them out by itself
        told = run_distributed(_refused, 1, tmp_path / "base", {})[0]
        assert "load_weights(unexpected='ignore')" in told
    loaded = run_distributed(_load, 1, tmp_path / "base", {}, {"unexpected": "ignore"})[0]
    assert_same(loaded, everything(model))


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_a_tower_whose_package_is_missing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    text = {**TINY, "num_hidden_layers": 5, "num_kv_shared_layers": 0, "laurel_rank": 4, "head_dim": 8}
    own = {"activation_sparsity_pattern": None, "vocab_size_per_layer_input": 101}
    config = tf.Gemma3nConfig(text_config={**text, **own, "hidden_size_per_layer_input": 8})
    config.architectures = ["Gemma3nForConditionalGeneration"]
    folder = tmp_path / "base"
    config.save_pretrained(folder)
    model = tf.Gemma3nForCausalLM(config.text_config)
    inside = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    _add(folder, {**inside, "model.vision_tower.timm_model.head.weight": torch.ones(2, 2)})
    with pytest.raises(ImportError, match="timm"):
        fs.build_meta_model(folder)
    build = {"architectures": ["Gemma3nForCausalLM"]}
    assert "load_weights(unexpected='ignore')" in run_distributed(_refused, 1, folder, build)[0]
    assert_same(run_distributed(_load, 1, folder, build, {"unexpected": "ignore"})[0], everything(model))


def _check_transposed(folder: Path) -> None:
    model = fs.load_pretrained(folder, mesh=mesh_here(), mp_policy=MixedPrecisionPolicy())
    report = model.load_report
    assert report.job_bytes_read <= 1.05 * report.checkpoint_bytes, "each rank reads its own experts alone"
    apart = [problem for problem in difference(model, plain(folder)) if ".visual." not in problem]
    assert apart == [], "but for the tower, which is frozen"


def test_large_experts_that_are_stored_transposed(tmp_path: Path) -> None:
    """As published: each expert (in, out), in tensors that are too large to be read by every rank."""
    text = {
        "hidden_size": 512,
        "intermediate_size": 64,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 101,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 512,
        "deepstack_visual_indexes": [0],
    }
    config = tf.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    tf.Qwen3VLMoeForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(tmp_path)
    stored = tensors_of(tmp_path)
    rewrite(tmp_path, {n: t.mT.contiguous() if ".experts." in n else t for n, t in stored.items()})
    run_distributed(_check_transposed, 2, tmp_path)
