"""Batches for context parallelism, and the loss of each row by itself, in one process."""

import itertools
from typing import Any

import torch

import fsdp_sft as fs
from tests.harness.device import device_here
from tests.harness.models import FLOAT32, VOCAB, padded
from tests.plain import gradients, mean_loss

PACKED, PADDED, PLAIN = "packed", "padded", "plain"


def rows_of(
    lengths: list[int], *, seed: int = 0, trained: float = 0.7
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random ids and labels of rows; about ``trained`` of the labels count, none of the first row's."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index, length in enumerate(lengths):
        ids = torch.randint(3, VOCAB - 2, (length,), generator=generator)
        counts = torch.rand(length, generator=generator) < (trained if index or len(lengths) == 1 else 0.0)
        rows.append((ids, ids.where(counts, -100)))
    return rows


def batch_of(rows: list[tuple[torch.Tensor, torch.Tensor]], kind: str) -> dict[str, torch.Tensor]:
    """The rows as one pack, as a padded batch, or (of one length) as they are."""
    if kind == PACKED:
        ids, labels = (torch.cat([row[i] for row in rows])[None] for i in (0, 1))
        firsts = [0, *itertools.accumulate(len(row) for row, _ in rows)][:-1]
        labels[0, firsts] = -100  # the first token of a row follows on another row's last
        positions = torch.cat([torch.arange(len(row)) for row, _ in rows])[None]
        return {"input_ids": ids, "labels": labels, "position_ids": positions}
    batch = padded([{"input_ids": i, "labels": t, "attention_mask": torch.ones_like(i)} for i, t in rows])
    if kind == PLAIN:
        del batch["attention_mask"]
    return batch


def plain_loss(model: Any, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The mean over all targets, each row by itself through a plain model."""
    return mean_loss(model, [batch_of([row], PLAIN) for row in rows])


def plain_gradients(
    model: Any, rows: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and its gradient of each parameter by name."""
    return gradients(model, [batch_of([row], PLAIN) for row in rows])


def sharing_rows(model: Any, mesh: Any, **options: Any) -> Any:
    """The model on this rank's device, computing in its dtype, whose rows the ranks of ``cp`` share."""
    exact = {"mp_policy": FLOAT32, "master_dtype": model.dtype, **options}
    fs.shard_model(model.to(device_here()), mesh=mesh, **exact)
    fs.use_context_parallel(model, mesh=mesh)
    return model
