"""Folders with an adapter of peft, beside weights or alone: said, with a way out that gives its values."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from tests.harness.models import tiny_model

peft = pytest.importorskip("peft")


def _adapted(base: Path) -> Any:
    model = tiny_model("llama")
    model.save_pretrained(base)
    from transformers import AutoModelForCausalLM

    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        peft.LoraConfig(
            target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        ),
    )
    return adapted.eval()


def _merged_as_advised(error: pytest.ExceptionInfo[Exception], **names: Any) -> Any:
    from transformers import AutoModelForCausalLM

    advice = re.search(r"(PeftModel.*?\.merge_and_unload\(\)\.save_pretrained\(out\))", str(error.value))
    assert advice is not None
    exec(advice[1], {"PeftModel": peft.PeftModel, "AutoModelForCausalLM": AutoModelForCausalLM, **names})
    model = fs.build_meta_model(names["out"])
    fs.load_weights(model, names["out"])
    return model.eval()


def test_an_adapter_beside_weights_is_not_left_out(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base, own, out = tmp_path / "base", tmp_path / "own", tmp_path / "out"
    adapted = _adapted(base)
    adapted.save_pretrained(base)
    with pytest.raises(fs.CheckpointFormatError, match="adapter") as error:
        fs.load_weights(fs.build_meta_model(base), base)
    own.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (base / name).rename(own / name)
    fs.load_weights(fs.build_meta_model(base), base)
    merged = _merged_as_advised(error, base=AutoModelForCausalLM.from_pretrained(base), folder=own, out=out)
    ids = torch.arange(3, 21).view(2, 9)
    assert torch.allclose(merged(input_ids=ids).logits, adapted(input_ids=ids).logits, atol=1e-5)


def test_an_adapter_alone_is_no_model(tmp_path: Path) -> None:
    _adapted(tmp_path / "base").save_pretrained(tmp_path / "own")
    with pytest.raises(fs.CheckpointFormatError, match=r"config\.json"):
        fs.build_meta_model(tmp_path / "own")
