"""The loss without logits where peft has changed the head, somebody hooks it, or its scale changes later."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.losses import ADAPTERS, ADDED, Largest, adapted_model, with_loss
from tests.harness.models import (
    VOCAB,
    full,
    largest_error,
    oracle_gradients,
    oracle_loss,
    ragged_batches,
    tiny_model,
)
from tests.harness.ranks import run_distributed


def _window(model: Any, batches: list[Any]) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(7)  # of dropout
    total, targets = 0.0, fs.count_targets(batches)
    for batch in batches:
        loss = fs.causal_lm_loss(model, batch, num_targets=targets)
        loss.backward()
        total += float(loss.detach())
    gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return total, gradients


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_head_with_adapters_needs_no_logits(kind: str) -> None:
    pytest.importorskip("peft")
    model, batches = adapted_model(kind, torch.float64), ragged_batches(2)
    twin = copy.deepcopy(model)
    torch.manual_seed(7)
    expected = oracle_loss(twin, batches)
    expected.backward()
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    assert fs.prepare_loss(model) == "chunked"
    loss, fused = _window(model, batches)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-9)
    assert largest_error(fused, gradients) <= 1e-9
    with model.disable_adapter():
        assert float(fs.loss_sum(with_loss(model, impl="chunked"), batches[0])[0].detach()) == pytest.approx(
            float(fs.loss_sum(with_loss(model, impl="logits"), batches[0])[0].detach()), rel=1e-9
        )
    fs.prepare_loss(model)
    rows = torch.randint(3, VOCAB, (1, 1000), generator=torch.Generator().manual_seed(0))
    long = {"input_ids": rows[:, :100].repeat(10, 1), "labels": rows[:, :100].repeat(10, 1)}
    with Largest() as largest:
        fs.loss_sum(model, long)[0].backward()
    assert largest.numel < 1000 * VOCAB, "as large as the logits"


@pytest.mark.parametrize("kind", ADDED)
def test_lora_on_the_head_gets_full_logits(kind: str) -> None:
    pytest.importorskip("peft")
    model, batches = adapted_model(kind, torch.float64), ragged_batches(2)
    with pytest.raises(fs.ModelLossError, match=r"not a plain nn\.Linear: .*peft"):
        fs.prepare_loss(model, impl="chunked")
    torch.manual_seed(7)
    expected = oracle_loss(model, batches)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert fs.prepare_loss(model) == "logits"
    loss, own = _window(model, batches)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-9)
    assert largest_error(own, gradients) <= 1e-9


def _check_sharded() -> None:
    batches = ragged_batches(2)
    mine = batches[dist.get_rank() :: dist.get_world_size()]
    for kind, impl in (("modules_to_save", "chunked"), ("lora", "logits")):
        model = adapted_model(kind)
        loss, expected = oracle_gradients(model, batches)
        fs.shard_model(model, mesh=mesh_here(), mp_policy=MixedPrecisionPolicy())
        assert fs.prepare_loss(model) == impl, kind
        _, actual = _window(model, mine)
        error = largest_error(actual, expected)
        assert error <= 1e-6, (kind, error)
        assert fs.evaluate(model.eval(), mine).loss == pytest.approx(loss, rel=1e-6)


def test_sharded_heads_with_adapters() -> None:
    pytest.importorskip("peft")
    run_distributed(_check_sharded, 2)


def _doubled(_module: Any, _args: Any, output: Any) -> Any:
    if not isinstance(output, torch.Tensor):
        output.logits = output.logits * 2
        return output
    return output * 2


@pytest.mark.parametrize("place", ["lm_head", ""])
def test_a_hook_that_changes_the_logits_is_heeded(place: str) -> None:
    batch, model = ragged_batches(1)[0], tiny_model("llama")
    model.get_submodule(place).register_forward_hook(_doubled)
    expected = float(oracle_loss(model, [batch]).detach())
    try:
        total, count = fs.loss_sum(model, batch)
    except fs.ModelLossError:
        assert place == "", "the model's own loss is computed before this hook"
    else:
        assert float(total.detach()) / count == pytest.approx(expected, rel=1e-5)
        with pytest.raises(fs.ModelLossError, match="neither a scale nor a soft cap"):
            fs.loss_sum(with_loss(model, impl="chunked"), batch)


def test_hooks_that_change_nothing_of_the_logits_cost_nothing() -> None:
    """One before the head, whose work the head is given, one that only looks, and torch's own observers."""
    from torch.distributed.tensor.debug import CommDebugMode

    batch, model = ragged_batches(1)[0], tiny_model("llama")
    model.lm_head.register_forward_pre_hook(lambda _module, args: (args[0] * 0.5,))
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    expected = float(oracle_loss(model, [batch]).detach())
    fs.prepare_loss(model, impl="chunked")
    with CommDebugMode():
        total, count = fs.loss_sum(model, batch)
    assert float(total.detach()) / count == pytest.approx(expected, rel=1e-5)
    assert seen[-1] == (), "the loss in place of the logits, as prepare_loss says"
