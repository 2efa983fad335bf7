"""Quantised checkpoints: refused by name, with a way out that gives the very values."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fsdp_sft as fs
from tests.harness.hf_folders import rewrite, tensors_of

_BLOCK = 16
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _save(folder: Path, model: Any, settings: dict[str, Any], stored: dict[str, torch.Tensor]) -> None:
    model.save_pretrained(folder)
    rewrite(folder, stored)
    _configure(folder, quantization_config=settings)


def _configure(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _spread(scale: torch.Tensor) -> torch.Tensor:
    return scale.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)


def _fp8(folder: Path) -> dict[str, torch.Tensor]:
    """A folder in FP8 with a scale for each block, and its values."""
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config)
    stored, values = {}, {}
    for name, weight in model.state_dict().items():
        stored[name] = values[name] = weight.bfloat16()
        if "_proj" in name:
            scale = torch.rand(*(size // _BLOCK for size in weight.shape)) / 10 + 0.01
            stored[name] = (weight / _spread(scale)).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            values[name] = (stored[name].float() * _spread(scale)).bfloat16()
    settings = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK], "activation_scheme": "dynamic"}
    _save(folder, model, settings, stored)
    return values


def _mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """A folder with the experts in MXFP4, and its values."""
    config = transformers.GptOssConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64,
        num_key_value_heads=1, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    stored, values = {}, {}
    for name, weight in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = values[name] = weight.bfloat16()
            continue
        experts, within, out = weight.shape
        blocks = torch.randint(0, 256, (experts, out, within // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, out, within // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        nibbles = torch.stack([_E2M1[(blocks & 15).long()], _E2M1[(blocks >> 4).long()]], -1).flatten(-2)
        values[name] = (nibbles * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).mT.bfloat16()
    _save(folder, model, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, stored)
    return values


@pytest.mark.parametrize("write", [_fp8, _mxfp4])
def test_the_way_out_gives_the_values(write: Any, tmp_path: Path) -> None:
    folder, out = tmp_path / "stored", tmp_path / "out"
    values = write(folder)
    with pytest.raises(fs.CheckpointFormatError, match="is quantised") as caught:
        fs.build_meta_model(folder)
    advice = re.search(r"load that: (.*?\))(;|$)", str(caught.value))
    assert advice is not None
    names = {name: getattr(transformers, name) for name in re.findall(r"\b[A-Z]\w+(?=[.(])", advice[1])}
    exec(advice[1], names | {"torch": torch, "out": out})
    read = tensors_of(out)
    assert read.keys() == values.keys()
    assert all(torch.equal(read[name], values[name]) for name in values)
    fs.build_meta_model(out)


@pytest.mark.parametrize("method", ["awq", "gptq", "a new one", None])
def test_other_formats_are_named(method: str | None, tmp_path: Path) -> None:
    _fp8(tmp_path)
    _configure(tmp_path, quantization_config={"quant_method": method} if method else {"bits": 4})
    named = (
        f"quantised \\({method or 'of a format without quant_method'}\\): take the model's checkpoint in 16"
    )
    with pytest.raises(fs.CheckpointFormatError, match=named):
        fs.build_meta_model(tmp_path)


def test_a_part_of_a_config_says_it(tmp_path: Path) -> None:
    text = {"hidden_size": 32, "quantization_config": {"quant_method": "compressed-tensors"}}
    transformers.Qwen2_5_VLConfig(architectures=["Qwen2_5_VLForConditionalGeneration"]).save_pretrained(
        tmp_path
    )
    _configure(tmp_path, text_config=json.loads((tmp_path / "config.json").read_text())["text_config"] | text)
    with pytest.raises(fs.CheckpointFormatError, match=r"run_compressed=False"):
        fs.build_meta_model(tmp_path)


@pytest.mark.parametrize("write", [_fp8, _mxfp4])
def test_without_a_word_in_the_config(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    _configure(tmp_path, quantization_config=None)
    with pytest.raises(
        fs.CheckpointFormatError, match="config does not say how: take the model's checkpoint"
    ):
        fs.load_weights(fs.build_meta_model(tmp_path), tmp_path, missing="initialise", unexpected="ignore")


@pytest.mark.parametrize("names", [("qweight", "qzeros", "scales"), ("weight_packed", "weight_scale")])
def test_packed_values_are_never_initialised(names: tuple[str, ...], tmp_path: Path) -> None:
    _fp8(tmp_path)
    _configure(tmp_path, quantization_config=None)
    stored = {name: v.bfloat16() for name, v in tensors_of(tmp_path).items() if "scale" not in name}
    module = "model.layers.0.mlp.up_proj"
    del stored[f"{module}.weight"]
    stored |= {f"{module}.{name}": torch.zeros(4, 4, dtype=torch.int32) for name in names[:1]}
    stored |= {f"{module}.{name}": torch.zeros(4, 4) for name in names[1:]}
    rewrite(tmp_path, stored)
    with pytest.raises(fs.CheckpointFormatError, match=f"packed ones \\({module}.{names[0]}\\)"):
        fs.load_weights(fs.build_meta_model(tmp_path), tmp_path, missing="initialise", unexpected="ignore")
