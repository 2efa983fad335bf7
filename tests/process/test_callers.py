"""Warnings point at the caller's line."""

import operator
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft._process.callers import warn_caller
from tests.harness.models import ragged_batches, tiny_model

HERE = Path(__file__).name


def _step_in_eval_mode() -> None:
    model = tiny_model("gpt2").eval()
    fs.train_step(model, ragged_batches(1), torch.optim.SGD(model.parameters(), lr=0.1))


def _epoch_passed_over() -> None:
    sampler = fs.ResumableSampler(4)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 2})
    sampler.set_epoch(0)


@pytest.mark.parametrize(
    "call",
    [_step_in_eval_mode, _epoch_passed_over],
    ids=operator.attrgetter("__name__"),
)
def test_a_warning_points_at_the_line_that_called(call: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert [Path(one.filename).name for one in caught if one.category is UserWarning] == [HERE]


def test_a_warning_outside_of_the_library_is_of_its_line() -> None:
    with pytest.warns(UserWarning, match="text") as caught:
        warn_caller("text")
    assert Path(caught[0].filename).name == HERE
