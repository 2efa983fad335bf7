"""How rows are stored by the config alone, beside what there is in files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_sft._quantised import find
from fsdp_sft._quantised.find import layout_by_config
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._tensors.packed import Packed
from tests.harness.quantised_folders import opened
from tests.harness.quantised_weights import FORMATS

WIDTH = 2048  # of a real layer: what fills a row up, or a number for each row, counts for little


@pytest.mark.parametrize("name", FORMATS)
def test_the_config_says_how_rows_are_stored(name: str, tmp_path: Path) -> None:
    made = FORMATS[name](8, WIDTH)
    found: Any = next(iter(opened(tmp_path, made).values()))
    assert isinstance(found, Packed)
    expected = found.row_format()
    # DeepSeek-V4 has matrices in FP8, and stacks of them in MXFP4.
    shape = (2, 8, WIDTH) if name == "fp4 of deepseek-v4" else (8, WIDTH)
    settings = Settings("config.json", made.settings["quant_method"], made.settings)
    layout = layout_by_config(settings, shape)
    if expected is None:
        assert layout is None
        return
    assert layout is not None
    assert not layout.transposed
    form = layout.form
    assert form.width == expected.width
    # Such configs do not say of what dtype scales are.
    unsaid = "e8m0" in name or "uint8" in name or name == "fp8 block, compressed-tensors"
    if not unsaid:
        assert form.row_bytes == pytest.approx(expected.row_bytes, rel=0.01)
    rows = torch.zeros(2, form.row_bytes, dtype=torch.uint8)
    form.values_into(rows, torch.empty(2, WIDTH))


@pytest.mark.parametrize(
    ("lists", "module", "is_left_out"),
    [
        ({"modules_to_not_convert": ["lm_head", "mlp.gate"]}, "model.layers.1.mlp.gate", True),
        ({"modules_to_not_convert": ["lm_head", "mlp.gate"]}, "model.layers.1.mlp.gate_proj", False),
        ({"ignore": ["re:.*self_attn.*"]}, "model.layers.1.self_attn.q_proj", True),
        ({"ignore": ["re:.*self_attn.*"]}, "model.layers.1.mlp.experts.down_proj", False),
        ({"exclude_modules": ["model.layers.0.*"]}, "model.layers.0.mlp.down_proj", True),
        ({"exclude_modules": ["model.layers.0.*"]}, "model.layers.10.mlp.down_proj", False),
        ({"ignored_layers": ["re:("]}, "model.layers.0.mlp.down_proj", False),
        ({}, "model", False),
    ],
)
def test_lists_of_modules_that_are_not_packed(lists: Any, module: str, is_left_out: bool) -> None:
    methods = {"ignore": "compressed-tensors", "exclude_modules": "modelopt"}
    method = methods.get(next(iter(lists), ""), "fp8")
    assert find.is_left_out(Settings("config.json", method, lists), module) is is_left_out
