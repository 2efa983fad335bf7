"""Causal LMs with a new head, as reward models and classifiers: the page about them, and plain."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.device import device_type, mesh_here
from tests.harness.models import full
from tests.harness.places import ROOT
from tests.harness.ranks import run_distributed

PAGE = ROOT / "docs/how-to/train-a-reward-model.md"
CLASSIFIER = "LlamaForSequenceClassification"
LABELS = [2, 0, 1, 1, 2, 0, 0]
# The rows of each rank's micro-batches, of unequal numbers, by the number of ranks.
SPLIT = {1: [[[0, 1, 2, 3], [4, 5, 6]]], 2: [[[0], [1, 2, 3]], [[4, 5], [6]]]}


def _blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page's first block makes: a stand-in for a checkpoint and its tokenizer."""
    made: dict[str, Any] = {}
    exec(_blocks()[0], made)
    return {name: made[name] for name in ("path", "work", "tokenizer")}


def _page(base: dict[str, Any]) -> tuple[float, float]:
    names = {**base, "work": base["work"] / f"ranks-{mesh_here().size()}"}
    exec("\n".join(_blocks()[1:]), names)
    head = full(names["with_new_head"](num_labels=1).score.weight)
    return float(head.double().sum()), names["after"].loss


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_page(base: dict[str, Any], ranks: int) -> None:
    assert len(set(run_distributed(_page, ranks, base))) == 1, "ranks have different heads or results"


def _pairwise(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -F.logsigmoid(logits[:, 0] * (labels - 1)).sum()  # labels only as signs: -1, 0, 1


def _classes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def _texts(base: dict[str, Any], rows: list[int]) -> dict[str, torch.Tensor]:
    batch = base["tokenizer"]([f"row {row} " * (row + 1) for row in rows], padding=True, return_tensors="pt")
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "labels": torch.tensor([LABELS[row] for row in rows]),
    }


def _beside_plain(base: dict[str, Any], num_labels: int) -> dict[str, float]:
    """Largest differences from one process of plain transformers, all in float64, of one step of SGD."""
    from transformers import AutoModelForSequenceClassification

    summed = _pairwise if num_labels == 1 else _classes

    def loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ids, mask, labels = batch.values()
        return summed(model(input_ids=ids, attention_mask=mask).logits, labels)

    fields = {"num_labels": num_labels, "pad_token_id": base["tokenizer"].pad_token_id}
    mesh = mesh_here()
    ours = fs.build_meta_model(base["path"], architectures=[CLASSIFIER], dtype=torch.float64, **fields)
    fs.shard_model(ours, mesh=mesh, master_dtype=torch.float64, mp_policy=MixedPrecisionPolicy())
    fs.load_weights(ours, base["path"], missing="initialise", unexpected="ignore")
    torch.manual_seed(0)
    plain = AutoModelForSequenceClassification.from_pretrained(base["path"], dtype=torch.float64, **fields)
    plain.to(device_type())
    differ = {"head": float((full(ours.score.weight) - plain.score.weight.cpu()).abs().max())}

    window = [_texts(base, rows) for rows in SPLIT[mesh.size()][mesh.get_rank()]]
    sgd = torch.optim.SGD(ours.parameters(), lr=1.0)
    result = fs.train_step(
        ours, window, sgd, loss_fn=loss_fn, count_fn=lambda batch: len(batch["labels"]), max_grad_norm=None
    )
    everything = {name: value.to(device_type()) for name, value in _texts(base, [*range(7)]).items()}
    loss = loss_fn(plain, everything) / 7
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    stepped = dict(plain.named_parameters())
    differ |= {"loss": abs(result.loss - float(loss)), "norm": abs(result.grad_norm - float(norm))}
    differ["parameters"] = max(
        float((full(p).cpu() - stepped[name].detach().cpu()).abs().max())
        for name, p in ours.named_parameters()
    )
    return differ


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_is_that_of_one_plain_process(base: dict[str, Any], ranks: int, num_labels: int) -> None:
    for differ in run_distributed(_beside_plain, ranks, base, num_labels):
        assert differ.pop("head") == 0.0
        assert differ.pop("norm") < 1e-6  # measured in float32
        assert max(differ.values()) < 1e-10, differ
