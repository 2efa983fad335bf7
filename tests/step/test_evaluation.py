"""evaluate against the plain single process."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.models import oracle_loss, ragged_batches, tiny_model
from tests.harness.ranks import on_ranks

FLOAT32 = MixedPrecisionPolicy()


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks(timeout=60)
def test_evaluate_is_exact_at_unequal_counts(ranks: int) -> None:
    rank = dist.get_rank()
    batches = ragged_batches(5)
    expected = float(oracle_loss(tiny_model("gpt2").eval(), batches).detach())
    model = fs.shard_model(tiny_model("gpt2"), mesh=mesh_here(), mp_policy=FLOAT32)
    shares = {0: batches[:3], 1: batches[3:]}.get(rank, [])
    for share in (shares, batches if rank == ranks - 1 else []):
        model.transformer.h[0].eval()
        result = fs.evaluate(model, iter(share))
        assert result.loss == pytest.approx(expected, rel=1e-6)
        assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
        assert result.num_targets == sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
        assert model.training
        assert not model.transformer.h[0].training, "each module's own mode is restored"
        assert all(hasattr(p, "placements") for p in model.parameters()), "sharded again"
    # A rank that has run out needs no batch of the others': these cannot be sent.
    noted = [{**batch, "note": lambda: None} for batch in shares + shares[:1]]
    uneven = noted if rank == 0 else noted[:1]

    def without_note(model: Any, batch: Any) -> torch.Tensor:
        return fs.loss_sum(model, {name: value for name, value in batch.items() if name != "note"})[0]

    if ranks == 2:
        assert fs.evaluate(model, uneven, loss_fn=without_note).num_targets > 0
    with pytest.raises(ValueError, match="no target on any rank"):
        fs.evaluate(model, batches[-1:] if rank == 0 else [])

    def failing() -> Any:
        yield batches[0]
        if rank == ranks - 1:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        fs.evaluate(model, failing())


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_in_inference_mode_and_training_after_it(ranks: int) -> None:
    batches = ragged_batches(2)
    expected = float(oracle_loss(tiny_model("llama").eval(), batches).detach())
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here(), mp_policy=FLOAT32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    own = batches if dist.get_rank() == 0 else []
    for _ in range(2):  # before the first step, and after it
        with torch.inference_mode():
            assert fs.evaluate(model, own).loss == pytest.approx(expected, rel=1e-6)
        assert fs.train_step(model, batches, optimizer).loss == pytest.approx(expected, rel=1e-6)
