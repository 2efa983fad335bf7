"""Loops of prime-rl, verl, open-instruct and OpenRLHF in torch alone: losses and schedules.

Only which rows a step has is taken from the port. The oracle gets them without packing, padding or nesting,
each row in a forward of its own, and scales, clips and schedules as the original does.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import get_cosine_schedule_with_warmup, get_scheduler

NUM_ROWS, STEPS, SAVED = 40, 10, 6  # the checkpoint is in the middle of the second of two epochs


class Row(NamedTuple):
    """Tokens of a row, and the places of those that are trained."""

    ids: tuple[int, ...]
    scored: tuple[int, ...]


Batch = list[Row]  # of pairs: first all chosen answers, then all rejected ones
Window = list[list[Batch]]  # a step's batches, of each rank


# Rows of the ports' batches


def of_pack(batch: Any) -> Batch:
    """Of prime-rl's packs, which have shifted targets; the filler has none."""
    ids, targets, mask, positions = (
        batch[name][0].tolist() for name in ("input_ids", "target_ids", "loss_mask", "position_ids")
    )
    starts = [i for i, position in enumerate(positions) if position == 0]
    rows = []
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        scored = tuple(i + 1 for i in range(end - start) if mask[start + i])
        if scored:
            rows.append(Row((*ids[start:end], targets[end - 1]), scored))
    return rows


def of_nested(batch: Any) -> Batch:
    pairs = zip(batch["input_ids"].unbind(), batch["loss_mask"].unbind(), strict=True)
    return [Row(tuple(ids.tolist()), tuple(mask.nonzero()[:, 0].tolist())) for ids, mask in pairs]


def of_padded(batch: Any) -> Batch:
    columns = (batch["input_ids"], batch["attention_mask"], batch["labels"] != -100)
    return _unpadded(*columns)


def of_tuple(batch: Any) -> Batch:
    return _unpadded(*batch)


def _unpadded(ids: torch.Tensor, attention: torch.Tensor, mask: torch.Tensor) -> Batch:
    return [
        Row(tuple(row[seen != 0].tolist()), tuple(scored.nonzero()[:, 0].tolist()))
        for row, seen, scored in zip(ids, attention, mask, strict=True)
    ]


# The originals' losses: each yields what a micro-batch's backward is called on and what it adds to the log

Scaled = Iterator[tuple[torch.Tensor, float]]


def log_probs(model: nn.Module, row: Row) -> torch.Tensor:
    """Of each token but the first."""
    ids = torch.tensor(row.ids)
    return model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def scored(model: nn.Module, row: Row) -> torch.Tensor:
    return log_probs(model, row)[torch.tensor(row.scored) - 1]


def prime_rl(model: nn.Module, window: Window, _: Any) -> Scaled:
    """Sums over the number of micro-batches, averaged over ranks; then all gradients by one factor."""
    count, micro_batches = sum(len(row.scored) for row in all_rows(window)), len(window[0])
    for batch in batches_of(window):
        total = torch.stack([-scored(model, row).sum() for row in batch]).sum()
        yield total / micro_batches / len(window), float(total.detach()) / count
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(len(window) * micro_batches / count)


def verl(model: nn.Module, window: Window, _: Any) -> Scaled:
    """The tokens of a batch one after the other; ids and mask are rolled over the borders of its rows."""
    tokens = sum(len(row.scored) for row in all_rows(window))
    for batch in batches_of(window):
        logits = torch.cat([model(torch.tensor([row.ids])).logits[0] for row in batch])
        ids = torch.tensor([i for row in batch for i in row.ids])
        mask = torch.tensor([float(i in row.scored) for row in batch for i in range(len(row.ids))])
        log_probs = logits.log_softmax(-1).gather(-1, ids.roll(-1)[:, None])[:, 0]
        loss = -(log_probs * mask.roll(-1)).sum() / tokens * len(window)
        yield loss / len(window), float(loss.detach()) / len(window)


def open_instruct(model: nn.Module, window: Window, reduce_loss: str) -> Scaled:
    """transformers' mean of each batch, or its sum, over micro-batches and ranks."""
    for batch in batches_of(window):
        losses = torch.cat([-scored(model, row) for row in batch])
        loss = losses.mean() if reduce_loss == "mean" else losses.sum()
        yield loss / len(window[0]) / len(window), float(loss.detach()) / len(window[0]) / len(window)


def openrlhf_sft(model: nn.Module, window: Window, _: Any) -> Scaled:
    """The tokens of the step over the micro-batches, by which DeepSpeed divides once more."""
    steps, ranks = len(window[0]), len(window)
    tokens = sum(len(row.scored) for row in all_rows(window)) / steps
    for batch in batches_of(window):
        loss = -torch.cat([scored(model, row) for row in batch]).sum() / tokens * ranks
        yield loss / steps / ranks, float(loss.detach()) / steps / ranks


def openrlhf_dpo(model: nn.Module, window: Window, reference: nn.Module) -> Scaled:
    """With label smoothing and the mean log-probability of the chosen answers beside it."""
    for batch in batches_of(window):
        policy = torch.stack([scored(model, row).sum() for row in batch])
        with torch.no_grad():
            known = torch.stack([scored(reference, row).sum() for row in batch])
        mean = policy / torch.tensor([len(row.scored) for row in batch])
        (chosen, rejected), (old, old_rejected) = policy.chunk(2), known.chunk(2)
        logits = 0.5 * (chosen - rejected - (old - old_rejected))
        losses = -F.logsigmoid(logits) * 0.9 - F.logsigmoid(-logits) * 0.1
        loss = (losses.mean() - 0.2 * mean.chunk(2)[0].mean()) / len(window[0]) / len(window)
        yield loss, float(loss.detach())


def batches_of(window: Window) -> list[Batch]:
    return [batch for rank in window for batch in rank]


def all_rows(window: Window) -> list[Row]:
    return [row for batch in batches_of(window) for row in batch]


# The originals' schedules


def warmup(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-8, total_iters=3)


def cosine(optimizer: Any) -> Any:
    return get_cosine_schedule_with_warmup(optimizer, 2, STEPS)


def linear(optimizer: Any) -> Any:
    """It is stepped once per rank, for the batches of all ranks, so it ends where this one does."""
    return get_scheduler("linear", optimizer, 2, STEPS)


def cosine_to_a_tenth(optimizer: Any) -> Any:
    options = {"scheduler_specific_kwargs": {"min_lr_rate": 0.1}}
    return get_scheduler("cosine_with_min_lr", optimizer, 1, STEPS, **options)
