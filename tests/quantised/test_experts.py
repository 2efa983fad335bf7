"""Mixtures in quantised formats: experts stored one by one, or as one tensor, and whole families."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdp_sft._tensors.boxes import Box, whole
from tests.harness.quantised_folders import opened, read
from tests.harness.quantised_weights import Written, fp8_block, fp8_tensor


def stacked(make: Callable[[int, int], Written], count: int, rows: int, columns: int) -> Written:
    """Experts of one tensor in FP8, whose blocks begin anew with each expert."""
    each = [make(rows, columns) for _ in range(count)]
    weights = torch.stack([one.tensors[".weight"].view(torch.uint8) for one in each])
    scales = torch.stack([one.tensors[".weight_scale_inv"] for one in each])
    tensors = {"": weights.view(torch.float8_e4m3fn), "_scale_inv": scales}
    return Written(tensors, torch.stack([one.values for one in each]), each[0].settings)


@pytest.mark.parametrize("rows", [160, 128, 40])
def test_experts_of_one_tensor(rows: int, tmp_path: Path) -> None:
    made = stacked(fp8_block, 3, rows, 192)
    (source,) = opened(tmp_path, made, "experts.gate_up_proj").values()
    assert source.entry.shape == (3, rows, 192)
    for box in (
        whole((3, rows, 192)),
        Box((1, rows // 2, 0), (2, rows // 2, 192)),
        Box((0, 3, 70), (3, 20, 90)),
    ):
        for at_once in (1 << 20, 3000):
            assert torch.equal(read(source, box, at_once)[0], made.values[box.slices]), box


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1)])
def test_one_scale_for_each_expert(shape: tuple[int, ...], tmp_path: Path) -> None:
    made = stacked(fp8_tensor, 3, 24, 32)
    made.tensors["_scale_inv"] = made.tensors["_scale_inv"].view(shape)
    (source,) = opened(tmp_path, made, "experts.down_proj").values()
    assert torch.equal(read(source, whole((3, 24, 32)))[0], made.values)
