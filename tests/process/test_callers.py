"""Warnings point at the caller's line, and errors of ranks in different calls name the public function."""

import operator
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from fsdp_sft._process.callers import warn_caller
from tests.harness.device import mesh_here
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.ranks import run_distributed

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


def _check_different_calls() -> None:
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here())
    batch = ragged_batches(1)[0]
    with pytest.raises(fs.RemoteRankError, match=rf"train_step \({HERE}:\d+\).*evaluate \({HERE}:\d+\)"):
        if dist.get_rank() == 0:
            fs.train_step(model, [batch], torch.optim.SGD(model.parameters(), lr=0.1))
        else:
            fs.evaluate(model, [batch])


def test_ranks_in_different_calls_are_told_the_public_names() -> None:
    run_distributed(_check_different_calls, 2)
