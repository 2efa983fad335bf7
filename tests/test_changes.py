"""A forward that was changed is computed with after prepare_loss, and refused without where it shows."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fsdp_sft as fs
from tests.harness.models import oracle_gradients, ragged_batches, tiny_model


def _doubled_beside_the_loss(model: Any) -> None:
    forward = model.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output

    model.forward = wrapped


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


@pytest.mark.parametrize("checked", [False, True], ids=["before the check", "after the check"])
@pytest.mark.parametrize("change", [_wrapped, _hooked])
def test_a_head_that_computes_something_else_is_computed_with(change: Any, checked: bool) -> None:
    model, batches = tiny_model("llama"), ragged_batches(2)
    if checked:
        _step(model, batches)
        change(model)
        with pytest.raises(fs.ModelLossError, match=r"head has changed.*call prepare_loss\(model\)"):
            _step(model, batches)
        with pytest.raises(fs.ModelLossError, match=r"head has changed.*call prepare_loss\(model\)"):
            fs.evaluate(model, batches)
        assert fs.prepare_loss(model) == "logits"
    else:
        change(model)
    plain = tiny_model("llama")
    change(plain)
    expected, _ = oracle_gradients(plain, batches)
    assert _step(model, batches).loss == pytest.approx(expected, rel=1e-5)
    assert fs.evaluate(model, batches).loss == pytest.approx(expected, rel=1e-5)
    loss = sum(float(fs.causal_lm_loss(model, b, num_targets=fs.count_targets(batches))) for b in batches)
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("call", ["train_step", "evaluate", "causal_lm_loss"])
@pytest.mark.parametrize("change", [_twice_as_large, _doubled_beside_the_loss])
def test_another_loss_of_the_model_is_refused(call: str, change: Any) -> None:
    model, batches = tiny_model("llama"), ragged_batches(2)
    change(model)
    calls = {
        "train_step": lambda: _step(model, batches),
        "evaluate": lambda: fs.evaluate(model, batches),
        "causal_lm_loss": lambda: fs.causal_lm_loss(model, batches[0], num_targets=9),
    }
    with pytest.raises(fs.ModelLossError, match="the own loss of LlamaForCausalLM"):
        calls[call]()


def _of_rows(reduction: str, model: Any, batch: Any) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction=reduction)


class _Loss:
    def __init__(self, reduction: str) -> None:
        self.reduction = reduction

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        return _of_rows(self.reduction, model, batch)


def _closed_over(reduction: str) -> Any:
    return lambda model, batch: _of_rows(reduction, model, batch)


@pytest.mark.parametrize("make", [lambda r: partial(_of_rows, r), _Loss, _closed_over])
@pytest.mark.parametrize("call", [_step, fs.evaluate])
def test_a_mean_is_refused(make: Any, call: Any) -> None:
    model, batches = tiny_model("llama"), ragged_batches(2)
    for _ in range(2):
        with pytest.raises(fs.ModelLossError, match="it is a mean over the targets"):
            call(model, batches, loss_fn=make("mean"))
    call(model, batches, loss_fn=make("mean"), check_labels=False)
    call(model, batches, loss_fn=make("sum"))


@pytest.mark.parametrize("ids", [slice(1), slice(40, 41)])
def test_a_change_of_some_logits_that_no_look_at_the_model_sees(ids: slice) -> None:
    model, batches, is_on = tiny_model("llama"), ragged_batches(2), [False]
    forward = model.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if is_on[0]:
            output.logits[..., ids] = -100.0
        return output

    model.forward = wrapped
    _step(model, batches)
    assert fs.prepare_loss(model) == "chunked"
    is_on[0] = True
    with pytest.raises(fs.ModelLossError, match="the model no longer makes"):
        _step(model, batches)


def test_a_copy_is_found_out_about_anew() -> None:
    model, batches = tiny_model("llama"), ragged_batches(2)
    _step(model, batches)
    other = copy.deepcopy(model)
    _twice_as_large(other)
    with pytest.raises(fs.ModelLossError):
        _step(other, batches)
    _step(model, batches)


def test_a_look_makes_no_record() -> None:
    from fsdp_sft._model.record import kept_of

    layer = nn.Linear(2, 2)
    assert kept_of(layer, fs.StepResult) is None
    assert not [name for name in vars(layer) if name.startswith("_fsdp_sft")]
