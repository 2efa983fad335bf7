"""What is trained gets its gradient from the reduction over the ranks alone: right, or refused."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_sft as fs
from tests.harness.models import FLOAT32, full, largest_error, ragged_batches, tiny_model
from tests.harness.ranks import device_here, mesh_here, on_ranks
from tests.plain import mean_loss, step


def _sharded(model: Any = None, **shape: int) -> Any:
    model = tiny_model("llama") if model is None else model
    return fs.shard_model(model, mesh=mesh_here(**shape), mp_policy=FLOAT32)


def _mine(count: int = 2) -> list[Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return ragged_batches(count * ranks)[rank::ranks]


Cause = Callable[[Any, Any], dict[str, Any] | None]


def _added_later(model: Any, optimizer: Any) -> None:
    model.value_head = nn.Linear(32, 1, device=device_here())
    optimizer.add_param_group({"params": list(model.value_head.parameters())})


def _watched_by_one(model: Any, optimizer: Any) -> None:
    if dist.get_rank() == 0:
        fs.watch_experts(model)


def _replaced(name: str, gathered: bool, model: Any, optimizer: Any) -> None:
    fs.train_step(model, _mine(), optimizer)
    if gathered:
        with torch.no_grad():
            model(input_ids=_mine()[0]["input_ids"].to(device_here()))
    module = model.get_submodule(name)
    module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)


def _other_rate(made: Callable[[float], Any], model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = made(1e-3 * (1 + dist.get_rank()))


def _other_scale(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"scaler": torch.amp.GradScaler(device_here().type, init_scale=2.0 ** (8 + dist.get_rank()))}


def _frozen(some: Callable[[Any], Any], model: Any, optimizer: Any) -> None:
    some(model).requires_grad_(False)


def _frozen_on_one(model: Any, optimizer: Any) -> None:
    model.requires_grad_(dist.get_rank() == 0)


# By what is done to a model and its optimizer on each rank: the error, and words of it.
CASES: dict[str, tuple[Cause, type[Exception], str]] = {
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
    "all frozen": (partial(_frozen, lambda model: model), fs.OptimizerError, "no parameter is trained"),
    "all frozen on one": (_frozen_on_one, fs.OptimizerError, "no parameter is trained"),
    "another norm in a tensor": (
        lambda model, optimizer: {"max_grad_norm": torch.tensor(1.0 if dist.get_rank() else 0.01)},
        fs.BatchError,
        "max_grad_norm=",
    ),
    "layers frozen by chance": (
        partial(_frozen, lambda model: model.model.layers[dist.get_rank()]),
        fs.BatchError,
        r"trained: model.layers.1.*and model.layers.0",
    ),
    "another rate in a tensor": (
        partial(_other_rate, torch.tensor),
        fs.BatchError,
        r"lr=0.001\d* of group 0 of SGD and",
    ),
    "another number in a tuple": (  # tensors that print alike
        partial(_other_rate, lambda rate: (torch.tensor(1 + rate / 1e3), 0.9)),
        fs.BatchError,
        r"lr=\(1.00000\d*, 0.9\) of group 0 of SGD and",
    ),
    "another rate": (
        partial(_other_rate, float),
        fs.BatchError,
        r"lr=0.001 of group 0 of SGD and lr=0.002 of group 0",
    ),
    "another scale": (_other_scale, fs.BatchError, r"scale=256.0 and 512.0"),
}
FAMILIES = {"a tied head that was untied": "qwen2-tied", "experts watched by one rank": "mixtral"}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2, timeout=60)
def test_refused_on_all_ranks(case: str) -> None:
    cause, kind, words = CASES[case]
    model = _sharded(tiny_model(FAMILIES.get(case, "llama")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    options = cause(model, optimizer) or {}
    with pytest.raises(kind) as caught:
        fs.train_step(model, _mine(), optimizer, **options)
    assert re.search(words, str(caught.value)), str(caught.value)


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


@pytest.mark.parametrize("kept", [True, False])
@on_ranks(2)
def test_what_is_frozen_while_it_is_gathered_stays_frozen(kept: bool) -> None:
    """The caller freezes a layer and a head that its own forward has left gathered, and later thaws them."""
    model, plain = tiny_model("llama"), tiny_model("llama").to(device_here())
    fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32, reshard_after_forward=kept)
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
        step(plain, [mean_loss(plain, batches)], [optimizers[1]])
    values = {name: full(parameter) for name, parameter in model.named_parameters()}
    assert largest_error(values, {n: p.detach().cpu() for n, p in plain.named_parameters()}) <= 1e-5
