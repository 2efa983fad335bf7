"""The order in which ranks begin their collectives when blocks that exchange are compiled: the same on all.

Ranks that enter an exchange and a reduction of gradients in different orders wait for each other for ever.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import fsdp_sft as fs
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.ranks import run_distributed

STEPS, LAYERS, MICRO_BATCHES = 3, 4, 2
EXCHANGE = "c10d::alltoall_base_"
# What is handed to a process group, and not what of it is traced.
BEGUN = {EXCHANGE, "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"}


def _begun(backend: str) -> list[list[str]]:
    """Of each step the collectives of this rank's device in the order in which they were begun."""
    mesh = fs.build_mesh(cp=2, device_type="cpu")
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    fs.apply_sac(model, "1/2")
    fs.compile_blocks(model, backend=backend)
    fs.shard_model(model, mesh=mesh)
    fs.use_context_parallel(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shares = dist.get_world_size() // 2
    found = []
    for step in range(STEPS):
        window = ragged_batches(MICRO_BATCHES * shares, seed=step)[dist.get_rank() // 2 :: shares]
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            fs.train_step(model, window, optimizer)
        events: Any = recorded.events()
        begun = sorted((event.time_range.start, event.name) for event in events if event.name in BEGUN)
        found.append([name for _, name in begun])
    return found


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("aot_eager", 2),
        pytest.param("inductor", 4, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_ranks_begin_their_collectives_in_one_order(backend: str, ranks: int) -> None:
    found = run_distributed(_begun, ranks, backend, timeout=240 if ranks == 2 else 800)
    # Two around each attention, forward and backward, and again where half of the layers are recomputed.
    # torch 2.11 keeps what exchanges bring in compiled code, and recomputes none.
    exchanges = {MICRO_BATCHES * 2 * (2 * LAYERS + again) for again in (0, LAYERS // 2)}
    for step in range(STEPS):
        counted = {of_rank[step].count(EXCHANGE) for of_rank in found}
        assert len(counted) == 1
        assert counted <= exchanges
        assert set(found[0][step]) == BEGUN
        assert all(of_rank[step] == found[0][step] for of_rank in found), f"step {step}"
