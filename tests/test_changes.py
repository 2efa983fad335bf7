"""What was checked once and has changed since is checked again: right, or refused, on all ranks."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import fsdp_sft as fs
from fsdp_sft._model.forward import forward_state, function_state
from tests.harness.device import mesh_here
from tests.harness.models import oracle_gradients, ragged_batches, tiny_model
from tests.harness.ranks import run_distributed


def _mixed(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 4 * output.cumsum(1)


def _doubled(model: Any) -> None:
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 2 * forward(hidden)


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


class _Mixing(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden).cumsum(1)


def _packs() -> list[Any]:
    return [
        fs.PackedCollator(max_length=48)([{"input_ids": r, "labels": r} for r in ([5, 6, 7] * 4, [9, 3] * 7)])
    ]


def _step(model: Any, batches: list[Any], **options: Any) -> fs.StepResult:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return fs.train_step(model, batches, optimizer, max_grad_norm=None, **options)


@pytest.mark.parametrize("checked", [False, True], ids=["before the check", "after the check"])
def test_a_wrapped_forward_is_computed_with(checked: bool) -> None:
    model, batches = tiny_model("llama"), ragged_batches(2)
    if checked:
        _step(model, batches)
        fs.evaluate(model, batches)
    _doubled(model)
    plain = tiny_model("llama")
    _doubled(plain)
    expected, _ = oracle_gradients(plain, batches)
    assert _step(model, batches).loss == pytest.approx(expected, rel=1e-5)
    assert fs.evaluate(model, batches).loss == pytest.approx(expected, rel=1e-5)
    loss = sum(float(fs.causal_lm_loss(model, b, num_targets=fs.count_targets(batches))) for b in batches)
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("checked", [False, True], ids=["before the check", "after the check"])
@pytest.mark.parametrize("call", ["train_step", "evaluate", "causal_lm_loss"])
@pytest.mark.parametrize("change", [_twice_as_large, _doubled_beside_the_loss])
def test_another_loss_of_the_model_is_refused(checked: bool, call: str, change: Any) -> None:
    model, batches = tiny_model("llama"), ragged_batches(2)
    if checked:
        _step(model, batches)
    change(model)
    calls = {
        "train_step": lambda: _step(model, batches),
        "evaluate": lambda: fs.evaluate(model, batches),
        "causal_lm_loss": lambda: fs.causal_lm_loss(model, batches[0], num_targets=9),
    }
    with pytest.raises(fs.ModelLossError, match="the own loss of LlamaForCausalLM"):
        calls[call]()


@pytest.mark.parametrize("checked", [False, True], ids=["before the check", "after the check"])
@pytest.mark.parametrize("call", [_step, fs.evaluate])
def test_a_module_that_mixes_rows_is_refused_with_packs(checked: bool, call: Any) -> None:
    model = tiny_model("llama")
    if checked:
        call(model, _packs())
    layer = model.model.layers[1]
    layer.mlp = _Mixing(layer.mlp)
    with pytest.raises(fs.PackingError, match="packed rows are not kept apart"):
        call(model, _packs())


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
def test_a_sum_does_not_vouch_for_a_mean(make: Any, call: Any) -> None:
    model, batches = tiny_model("llama"), ragged_batches(2)
    call(model, batches, loss_fn=make("sum"))
    with pytest.raises(fs.ModelLossError, match="it is a mean over the targets"):
        call(model, batches, loss_fn=make("mean"))
    call(model, batches, loss_fn=make("mean"), check_labels=False)


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


def test_a_new_coefficient_is_no_new_function() -> None:
    model, batches, calls = tiny_model("llama"), ragged_batches(2), []

    def loss_with(coefficient: float, weights: torch.Tensor) -> Any:
        def loss(model: Any, batch: Any) -> torch.Tensor:
            calls.append(coefficient)
            return coefficient * weights.sum() * _of_rows("sum", model, batch)

        return loss

    for step in range(3):
        _step(model, batches, loss_fn=loss_with(1.0 + step, torch.ones(step + 1)))
    assert calls == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0], "two of the first step's tell a sum from a mean"


def _other(value: Any) -> Any:
    def function(batch: Any) -> Any:
        return value

    return function


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (_other("sum"), _other("sum"), True),
        (_other("sum"), _other("mean"), False),
        (_other(True), _other(False), False),
        (_other(1), _other(2.5), True),
        (_other(torch.ones(1)), _other(torch.zeros(2)), True),
        (_other(len), _other(sum), False),
        (_other(["sum"]), _other(["mean"]), False),
        (_other({"reduction": "sum"}), _other({"reduction": "mean"}), False),
        (partial(_of_rows, "sum"), partial(_of_rows, "sum"), True),
        (partial(_other, value="sum"), partial(_other, value="mean"), False),
        (_Loss("sum").__call__, _Loss("mean").__call__, False),
        (nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(reduction="sum"), True),
        (nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(), False),
        (_other(_other("sum")), _other(_other("mean")), False),
        (lambda batch: 1, lambda batch: 2, False),
    ],
)
def test_what_makes_another_function(one: Any, other: Any, equal: bool) -> None:
    assert (function_state(one) == function_state(other)) is equal


def test_a_function_that_holds_itself_has_a_state() -> None:
    def again(batch: Any) -> Any:
        return again(batch)

    held: list[Any] = [again]
    held.append(held)
    assert function_state(_other(held)) == function_state(_other(held))


def _set_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(_mixed)


CHANGES = {
    "a hook": _set_hook,
    "a hook before": lambda model: model.lm_head.register_forward_pre_hook(lambda *_: None),
    "a hook of the backward": lambda model: model.lm_head.register_full_backward_hook(lambda *_: None),
    "a forward": _doubled_beside_the_loss,
    "a forward of a module": _doubled,
    "a loss": _twice_as_large,
    "a module": lambda model: setattr(model.model.layers[1], "mlp", nn.Identity()),
    "another attention": lambda model: model.set_attn_implementation("eager"),
    "compiled blocks": lambda model: fs.compile_blocks(model, backend="aot_eager"),
    "a flag of the config": lambda model: setattr(model.config, "output_router_logits", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_a_forward(change: str) -> None:
    model = tiny_model("llama")
    before = forward_state(model)
    assert before == forward_state(model)
    CHANGES[change](model)
    assert before != forward_state(model)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])  # transformers hooks a mixture in its first forward
def test_training_generation_and_saving_change_no_forward(kind: str, tmp_path: Any) -> None:
    model, batches = tiny_model(kind), ragged_batches(2)
    optimizer = torch.optim.AdamW(model.parameters())
    before = forward_state(model)
    fs.train_step(model, batches, optimizer)
    fs.evaluate(model, batches)
    model.eval()
    model.generate(batches[0]["input_ids"][:1], max_new_tokens=2, do_sample=False)
    model.train().requires_grad_(False).requires_grad_(True)
    fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
    fs.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    assert before == forward_state(model)


def test_a_copy_is_found_out_about_anew() -> None:
    model, batches = tiny_model("llama"), ragged_batches(2)
    _step(model, batches)
    other = copy.deepcopy(model)
    _twice_as_large(other)
    with pytest.raises(fs.ModelLossError):
        _step(other, batches)
    _step(model, batches)


def _on_one_rank() -> None:
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, batches = tiny_model("llama"), ragged_batches(2 * ranks)
    fs.shard_model(model, mesh=mesh_here(), mp_policy=MixedPrecisionPolicy())
    before = _step(model, batches[rank::ranks]).loss
    assert fs.prepare_loss(model) == "chunked"
    if rank == 1:  # a hook that changes nothing, and makes this rank compute the logits in full
        model.lm_head.register_forward_hook(lambda *_: None)
    assert _step(model, batches[rank::ranks]).loss == pytest.approx(before, rel=1e-5)
    if rank == 0:
        _twice_as_large(model)
    with pytest.raises(fs.ModelLossError, match="the own loss of"):
        fs.evaluate(model, batches[rank::ranks])


def test_all_ranks_hear_of_a_change_on_one() -> None:
    run_distributed(_on_one_rank, 2, timeout=60)


def _in_a_loop_of_ones_own() -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    model, batches = tiny_model("llama"), ragged_batches(2)
    fs.shard_model(model, mesh=mesh_here(), mp_policy=MixedPrecisionPolicy())
    before = float(fs.loss_sum(model, batches[rank])[0])
    changes: dict[str, Any] = {
        "its modules, hooks": lambda: model.lm_head.register_forward_hook(lambda *_: None),
        "its numbers that scale": lambda: setattr(model.config, "logits_scaling", 7.0),
    }
    for words, change in changes.items():
        if rank == 1:  # and the other rank waits for it in prepare_loss, not in a forward
            change()
            with pytest.raises(fs.ModelLossError, match=r"call prepare_loss\(model\) on all ranks") as caught:
                fs.loss_sum(model, batches[rank])
            assert words in str(caught.value)
        fs.prepare_loss(model)
        assert float(fs.loss_sum(model, batches[rank])[0]) == pytest.approx(before, rel=1e-5)


def test_a_change_on_one_rank_is_refused_in_a_loop_of_ones_own() -> None:
    run_distributed(_in_a_loop_of_ones_own, 2, timeout=60)


def test_adapters_that_are_switched_off_for_a_while_are_no_other_forward() -> None:
    peft = pytest.importorskip("peft")
    from fsdp_sft._model.record import is_changed

    model = fs.add_adapters(tiny_model("llama"), peft.LoraConfig(r=2, target_modules="all-linear"))
    batch = ragged_batches(1)[0]
    fs.loss_sum(model, batch)
    with model.disable_adapter():
        assert not is_changed(model)
        off = float(fs.loss_sum(model, batch)[0])
    assert off == pytest.approx(float(fs.loss_sum(tiny_model("llama"), batch)[0]), rel=1e-6)
    model.merge_adapter()
    assert is_changed(model)


def _shared_rows() -> None:
    model, ids = tiny_model("llama"), torch.arange(3, 35).view(2, 16)
    batch = {"input_ids": ids, "labels": ids}
    mesh = mesh_here(cp=2)
    fs.shard_model(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    fs.use_context_parallel(model, mesh=mesh)
    _step(model, [batch])
    handle = model.model.layers[1].mlp.register_forward_hook(_mixed)
    for call in (_step, fs.evaluate):
        with pytest.raises(fs.UnsupportedModelError, match="computes something else on parts of a row"):
            call(model, [batch])
    handle.remove()
    _step(model, [batch])


def test_a_hook_that_mixes_positions_is_refused_where_ranks_share_rows() -> None:
    run_distributed(_shared_rows, 2, timeout=60)


def test_a_loop_that_leaves_the_check_out_keeps_nothing_for_each_step() -> None:
    from fsdp_sft._model.record import findings
    from fsdp_sft.step.loss_is_sum import _Taken

    model, batches = tiny_model("llama"), ragged_batches(2)
    for _ in range(3):
        _step(model, batches, loss_fn=_closed_over("mean"), check_labels=False)
    assert len(findings(model, _Taken).functions) == 1


def test_a_look_makes_no_record() -> None:
    from fsdp_sft._model.record import kept_of

    layer = nn.Linear(2, 2)
    assert kept_of(layer, fs.StepResult) is None
    assert not [name for name in vars(layer) if name.startswith("_fsdp_sft")]
