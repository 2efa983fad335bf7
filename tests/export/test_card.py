"""The model card of an export, and a generation config that transformers would not save."""

from pathlib import Path

import torch
from huggingface_hub import ModelCard
from transformers import GenerationConfig

import fsdp_sft as fs
from fsdp_sft.export.settings import model_card
from tests.harness.models import tiny_model


def test_a_generation_config_that_contradicts_itself(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=3)
    model.generation_config = GenerationConfig(do_sample=False, temperature=0.9)
    out = fs.export_hf(model, tmp_path / "out", max_shard_size=40_000)
    assert GenerationConfig.from_pretrained(out).temperature == 0.9


def test_the_model_card(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.name_or_path = "meta-llama/Llama-3.2-1B"
    card = ModelCard(model_card(model, "someone/model", "LlamaForCausalLM", torch.bfloat16))
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "base_model": "meta-llama/Llama-3.2-1B",
        "tags": ["sft"],
    }
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters in bfloat16" in card.text
    model.name_or_path = str(tmp_path)
    assert "base_model" not in model_card(model, "out", "BertModel", torch.float32)
