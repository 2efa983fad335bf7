"""The order in which ranks that share rows begin their collectives, compiled by inductor: the same on all."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import fsdp_sft as fs
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.ranks import run_distributed

STEPS = 3


def _begun() -> list[list[str]]:
    """Of each step the collectives of this rank, as its threads began them: over devices, then forms."""
    mesh = fs.build_mesh(cp=2, device_type="cpu")
    model = tiny_model("llama", num_hidden_layers=4)
    fs.apply_sac(model, "1/2")
    fs.compile_blocks(model)
    fs.shard_model(model, mesh=mesh)
    fs.use_context_parallel(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    share = dist.get_rank() // 2
    found = []
    for step in range(STEPS):
        window = ragged_batches(4, seed=step)[share::2]
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            fs.train_step(model, window, optimizer)
        events: Any = recorded.events()
        begun = sorted((event.time_range.start, event.name) for event in events if _is_collective(event.name))
        found.append([name for _, name in begun])
    return found


def _is_collective(name: str) -> bool:
    forms = ("all_to_all", "alltoall", "reduce_scatter", "allgather", "all_gather", "allreduce")
    return name.startswith(("_c10d_functional::", "c10d::")) and any(form in name for form in forms)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_begin_their_collectives_in_one_order() -> None:
    found = run_distributed(_begun, 4, timeout=800)
    for step in range(STEPS):
        exchanges = sum("all_to_all" in name or "alltoall" in name for name in found[0][step])
        # of 4 layers in 2 micro-batches two exchanges forward and back, and again those of 2 layers
        assert exchanges >= 2 * 4 * 2 * 2 + 2 * 2 * 2 - 2 * 2, found[0][step]
        assert all(of_rank[step] == found[0][step] for of_rank in found), f"step {step}"
