"""What programs that know transformers 4 alone find in an export; `benchmarks.checks.readers` runs them."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import fsdp_sft as fs
from tests.harness.places import script

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Rotary embeddings as transformers 5 has them; the fields in which transformers 4 looks for them.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("llama", {"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5}),
    "scaled": ("llama", {"rope_theta": 5e5, **LLAMA3}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "by kind of layer": (
        "gemma3_text",
        {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
        {"rope_theta": 1e6, "rope_local_base_freq": 5e3},
    ),
    "of a part": (
        "glm4",
        {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.25},
        {"rope_theta": 3e4, "partial_rotary_factor": 0.25},
    ),
}


def _tiny(family: str, **fields: Any) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(family, **sizes, **fields)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("case", CASES)
def test_rotary_embeddings_are_said_in_the_former_fields_too(case: str, tmp_path: Path) -> None:
    family, rope, fields = CASES[case]
    model = _tiny(family, rope_parameters=rope)
    fs.export_hf(model, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: written.get(name) for name in fields} == fields
    again = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert again.rope_parameters == model.config.rope_parameters
    assert again.to_dict().keys() == model.config.to_dict().keys() | {"dtype", "architectures"}


def test_the_number_of_experts_is_said_by_both_names(tmp_path: Path) -> None:
    fs.export_hf(_tiny("qwen3_moe", num_experts=4, num_experts_per_tok=2), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["num_experts"] == written["num_local_experts"]


def test_the_tokenizer_has_a_class_that_others_know(tmp_path: Path) -> None:
    tokenizer = script("tiny_model").make_tokenizer(["Some words, and a tool chat."], vocab_size=300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|x|>"]})
    fs.export_hf(_tiny("llama"), tmp_path / "out", tokenizer=tokenizer)
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "extra_special_tokens" not in written
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert again("A <|x|> chat").input_ids == tokenizer("A <|x|> chat").input_ids
    assert again.chat_template == tokenizer.chat_template
