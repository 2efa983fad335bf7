"""evaluate against the plain single process."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from tests.harness.long_rows import sharing_rows
from tests.harness.losses import summed_of_logits
from tests.harness.models import FLOAT32, oracle_loss, ragged_batches, tiny_model
from tests.harness.ranks import mesh_here, on_ranks


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks(timeout=60)
def test_evaluate_is_exact_at_unequal_counts(ranks: int) -> None:
    rank, batches = dist.get_rank(), ragged_batches(5)
    expected = float(oracle_loss(tiny_model("gpt2").eval(), batches).detach())
    model = fs.shard_model(tiny_model("gpt2"), mesh=mesh_here(), mp_policy=FLOAT32)
    shares = {0: batches[:3], 1: batches[3:]}.get(rank, [])
    for share in (shares, batches if rank == ranks - 1 else []):
        model.transformer.h[0].eval()
        result = fs.evaluate(model, iter(share))
        assert (result.loss, result.perplexity, result.num_targets) == (
            pytest.approx(expected, rel=1e-6),
            pytest.approx(math.exp(expected), rel=1e-5),
            sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches),
        )
        assert model.training
        assert not model.transformer.h[0].training, "each module's own mode is restored"
        assert all(hasattr(p, "placements") for p in model.parameters()), "sharded again"
    # A rank that has run out needs no batch of the others': these cannot be sent.
    noted = [{**batch, "note": lambda: None} for batch in shares + shares[:1]]

    def without_note(model: Any, batch: Any) -> torch.Tensor:
        return fs.loss_sum(model, {name: value for name, value in batch.items() if name != "note"})[0]

    if ranks == 2:
        own = noted if rank == 0 else noted[:1]
        assert fs.evaluate(model, own, loss_fn=without_note).num_targets > 0
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


@pytest.mark.parametrize("loss_fn", [None, summed_of_logits])
@on_ranks(2)
def test_what_a_forward_has_gathered_is_not_evaluated_after_an_update(loss_fn: Any) -> None:
    (batch,) = ragged_batches(1)
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here(), mp_policy=FLOAT32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"loss_fn": loss_fn, "check": False}
    before = fs.evaluate(model, [batch], **options).loss
    fs.causal_lm_loss(model, batch, num_targets=fs.count_targets([batch])).backward()
    with torch.no_grad():
        model(input_ids=batch["input_ids"])  # leaves the root gathered
    optimizer.step()
    found = fs.evaluate(model, [batch], **options).loss
    model.reshard()
    assert found == fs.evaluate(model, [batch], **options).loss != before


# --- the share of targets whose logit is the largest, beside an argmax over plain logits in one process -----


def _one_way(model: Any, batches: list[Any]) -> float:
    right = targets = 0
    with torch.no_grad():
        for batch in batches:
            labels = batch["labels"][:, 1:]
            logits = model(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits[:, :-1]
            counts = labels != -100
            right += int(((logits.argmax(-1) == labels) & counts).sum())
            targets += int(counts.sum())
    return right / targets


def _learned(family: str, batches: list[Any]) -> Any:
    """A model that has seen some of the targets before, so that its accuracy is neither 0 nor 1."""
    model = tiny_model(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches[:3] * 3:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    ("family", "impl", "cp"),
    [("llama", "chunked", 1), ("gemma3", "chunked", 1), ("gemma3", "logits", 1), ("llama", "chunked", 2)],
)
@on_ranks(2)
def test_it_is_that_of_plain_logits_and_counts_shared_rows_once(family: str, impl: Any, cp: int) -> None:
    rank, ranks = dist.get_rank() // cp, dist.get_world_size() // cp
    batches = ragged_batches(4 * ranks, batch_size=3)
    model = _learned(family, batches)
    expected = _one_way(model, batches), _one_way(model, batches[::2])
    assert 0.02 < expected[0] < 0.98
    own = batches[rank::ranks]
    sharing_rows(model, mesh_here(cp=cp))
    fs.prepare_loss(model, impl=impl)
    weighted = [{**batch, "loss_weights": torch.rand(batch["labels"].shape)} for batch in own]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for window in (own, weighted):
        for result in (fs.evaluate(model, window), fs.train_step(model, window, optimizer)):
            assert result.token_accuracy == pytest.approx(expected[0], abs=1e-12)
    # Ranks with unequal numbers of batches: all of one rank's, and the first of the others'.
    assert fs.evaluate(model, batches[::2] if rank == 0 else []).token_accuracy == pytest.approx(
        expected[1], abs=1e-12
    )
    result = fs.train_step(model, own, optimizer, loss_fn=lambda model, batch: fs.loss_sum(model, batch)[0])
    assert result.token_accuracy != result.token_accuracy  # nan: what a loss of one's own counts is not known
