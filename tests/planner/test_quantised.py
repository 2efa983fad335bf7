"""Configs of quantised checkpoints: planned as what is loaded from them."""

from pathlib import Path
from typing import Any

import pytest

import fsdp_sft as fs
from tests.harness.quantised_folders import configure, deepseek_folder, mxfp4_folder

RUN = fs.Run(num_gpus=2, micro_batch_size=1, seq_length=32)


@pytest.mark.parametrize("write", [mxfp4_folder, deepseek_folder], ids=["gpt-oss", "deepseek-v3"])
def test_memory_is_that_of_the_dequantised_model(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    quantised = fs.estimate_memory(tmp_path, RUN)
    configure(tmp_path, quantization_config=None)
    plain = fs.estimate_memory(tmp_path, RUN)
    assert quantised.peak_bytes == plain.peak_bytes
    assert "is published quantised" in quantised.notes[0]
    assert not any("quantised" in note for note in plain.notes)
