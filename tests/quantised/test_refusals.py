"""Ways to quantise that are not read, and packed weights of which no config tells: refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fsdp_sft as fs
from fsdp_sft.weights.resolve import resolve_folder
from tests.harness.hf_folders import rewrite, tensors_of
from tests.harness.hub_server import serve, use_hub
from tests.harness.quantised_folders import configure, fp8_folder, mxfp4_folder, opened
from tests.harness.quantised_weights import FORMATS
from tests.harness.ranks import run_distributed


@pytest.mark.parametrize("method", ["torchao", "a new one", None])
def test_other_methods_are_named(method: str | None, tmp_path: Path) -> None:
    fp8_folder(tmp_path)
    configure(tmp_path, quantization_config={"quant_method": method} if method else {"bits": 4})
    named = rf"quantised \({method or 'of a format without quant_method'}\): it is not among .* in 16 bits"
    with pytest.raises(fs.CheckpointFormatError, match=named):
        fs.build_meta_model(tmp_path)


def _fetch(address: str, cache: Path) -> None:
    use_hub(address, cache)
    with pytest.raises(fs.CheckpointFormatError, match=r"quantised \(torchao\)"):
        resolve_folder("someone/model")


def test_before_weights_are_downloaded(tmp_path: Path) -> None:
    fp8_folder(tmp_path / "model")
    configure(tmp_path / "model", quantization_config={"quant_method": "torchao"})
    with serve(tmp_path / "model") as (address, downloads):
        run_distributed(_fetch, 2, address, tmp_path / "cache")
    assert [name for name in downloads if name.endswith(".safetensors")] == []


def test_a_part_of_a_config_says_it(tmp_path: Path) -> None:
    text = {"hidden_size": 32, "quantization_config": {"quant_method": "quark"}}
    transformers.Qwen2_5_VLConfig(architectures=["Qwen2_5_VLForConditionalGeneration"]).save_pretrained(
        tmp_path
    )
    configure(tmp_path, text_config=json.loads((tmp_path / "config.json").read_text())["text_config"] | text)
    with pytest.raises(fs.CheckpointFormatError, match=r"quantised \(quark\)"):
        fs.build_meta_model(tmp_path)


def test_two_parts_of_a_config_say_two_things(tmp_path: Path) -> None:
    fp8_folder(tmp_path)
    configure(tmp_path, compression_config={"quant_method": "compressed-tensors"})
    with pytest.raises(fs.CheckpointFormatError, match="quantised in two ways"):
        fs.build_meta_model(tmp_path)


@pytest.mark.parametrize("write", [fp8_folder, mxfp4_folder])
def test_without_a_word_in_the_config(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    configure(tmp_path, quantization_config=None)
    with pytest.raises(
        fs.CheckpointFormatError, match="config does not say how: take the model's checkpoint"
    ):
        fs.load_weights(fs.build_meta_model(tmp_path), tmp_path, missing="initialise", unexpected="ignore")


@pytest.mark.parametrize("names", [("qweight", "qzeros", "scales"), ("weight_packed", "weight_scale")])
def test_packed_values_are_never_initialised(names: tuple[str, ...], tmp_path: Path) -> None:
    fp8_folder(tmp_path)
    configure(tmp_path, quantization_config=None)
    stored = {name: v.bfloat16() for name, v in tensors_of(tmp_path).items() if "scale" not in name}
    module = "model.layers.0.mlp.up_proj"
    del stored[f"{module}.weight"]
    stored |= {f"{module}.{name}": torch.zeros(4, 4, dtype=torch.int32) for name in names[:1]}
    stored |= {f"{module}.{name}": torch.zeros(4, 4) for name in names[1:]}
    rewrite(tmp_path, stored)
    with pytest.raises(fs.CheckpointFormatError, match=f"packed ones \\({module}.{names[0]}\\)"):
        fs.load_weights(fs.build_meta_model(tmp_path), tmp_path, missing="initialise", unexpected="ignore")


def test_scales_that_bitsandbytes_has_changed_are_named(tmp_path: Path) -> None:
    """As it saves a model without double quantisation that was run on a CPU with AVX512-BF16."""
    made = FORMATS["nf4"](64, 128)
    scales = made.tensors[".weight.absmax"]
    changed = replace(
        made, tensors=made.tensors | {".weight.absmax": scales.view(64, 2).T.bfloat16().contiguous()}
    )
    with pytest.raises(
        fs.CheckpointFormatError, match=r"scales of 'm\.weight' .* in the first forward on a CPU"
    ):
        opened(tmp_path, changed)
