"""A forward that was changed is computed with, after prepare_loss where it was used before."""

import copy
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from tests.harness.models import oracle_gradients, ragged_batches, tiny_model


def _twice_as_large(model: Any) -> None:
    own = model.loss_function
    model.loss_function = lambda *args, **kwargs: 2 * own(*args, **kwargs)


def _step(model: Any, batches: list[Any], **options: Any) -> fs.StepResult:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return fs.train_step(model, batches, optimizer, max_grad_norm=None, **options)


def _wrapped(model: Any) -> None:
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 2 * forward(hidden)


def _hooked(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: 2 * output)


@pytest.mark.parametrize("prepared", [False, True], ids=["before the first use", "after it"])
@pytest.mark.parametrize("change", [_wrapped, _hooked])
def test_a_head_that_computes_something_else_is_computed_with(change: Any, prepared: bool) -> None:
    model, batches = tiny_model("llama"), ragged_batches(2)
    if prepared:
        _step(model, batches)
        change(model)
        assert fs.prepare_loss(model) == "logits"
    else:
        change(model)
    plain = tiny_model("llama")
    change(plain)
    expected, _ = oracle_gradients(plain, batches)
    assert _step(model, batches).loss == pytest.approx(expected, rel=1e-5)
    assert fs.evaluate(model, batches).loss == pytest.approx(expected, rel=1e-5)


def test_a_copy_is_found_out_about_anew() -> None:
    model, batches = tiny_model("llama"), ragged_batches(2)
    _step(model, batches)
    other = copy.deepcopy(model)
    _twice_as_large(other)
    with pytest.raises(fs.ModelLossError):
        _step(other, batches)
    _step(model, batches)
