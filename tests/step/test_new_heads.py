"""Causal LMs with a new head, as reward models and classifiers, beside one process of plain transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.device import device_type, mesh_here
from tests.harness.hf_folders import save_tiny
from tests.harness.models import full, ragged_batches
from tests.harness.ranks import run_distributed


def _loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Classes by the cross entropy; a reward by the sign of its label: -1, 0, 1."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    if logits.shape[1] == 1:
        return -F.logsigmoid(logits[:, 0] * (batch["labels"] - 1)).sum()
    return F.cross_entropy(logits, batch["labels"], reduction="sum")


def _beside_plain(folder: Path, num_labels: int) -> None:
    from transformers import AutoModelForSequenceClassification

    rank, ranks = dist.get_rank(), dist.get_world_size()
    classes = [{**batch, "labels": batch["input_ids"].sum(1) % 3} for batch in ragged_batches(4)]
    batches = [{name: value[: 1 + n % 2] for name, value in b.items()} for n, b in enumerate(classes)]
    fields = {"num_labels": num_labels, "pad_token_id": 0}
    ours = fs.build_meta_model(
        folder, architectures=["LlamaForSequenceClassification"], dtype=torch.float64, **fields
    )
    fs.shard_model(ours, mesh=mesh_here(), master_dtype=torch.float64, mp_policy=MixedPrecisionPolicy())
    fs.load_weights(ours, folder, missing="initialise", unexpected="ignore")
    torch.manual_seed(0)
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64, **fields)
    plain.to(device_type())
    assert torch.equal(full(ours.score.weight), plain.score.weight.cpu())
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    result = fs.train_step(
        ours,
        batches[rank::ranks],
        optimizer,
        loss_fn=_loss,
        count_fn=lambda batch: len(batch["labels"]),
        max_grad_norm=None,
    )
    moved = [{name: value.to(device_type()) for name, value in batch.items()} for batch in batches]
    loss = sum(_loss(plain, batch) for batch in moved) / sum(len(batch["labels"]) for batch in batches)
    loss.backward()
    assert result.loss == pytest.approx(float(loss), rel=1e-10)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    for name, parameter in plain.named_parameters():
        stepped = full(ours.get_parameter(name)).cpu()
        torch.testing.assert_close(stepped, parameter.detach().cpu(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_is_that_of_one_plain_process(tmp_path: Path, ranks: int, num_labels: int) -> None:
    run_distributed(_beside_plain, ranks, save_tiny(tmp_path), num_labels)
