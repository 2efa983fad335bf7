"""Gradients on several meshes, or on none, as models that transformers shards have them."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard

import fsdp_sft as fs
from fsdp_sft.step.update import clip_gradients
from tests import plain
from tests.harness.models import full, largest_error, ragged_batches, tiny_model
from tests.harness.ranks import device_here, device_type, on_ranks, run_distributed


def _expected(
    model: Any, batches: list[Any], max_norm: float
) -> tuple[float, float, dict[str, torch.Tensor]]:
    model, gradients = copy.deepcopy(model), dict[str, torch.Tensor]()
    losses = [plain.mean_loss(model, batches)]
    return *plain.step(model, losses, [], max_norm=max_norm, keep=gradients), gradients


def _check_step(model: Any, beside: Any, batches: list[Any], mine: list[Any]) -> None:
    """One step of SGD with rate 1, whose move is the clipped gradient."""
    loss, norm, expected = _expected(beside, batches, 0.5)
    before = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    result = fs.train_step(model, mine, optimizer, max_grad_norm=0.5)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert norm > 0.5, "it is clipped"
    moved = {name: before[name] - full(p.detach()) for name, p in model.named_parameters()}
    assert largest_error(moved, expected) <= 2e-5


@on_ranks(4)
def test_the_norm_over_several_meshes_is_that_of_the_whole() -> None:
    rows = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("a", "b"))
    columns = init_device_mesh(device_type(), (4,))
    layouts = [
        (rows, [Shard(0), Shard(1)]),
        (rows["a"], [Shard(0)]),
        (rows["b"], [Replicate()]),
        (columns, [Shard(0)]),
    ]
    for max_norm in (None, 0.5, 1e9):
        torch.manual_seed(0)
        whole = torch.nn.ParameterList(torch.randn(6, 5) for _ in range(6))
        sharded = torch.nn.ParameterList()
        for index, parameter in enumerate(whole):
            parameter.grad = torch.randn(6, 5)
            value, gradient = (x.detach().clone().to(device_here()) for x in (parameter, parameter.grad))
            if index < len(layouts):
                value, gradient = (distribute_tensor(x, *layouts[index]) for x in (value, gradient))
            sharded.append(torch.nn.Parameter(value))
            sharded[-1].grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e12 if max_norm is None else max_norm)
        assert float(clip_gradients(sharded, max_norm)) == pytest.approx(float(norm), rel=1e-6)
        for one, other in zip(whole, sharded, strict=True):
            torch.testing.assert_close(full(other.grad), one.grad)


def test_the_norm_of_many_elements_on_the_host_is_exact() -> None:
    parameter = torch.nn.Parameter(torch.empty(3_000_000))  # on the host, where torch's own is 3e-5 off
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    exact = float(parameter.grad.double().norm())
    assert float(clip_gradients(torch.nn.ParameterList([parameter]), None)) == pytest.approx(exact, rel=1e-6)


def _check_expert_parallel(folder: str, options: dict[str, int]) -> None:
    import transformers as tf
    from transformers.distributed import DistributedConfig

    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    beside = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    model = tf.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=DistributedConfig(**options)
    ).train()
    if options.get("tp_size", 1) > 1:
        with pytest.raises(fs.UnsupportedModelError, match=r"along layers \(tp\)"):
            fs.evaluate(model, ragged_batches(2))
        return
    batches = ragged_batches(2 * ranks)
    _check_step(model, beside, batches, batches[rank::ranks])


@pytest.mark.parametrize(
    "options", [{"tp_size": 2}, {"tp_size": 2, "ep_size": 2}, {"fsdp_size": 2, "tp_size": 1}]
)
def test_models_that_transformers_shards_have_one_norm_or_are_refused(
    options: dict[str, int], tmp_path: Path
) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    run_distributed(_check_expert_parallel, 2, str(tmp_path), options)
