"""Rows longer than a model was made for, 5,000 tokens on 1,024 positions in a trial."""

import warnings
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from tests.harness.models import tiny_model


def _batch(length: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(length).remainder(50)[None] + 3
    return {"input_ids": ids, "labels": ids}


def _step(model: Any, batch: Any) -> fs.StepResult:
    return fs.train_step(model, [batch], torch.optim.SGD(model.parameters(), lr=0.0))


def test_a_row_beyond_what_was_trained_is_told_once() -> None:
    model = tiny_model("llama", max_position_embeddings=16)
    packed = fs.PackedCollator(max_length=48)(
        [{"input_ids": r, "labels": r} for r in ([5, 6, 7] * 4, [9, 3] * 7)]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(model, _batch(16))
        _step(model, packed)  # 26 tokens, of rows that are shorter
    with pytest.warns(UserWarning, match=r"a row has 17 tokens and LlamaForCausalLM was made for 16"):
        _step(model, _batch(17))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(model, _batch(18))
