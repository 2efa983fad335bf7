"""The share of targets whose logit is the largest, beside an argmax over plain logits in one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.long_rows import sharing_rows
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.ranks import on_ranks


def _one_way(model: Any, batches: list[Any]) -> float:
    right = targets = 0
    with torch.no_grad():
        for batch in batches:
            labels = batch["labels"][:, 1:]
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            logits = model(**inputs).logits[:, :-1]
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
    for window in (own, weighted):
        assert fs.evaluate(model, window).token_accuracy == pytest.approx(expected[0], abs=1e-12)
    # Ranks with unequal numbers of batches: all of one rank's, and the first of the others'.
    uneven = batches[::2] if rank == 0 else []
    assert fs.evaluate(model, uneven).token_accuracy == pytest.approx(expected[1], abs=1e-12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for window in (own, weighted):
        assert fs.train_step(model, window, optimizer).token_accuracy == pytest.approx(expected[0], abs=1e-12)
    result = fs.train_step(model, own, optimizer, loss_fn=lambda model, batch: fs.loss_sum(model, batch)[0])
    assert result.token_accuracy != result.token_accuracy  # nan: what a loss of one's own counts is not known
