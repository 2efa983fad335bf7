"""Ranks whose batches have different keys: refused by name, and stood in for when a rank has run out."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaForCausalLM

import fsdp_sft as fs
from tests.harness.models import FLOAT32, ragged_batches, tiny_config, tiny_model
from tests.harness.ranks import mesh_here, on_ranks


class Seeing(LlamaForCausalLM):
    """A model with a part of its own FSDP group that runs only where there is an image."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.tower = nn.Linear(4, config.hidden_size)

    def forward(self, input_ids: Any, pixel_values: Any = None, **kwargs: Any) -> Any:
        embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            embeds = embeds + self.tower(pixel_values)[:, None]
        return super().forward(inputs_embeds=embeds, **kwargs)


def _seeing(**mesh: int) -> Any:
    torch.manual_seed(0)
    model = Seeing(tiny_config("llama")).train()
    mesh = mesh_here(**mesh)
    groups = {**fs.find_blocks(model), "tower": model.tower}
    return fs.shard_model(model, mesh=mesh, mp_policy=FLOAT32, blocks=groups)


def _with_image(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "pixel_values": torch.ones(len(batch["input_ids"]), 4)}


@on_ranks(2, timeout=20)
def test_ranks_with_different_keys_are_refused_by_name() -> None:
    rank = dist.get_rank()
    model = _seeing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = ragged_batches(2)[0]
    image = _with_image(text)
    for mine in ([text, image], [image, text]):
        window = [text, mine[rank]]
        with pytest.raises(
            fs.BatchError, match=r"different keys \(micro-batch 1: .*pixel_values.*, on ranks 0 and 1\)"
        ):
            fs.train_step(model, window, optimizer)
        with pytest.raises(fs.BatchError, match=r"different keys \(micro-batch 0"):
            fs.evaluate(model, [mine[rank]])
    assert not optimizer.state
    # The same keys in another order, or with None for what is not there, are the same keys.
    window = [image, {**dict(reversed(text.items())), "pixel_values": None} if rank else text]
    assert fs.train_step(model, window, optimizer).skipped is False


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
@on_ranks(timeout=60)
def test_a_rank_that_has_run_out_stands_in_with_the_keys_of_the_others(ranks: int, replicas: int) -> None:
    rank = dist.get_rank()
    texts = ragged_batches(4)[:3]
    images = [_with_image(batch) for batch in texts]
    torch.manual_seed(0)
    plain = Seeing(tiny_config("llama")).eval()
    model = _seeing(dp_replicate=replicas, dp_shard=dist.get_world_size() // replicas)
    for own in (
        [images[0], images[1], images[2]] if rank == 0 else [],  # a rank that never had a batch
        [images[0], texts[1], images[2]] if rank == 0 else images[:1],  # one that had other keys
        [texts[0], images[1]] if rank == 0 else [texts[0]],
    ):
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, own)
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in sum(shares, []):
                logits = plain(**{k: v for k, v in batch.items() if k != "labels"}).logits
                targets = batch["labels"][:, 1:].flatten()
                total += float(
                    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
                )
                count += int((targets != -100).sum())
        result = fs.evaluate(model, own)
        assert result.num_targets == count
        assert result.loss == pytest.approx(total / count, rel=1e-6)


@on_ranks(2)
def test_ranks_with_different_options_are_refused() -> None:
    rank = dist.get_rank()
    model = fs.shard_model(tiny_model("mixtral"), mesh=mesh_here(), mp_policy=FLOAT32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.to_local().clone() for p in model.parameters()]
    batch = ragged_batches(2)[0]
    for name, values in {
        "max_grad_norm": (1.0, None),
        "grad_sync": ("each", "last"),
        "check": (True, False),
        "count_fn": (None, len),
    }.items():
        with pytest.raises(fs.BatchError, match=rf"different options \({name}=.* on ranks 0 and 1"):
            fs.train_step(model, [batch], optimizer, **{name: values[rank]})
        if name in ("check", "count_fn"):
            with pytest.raises(fs.BatchError, match=rf"different options \({name}="):
                fs.evaluate(model, [batch], **{name: values[rank]})
    assert all(map(torch.equal, before, [p.to_local() for p in model.parameters()]))
    fs.train_step(model, [batch], optimizer, max_grad_norm=(1, 1.0)[rank])
