"""Configs of quantised checkpoints: planned as what is loaded from them."""

from pathlib import Path
from typing import Any

import pytest
import transformers

import fsdp_sft as fs
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
