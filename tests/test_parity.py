"""Gradients, losses and steps of the sharded model against the unsharded single process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

import fsdp_sft as fs
from tests.harness.models import FLOAT32, full, largest_error, oracle_gradients, ragged_batches, tiny_model
from tests.harness.ranks import mesh_here, run_distributed

FAMILIES = ["llama", "qwen2", "qwen2-tied", "gemma3", "mixtral", "gpt2"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}


def _sharded_gradients(
    model: Any,
    mine: list[Any],
    *,
    mesh_shape: dict[str, int] | None = None,
    accumulate: str = "all",
    of_tokens: bool = False,
    **shard_options: Any,
) -> tuple[float, dict[str, torch.Tensor]]:
    mesh = mesh_here(**(mesh_shape or {}))
    fs.shard_model(model, mesh=mesh, **shard_options)
    targets = fs.count_targets(mine)
    losses = []
    for index, batch in enumerate(mine):
        with fs.gradient_sync(model, "all" if index == len(mine) - 1 else accumulate):
            if of_tokens:
                loss = fs.scale_for_backward(fs.token_losses(model, batch).sum(), num_targets=targets)
            else:
                loss = fs.causal_lm_loss(model, batch, num_targets=targets)
            loss.backward()
        losses.append(loss.item())
    total = torch.tensor(sum(losses) / mesh.size(), dtype=torch.float64)
    torch.distributed.all_reduce(total)
    gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return float(total), gradients


def _check_families(
    families: list[str],
    dtype: torch.dtype,
    accumulation: int,
    *,
    prepare: str = "",
    **options: Any,
) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for family in families:
        batches = ragged_batches(ranks * accumulation)
        model = tiny_model(family, dtype=dtype)
        if prepare == "freeze":
            model.get_input_embeddings().requires_grad_(False)
        expected_loss, expected = oracle_gradients(model, batches)
        if prepare in ("sac", "compile"):
            assert fs.apply_sac(model, "1/3")
        if prepare == "compile":
            fs.compile_blocks(model, backend="aot_eager")
        options = {"mp_policy": FLOAT32, "master_dtype": dtype, **options}
        loss, actual = _sharded_gradients(model, batches[rank::ranks], **options)
        error = largest_error(actual, expected)
        assert error <= TOLERANCE[dtype], f"{family}: gradient error {error:.2e}"
        assert abs(loss - expected_loss) <= TOLERANCE[dtype] * max(1, abs(expected_loss)), family


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_equal_the_single_process(world_size: int, dtype: torch.dtype) -> None:
    run_distributed(_check_families, world_size, FAMILIES, dtype, 1)


CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "accumulate, sync each": (2, 3, {}),
    "accumulate, sync last": (2, 3, {"accumulate": "none"}),
    "hsdp": (4, 2, {"mesh_shape": {"dp_replicate": 2}}),
    "hsdp, all-reduce deferred": (4, 3, {"mesh_shape": {"dp_replicate": 2}, "accumulate": "reduce_scatter"}),
    "ddp": (2, 3, {"mesh_shape": {"dp_replicate": 2, "dp_shard": 1}}),
    "reshard False": (2, 2, {"reshard_after_forward": False}),
    "reshard 2": (4, 2, {"reshard_after_forward": 2}),
    "offload": (2, 2, {"offload_policy": CPUOffloadPolicy()}),
    "frozen embedding": (2, 2, {"prepare": "freeze"}),
    "losses of tokens": (2, 3, {"of_tokens": True, "accumulate": "none"}),
    "losses of tokens, offload": (2, 2, {"of_tokens": True, "offload_policy": CPUOffloadPolicy()}),
    "sac": (2, 2, {"prepare": "sac"}),
    "compile": (2, 2, {"prepare": "compile"}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case == "compile" else case for case in CASES]
)
def test_gradients_equal_the_single_process_with(case: str) -> None:
    world_size, accumulation, options = CASES[case]
    families = ["llama", "qwen2-tied"] if case != "compile" else ["qwen2-tied"]
    run_distributed(_check_families, world_size, families, torch.float64, accumulation, **options)
