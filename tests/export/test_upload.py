"""Exports that go to the Hub: each file arrives as it lies on the disk; a refusal is raised on all ranks."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, GenerationConfig

import fsdp_sft as fs
from fsdp_sft.export.card import model_card
from tests.harness.device import mesh_here
from tests.harness.hub_upload_server import serve
from tests.harness.models import tiny_model
from tests.harness.ranks import run_distributed


class _Tokenizer:
    def save_pretrained(self, folder: Any) -> None:
        Path(folder, "tokenizer.json").write_text("{}")


def _use(address: str) -> None:
    from huggingface_hub import constants

    constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = address, False, True
    os.environ["HF_TOKEN"] = "hf_sesame"


def _push(folder: str, address: str) -> None:
    _use(address)
    model = tiny_model("llama", seed=3)
    model.generation_config = GenerationConfig(do_sample=False, temperature=0.9)  # contradicts itself
    fs.shard_model(model, mesh=mesh_here())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = fs.export_hf(
            model, f"{folder}/out", tokenizer=_Tokenizer(), max_shard_size=40_000, push_to_hub="someone/model"
        )
    told = [str(w.message) for w in caught if "exported as it is" in str(w.message)]
    assert len(told) == (torch.distributed.get_rank() == 0)
    assert out == Path(folder, "out")


def _refused(folder: str, address: str, refuse: str) -> None:
    _use(address)
    model = tiny_model("llama", seed=3)
    fs.shard_model(model, mesh=mesh_here())
    with pytest.raises(OSError, match="403") as error:
        fs.export_hf(model, f"{folder}/{refuse}", push_to_hub="someone/model")
    assert "rank 0 failed first while" in "".join(error.value.__notes__)
    torch.distributed.barrier()
    if refuse == "create":  # before anything was written
        assert not os.path.exists(f"{folder}/create")
        with pytest.raises(ValueError, match="push_to_hub must be a repository"):
            fs.export_hf(model, f"{folder}/create", push_to_hub="no//repository")
        with pytest.raises(OSError, match="on the Hub failed"):
            _use("http://127.0.0.1:9")
            fs.export_hf(model, f"{folder}/create", push_to_hub="someone/model")
    else:  # the export stays
        assert os.path.exists(f"{folder}/{refuse}/model.safetensors")
        assert "the export itself is complete" in "".join(error.value.__notes__)
    assert [name for name in os.listdir(folder) if name.startswith(".tmp")] == []


def test_push_to_hub(tmp_path: Path) -> None:
    with serve() as hub:
        run_distributed(_push, 2, str(tmp_path), hub.address)
        pushed = hub.repositories["someone/model"]
        local = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        assert pushed == local
        assert {"README.md", "config.json", "generation_config.json", "tokenizer.json"} <= local.keys()
        assert len([name for name in local if name.endswith(".safetensors")]) > 1
        assert (hub.commits, hub.tokens) == (["Upload from fsdp_sft"], {"Bearer hf_sesame"})
        received = tmp_path / "received"
        received.mkdir()
        for name, data in pushed.items():
            (received / name).write_bytes(data)
        loaded = AutoModelForCausalLM.from_pretrained(received).state_dict()
        for name, tensor in tiny_model("llama", seed=3).state_dict().items():
            assert torch.equal(loaded[name], tensor.bfloat16()), name
        assert GenerationConfig.from_pretrained(received).temperature == 0.9
        for refuse in ("create", "commit"):
            hub.refuse = refuse
            hub.repositories.clear()
            run_distributed(_refused, 2, str(tmp_path), hub.address, refuse)


def test_the_card_of_a_vision_language_model() -> None:
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                     "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 32},
        vision_config={"model_type": "clip_vision_model", "hidden_size": 8, "intermediate_size": 8,
                       "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28, "patch_size": 14},
    )  # fmt: skip
    model: Any = transformers.LlavaForConditionalGeneration(config)
    card = model_card(model, "out", "LlavaForConditionalGeneration", torch.bfloat16)
    assert "pipeline_tag: image-text-to-text" in card
    assert 'AutoModelForImageTextToText.from_pretrained("out")' in card
    assert 'processor = AutoProcessor.from_pretrained("out")' in card


def test_the_model_card(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.name_or_path = "meta-llama/Llama-3.2-1B"
    card = ModelCard(model_card(model, "someone/model", "LlamaForCausalLM", torch.bfloat16))
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "meta-llama/Llama-3.2-1B",
        "tags": ["sft"],
    }
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters in bfloat16" in card.text
    assert 'AutoModelForCausalLM.from_pretrained("someone/model")' in card.text
    model.name_or_path = str(tmp_path)
    assert "base_model" not in model_card(model, "out", "BertModel", torch.float32)
