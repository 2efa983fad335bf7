"""How rows are stored by the config alone, beside what there is in files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_sft._quantised import find
from fsdp_sft._quantised.find import row_by_config
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._tensors.packed import Packed
from tests.harness.quantised_folders import opened
from tests.harness.quantised_weights import FORMATS

WIDTH = 256


@pytest.mark.parametrize("name", FORMATS)
def test_the_config_says_how_rows_are_stored(name: str, tmp_path: Path) -> None:
    made = FORMATS[name](128, WIDTH)
    found: Any = next(iter(opened(tmp_path, made).values()))
    assert isinstance(found, Packed)
    expected = found.row_format()
    # DeepSeek-V4 has matrices in FP8, and stacks of them in MXFP4.
    shape = (2, 128, WIDTH) if name == "fp4 of deepseek-v4" else (128, WIDTH)
    settings = Settings("config.json", made.settings["quant_method"], made.settings)
    row = row_by_config(settings, shape)
    if expected is None or name == "int4 per channel":  # of which a stored tensor says the columns
        assert row is None
        return
    assert row is not None
    form, is_transposed = row
    assert not is_transposed
    assert (form.name, form.width) == (expected.name, expected.width)
    sizes = [[(part, count) for part, _, count in each.parts] for each in (form, expected)]
    assert sorted(sizes[0]) == sorted(sizes[1])
    unsaid = "e8m0" in name or "uint8" in name  # such configs do not say what scales are
    if not unsaid:
        assert form.row_bytes == expected.row_bytes
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
