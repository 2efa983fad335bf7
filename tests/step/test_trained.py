"""What is trained gets its gradient from the reduction over the ranks alone: right, or refused."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp_sft as fs
from tests.harness.device import device_here, mesh_here
from tests.harness.models import (
    full,
    largest_error,
    oracle_gradients,
    oracle_loss,
    ragged_batches,
    tiny_model,
)
from tests.harness.ranks import run_distributed


def _sharded(model: Any = None, **shape: int) -> Any:
    model = tiny_model("llama") if model is None else model
    return fs.shard_model(model, mesh=mesh_here(**shape), mp_policy=MixedPrecisionPolicy())


def _mine(count: int = 2) -> list[Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return ragged_batches(count * ranks)[rank::ranks]


def _added_later() -> Any:
    model = _sharded()
    model.value_head = nn.Linear(32, 1, device=device_here())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda: fs.train_step(model, _mine(), optimizer)


def _frozen_by_chance() -> Any:
    model = _sharded()
    model.model.layers[dist.get_rank()].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return lambda: fs.train_step(model, _mine(), optimizer)


def _other_rate() -> Any:
    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * (1 + dist.get_rank()))
    return lambda: fs.train_step(model, _mine(), optimizer)


def _other_rate_in_a_tensor() -> Any:
    model = _sharded()
    rate = torch.tensor(1e-3 * (1 + dist.get_rank()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    return lambda: fs.train_step(model, _mine(), optimizer)


def _other_scale() -> Any:
    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device_here().type, init_scale=2.0 ** (8 + dist.get_rank()))
    return lambda: fs.train_step(model, _mine(), optimizer, scaler=scaler)


def _replaced(name: str, gathered: bool) -> Any:
    model = _sharded(tiny_model("qwen2-tied" if name == "lm_head" else "llama"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fs.train_step(model, _mine(), optimizer)
    if gathered:
        with torch.no_grad():
            model(input_ids=_mine()[0]["input_ids"].to(device_here()))
    module = model.get_submodule(name)
    module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    return lambda: fs.train_step(model, _mine(), optimizer)


def _values_replaced() -> None:
    """As the message on replaced parameters advises."""
    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    fs.train_step(model, _mine(), optimizer)
    parameter, value = model.lm_head.weight, torch.ones(101, 32, device=device_here())
    with torch.no_grad():
        parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))
    fs.train_step(model, _mine(), optimizer)
    assert torch.equal(full(model.lm_head.weight), value.cpu())


def test_values_are_replaced_in_place() -> None:
    run_distributed(_values_replaced, 2)


def _watched_by_one() -> Any:
    model = _sharded(tiny_model("mixtral"))
    if dist.get_rank() == 0:
        fs.watch_experts(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda: fs.train_step(model, _mine(), optimizer)


def _all_frozen() -> Any:
    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    return lambda: fs.train_step(model, _mine(), optimizer)


def _frozen_on_one() -> Any:
    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(dist.get_rank() == 0)
    return lambda: fs.train_step(model, _mine(), optimizer)


def _other_norm() -> Any:
    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm = torch.tensor(1.0 if dist.get_rank() else 0.01)
    return lambda: fs.train_step(model, _mine(), optimizer, max_grad_norm=norm)  # type: ignore[arg-type]


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "added after sharding": (
        _added_later,
        fs.UnsupportedModelError,
        r"2 trained parameters are not sharded \(value",
    ),
    "a tied head that was untied": (
        partial(_replaced, "lm_head", False),
        fs.UnsupportedModelError,
        "lm_head.weight were replaced",
    ),
    "a gathered weight that was replaced": (
        partial(_replaced, "model.embed_tokens", True),
        fs.UnsupportedModelError,
        "model.embed_tokens.weight were replaced",
    ),
    "a weight of a block that was replaced": (
        partial(_replaced, "model.layers.0.mlp.up_proj", False),
        fs.UnsupportedModelError,
        "up_proj.weight were replaced",
    ),
    "experts watched by one rank": (_watched_by_one, fs.BatchError, "watched=True and False"),
    "all frozen": (_all_frozen, fs.OptimizerError, "no parameter is trained"),
    "all frozen on one": (_frozen_on_one, fs.OptimizerError, "no parameter is trained"),
    "another norm in a tensor": (_other_norm, fs.BatchError, "max_grad_norm="),
    "layers frozen by chance": (
        _frozen_by_chance,
        fs.BatchError,
        r"trained: model.layers.1.*and model.layers.0",
    ),
    "another rate in a tensor": (
        _other_rate_in_a_tensor,
        fs.BatchError,
        r"lr=0.001\d* of group 0 of AdamW and",
    ),
    "another rate": (_other_rate, fs.BatchError, r"lr=0.001 of group 0 of AdamW and lr=0.002 of group 0"),
    "another scale": (_other_scale, fs.BatchError, r"scale=256.0 and 512.0"),
}


def _refused(case: str) -> None:
    make, kind, words = CASES[case]
    call = make()
    with pytest.raises(kind) as caught:
        call()
    assert re.search(words, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_refused_on_all_ranks(case: str) -> None:
    run_distributed(_refused, 2, case, timeout=60)


def _only_new_rows(model: Any) -> None:
    """As the message on hooks advises."""

    def hook(parameter: Any) -> None:
        gradient = parameter.grad
        rows = torch.arange(gradient.shape[0], device=gradient.device).view(-1, 1) >= 90
        if isinstance(gradient, DTensor):
            rows = torch.distributed.tensor.distribute_tensor(rows, gradient.device_mesh, gradient.placements)
        parameter.grad = gradient * rows

    model.lm_head.weight.register_post_accumulate_grad_hook(hook)


def _advice_on_hooks() -> float:
    ranks = dist.get_world_size()
    batches = ragged_batches(2 * ranks)
    plain = tiny_model("llama").to(device_here())
    model = _sharded(tiny_model("llama"))
    before = {name: full(p).clone() for name, p in model.named_parameters()}
    _only_new_rows(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = fs.train_step(model, _mine(), optimizer, max_grad_norm=None)
    _, expected = oracle_gradients(plain.cpu(), batches)
    expected["lm_head.weight"][:90] = 0
    moved = {name: before[name] - full(p) for name, p in model.named_parameters()}
    norm = sum(float(g.double().square().sum()) for g in expected.values()) ** 0.5
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    return largest_error(moved, expected)


def test_the_advised_hook_gives_the_gradients_of_one_process() -> None:
    assert max(run_distributed(_advice_on_hooks, 2)) < 1e-5


def test_one_process_trains_what_it_is_given() -> None:
    model, scale = tiny_model("llama"), nn.Parameter(torch.ones(()))
    model.lm_head.weight.register_hook(lambda gradient: 0 * gradient)
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    before = model.lm_head.weight.detach().clone()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return scale * fs.loss_sum(model, batch)[0]

    fs.train_step(model, ragged_batches(2), optimizer, loss_fn=loss)
    assert scale != 1.0
    assert torch.equal(before, model.lm_head.weight)


def _frozen_while_gathered(kept: bool | int) -> None:
    """The caller freezes a layer and a head that its own forward has left gathered, and later thaws them."""
    model, plain = tiny_model("llama"), tiny_model("llama").to(device_here())
    fs.shard_model(model, mesh=mesh_here(), mp_policy=MixedPrecisionPolicy(), reshard_after_forward=kept)
    batches = [{k: v.to(device_here()) for k, v in b.items()} for b in ragged_batches(4)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for trained in (True, False, False, True):
        with torch.no_grad():
            model(input_ids=batches[0]["input_ids"])
        for each in (model, plain):
            each.lm_head.requires_grad_(trained)
            each.model.layers[1].requires_grad_(trained)
        with torch.no_grad():
            model(input_ids=batches[0]["input_ids"])
        fs.train_step(model, batches[dist.get_rank() :: 2], optimizers[0], max_grad_norm=None)
        oracle_loss(plain, batches).backward()
        optimizers[1].step()
        plain.zero_grad()
    values = {name: full(parameter) for name, parameter in model.named_parameters()}
    assert largest_error(values, {n: p.detach().cpu() for n, p in plain.named_parameters()}) <= 1e-5


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_frozen_while_it_is_gathered_stays_frozen(kept: bool) -> None:
    run_distributed(_frozen_while_gathered, 2, kept)


def _reference_without_adapters() -> None:
    """peft freezes the adapters while they are disabled, and thaws them afterwards."""
    import peft

    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_model("llama"), config)
    fs.apply_sac(model, "1/3")
    fs.shard_model(model, mesh=mesh_here(), mp_policy=MixedPrecisionPolicy(), reshard_after_forward=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    norms = []
    for _ in range(2):
        norms.append(fs.train_step(model, _mine(), optimizer).grad_norm)
        with model.disable_adapter(), torch.no_grad():
            model(input_ids=_mine()[0]["input_ids"].to(device_here()))
    assert norms[0] > 0.1
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


def test_adapters_are_trained_after_a_forward_without_them() -> None:
    run_distributed(_reference_without_adapters, 2)
