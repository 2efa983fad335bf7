"""Ranks that have experts of their own: models that transformers shards, trained and stored beside one process."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from tests.harness.models import full, largest_error, oracle_gradients, ragged_batches
from tests.harness.native import load_native, needs_native_sharding, rows_of_rank, save_mixture
from tests.harness.ranks import run_distributed

# Each with 8 experts, so that 2 and 4 ranks have whole ones.
EIGHT = {
    "MixtralForCausalLM": {"num_local_experts": 8},
    "Qwen3MoeForCausalLM": {"num_experts": 8},
    "GptOssForCausalLM": {"num_local_experts": 8},
    "DeepseekV3ForCausalLM": {
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
}
EP2 = {"fsdp_size": 4, "ep_size": 2}
EP4 = {"fsdp_size": 4, "ep_size": 4}
FSDP = {"fsdp_size": 4}
HYBRID = {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2}


@pytest.fixture(scope="module", params=list(EIGHT))
def folder(request: Any, tmp_path_factory: Any) -> str:
    needs_native_sharding()
    return save_mixture(tmp_path_factory.mktemp("mixture"), request.param, **EIGHT[request.param])


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: Any) -> str:
    needs_native_sharding()
    name = "MixtralForCausalLM"
    return save_mixture(tmp_path_factory.mktemp("mixture"), name, **EIGHT[name])


def _expected(model: Any, batches: list[Any], max_norm: float) -> tuple[float, float, dict[str, Any]]:
    loss, gradients = oracle_gradients(model, batches)
    plain = copy.deepcopy(model)
    for name, parameter in plain.named_parameters():
        parameter.grad = gradients.get(name)
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm))
    return loss, norm, {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}


def _check_step(folder: str, options: dict[str, int], dtype: torch.dtype, prepare: str) -> None:
    """One step of SGD with rate 1, whose move is the clipped gradient."""
    batches = ragged_batches(9)[:8]
    model = load_native(folder, options, dtype=dtype)
    if "sac" in prepare:
        fs.apply_sac(model, 1)
    if "compile" in prepare:
        fs.compile_blocks(model, backend="aot_eager")
    before = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = fs.train_step(
        model,
        rows_of_rank(batches, options),
        optimizer,
        max_grad_norm=0.05,
        loss_impl="chunked" if "chunked" in prepare else "logits",
        grad_sync="last" if "last" in prepare else "each",
        router_loss="off",
    )
    exact = dtype == torch.float64
    loss, norm, gradients = _expected(load_native(folder, None, dtype=dtype), batches, 0.05)
    assert result.loss == pytest.approx(loss, rel=1e-12 if exact else 1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-12 if exact else 1e-5)
    assert norm > 0.05, "it is clipped"
    moved = {name: before[name] - full(p.detach()) for name, p in model.named_parameters()}
    unused = moved.keys() - gradients.keys()
    assert not any(moved.pop(name).any() for name in unused)
    assert largest_error(moved, gradients) <= (1e-12 if exact else 5e-5)


@pytest.mark.parametrize("options", [EP2, EP4], ids=["ep2", "ep4"])
def test_a_step_is_that_of_one_process(folder: str, options: dict[str, int]) -> None:
    run_distributed(_check_step, 4, folder, options, torch.float32, "sac chunked")


def test_in_float64_to_the_last_digits(mixtral: str) -> None:
    run_distributed(_check_step, 4, mixtral, EP2, torch.float64, "logits")


def test_with_replicas(mixtral: str) -> None:
    run_distributed(_check_step, 4, mixtral, HYBRID, torch.float32, "logits")


def _check_divided_twice(folder: str) -> None:
    model = load_native(folder, EP4, dtype=torch.float64)
    batches = rows_of_rank(ragged_batches(8), EP4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for attempt in (
        lambda: fs.train_step(model, batches, optimizer, router_loss="off"),
        lambda: fs.causal_lm_loss(model, batches[0], num_targets=4, router_loss="off"),
    ):
        with pytest.raises(fs.UnsupportedModelError, match="divided by the ranks twice"):
            attempt()
    # What it is about: the day this gradient is right, the refusal can go.
    loss = fs.scale_for_backward(fs.loss_sum(model, batches[0], router_loss="off")[0], num_targets=4)
    loss.backward()
    found = full(model.model.layers[0].mlp.experts.down_proj.grad)
    plain = load_native(folder, None, dtype=torch.float64)
    every = ragged_batches(8)[:4]
    sum(fs.loss_sum(plain, batch, router_loss="off")[0] / 4 for batch in every).backward()
    torch.testing.assert_close(found * 4, plain.model.layers[0].mlp.experts.down_proj.grad)


def test_gradients_that_torch_divides_twice_are_refused(mixtral: str) -> None:
    run_distributed(_check_divided_twice, 4, mixtral)


@pytest.mark.parametrize("prepare", ["sac last", pytest.param("compile sac", marks=pytest.mark.slow)])
def test_prepared_in_other_ways(mixtral: str, prepare: str) -> None:
    run_distributed(_check_step, 4, mixtral, EP2, torch.float32, prepare)
