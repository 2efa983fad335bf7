"""Batches that are no plain dicts of padded tensors, with a loss of the caller's own."""

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import BatchEncoding

import fsdp_sft as fs
from tests.harness.device import device_here, mesh_here
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.ranks import on_ranks, run_distributed

tensordict: Any = importlib.import_module("tensordict") if importlib.util.find_spec("tensordict") else None


class OwnBatch:
    """A batch that is no mapping, and moves itself."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def to(self, device: torch.device) -> "OwnBatch":
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return self


def _rows(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [
        ids[: int(mask.sum())] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def _nested(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows as jagged nested tensors, with positions, as verl hands them over."""
    lengths = [len(row) for row in _rows(batch)]
    labels = [own[:length] for own, length in zip(batch["labels"], lengths, strict=True)]
    jagged = {"layout": torch.jagged}
    return {
        "input_ids": torch.nested.nested_tensor(_rows(batch), **jagged),
        "labels": torch.nested.nested_tensor(labels, **jagged),
        "position_ids": torch.nested.nested_tensor([torch.arange(length) for length in lengths], **jagged),
    }


def _padded(batch: Any) -> dict[str, torch.Tensor]:
    ids = batch["input_ids"].to_padded_tensor(0)
    lengths = batch["input_ids"].offsets().diff()
    mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    return {
        "input_ids": ids,
        "labels": batch["labels"].to_padded_tensor(-100),
        "attention_mask": mask.long(),
    }


KINDS: dict[str, tuple[Any, type, Any]] = {
    "nested": (_nested, dict, _padded),
    "encoding": (BatchEncoding, BatchEncoding, lambda batch: dict(batch)),
    "own": (OwnBatch, OwnBatch, lambda batch: batch.tensors),
}
if tensordict is not None:
    KINDS["tensordict"] = (
        lambda batch: tensordict.TensorDict(dict(batch), batch_size=[len(batch["input_ids"])]),
        tensordict.TensorDict,
        lambda batch: dict(batch.items()),
    )
    KINDS["tensordict of nested"] = (
        lambda batch: tensordict.TensorDict(_nested(batch), batch_size=[len(batch["input_ids"])]),
        tensordict.TensorDict,
        _padded,
    )


def _train(kind: str | None) -> list[float]:
    model = tiny_model("llama")
    fs.shard_model(model, mesh=mesh_here(), mp_policy=MixedPrecisionPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(2):
        window = ragged_batches(2 * ranks, seed=step)[rank::ranks]
        if kind is None:
            losses.append(fs.train_step(model, window, optimizer).loss)
            continue
        make, cls, read = KINDS[kind]
        given = [make(batch) for batch in window]

        def loss_fn(model: Any, batch: Any, cls: type = cls, read: Any = read) -> torch.Tensor:
            assert type(batch) is cls
            plain = read(batch)
            assert plain["input_ids"].device == device_here()
            return fs.token_losses(model, plain).sum()

        def count_fn(batch: Any, read: Any = read) -> int:
            return int((read(batch)["labels"][:, 1:] != -100).sum())

        losses.append(fs.train_step(model, given, optimizer, loss_fn=loss_fn, count_fn=count_fn).loss)
        if kind == "encoding":
            assert given[0].input_ids.device.type == "cpu", "the caller's batch stays where it was"
    return losses


@pytest.mark.accelerator
@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_they_train_as_padded_ones_do(ranks: int) -> None:
    expected = _train(None)
    for kind in KINDS:
        assert _train(kind) == pytest.approx(expected, rel=1e-6), kind


def _refused() -> str:
    model = tiny_model("llama")
    fs.shard_model(model, mesh=mesh_here())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(fs.BatchError) as found:
        fs.train_step(model, [_nested(ragged_batches(1)[0])], optimizer)
    return str(found.value)


def test_nested_rows_need_a_loss_of_ones_own() -> None:
    assert "nested" in run_distributed(_refused, 2)[0]
