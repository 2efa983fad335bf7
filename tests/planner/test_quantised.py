"""Configs of quantised checkpoints: planned as what is loaded from them, with the bytes that are read."""

from pathlib import Path
from typing import Any

import pytest
import transformers

import fsdp_sft as fs
from fsdp_sft._quantised.settings import settings_for
from fsdp_sft.planner.model import as_config, build_skeleton, published_bytes
from tests.harness.hf_folders import tensors_of
from tests.harness.quantised_folders import configure, deepseek_folder, mxfp4_folder

RUN = fs.Run(num_gpus=2, micro_batch_size=1, seq_length=32)
FOLDERS = pytest.mark.parametrize("write", [mxfp4_folder, deepseek_folder], ids=["gpt-oss", "deepseek-v3"])


@FOLDERS
def test_memory_is_that_of_the_dequantised_model(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    quantised = fs.estimate_memory(tmp_path, RUN)
    configure(tmp_path, quantization_config=None)
    plain = fs.estimate_memory(tmp_path, RUN)
    assert quantised.peak_bytes == plain.peak_bytes
    assert "is published quantised" in quantised.notes[0]
    assert not any("quantised" in note for note in plain.notes)


@FOLDERS
def test_bytes_are_those_of_the_files(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    stored = sum(t.nbytes for t in tensors_of(tmp_path).values())
    skeleton = build_skeleton(as_config(tmp_path), RUN)
    settings = settings_for("folder", as_config(tmp_path))
    assert settings is not None
    found = published_bytes(settings, skeleton.blocks, skeleton.parameters)
    assert found == pytest.approx(stored, rel=0.03)
    assert stored < 1.5 * skeleton.parameters, "and not those of bfloat16"


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}, 4.25),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.126953125),
    ],
)
def test_bits_of_a_packed_value(settings: dict[str, Any], bits: float) -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=64, vocab_size=64
    )
    config.quantization_config = settings
    (note, *_) = fs.estimate_memory(config, RUN).notes
    assert f"({settings['quant_method']}, {bits:.3g} bits a packed value)" in note


def test_a_way_that_is_not_read_is_not_planned() -> None:
    config = transformers.LlamaConfig()
    config.quantization_config = {"quant_method": "torchao"}
    with pytest.raises(fs.CheckpointFormatError, match="torchao"):
        fs.estimate_memory(config, RUN)
