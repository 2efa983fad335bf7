"""Loops of prime-rl and verl in torch alone: losses and schedules.

Only which rows a step has is taken from the port. The oracle gets them without packing, padding or nesting,
each row in a forward of its own, and scales, clips and schedules as the original does.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup

NUM_ROWS, STEPS, SAVED = 40, 10, 6  # the checkpoint is in the middle of the second of two epochs


class Row(NamedTuple):
    """Tokens of a row, and the places of those that are trained."""

    ids: tuple[int, ...]
    scored: tuple[int, ...]


Batch = list[Row]
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


# The originals' losses: each yields what a micro-batch's backward is called on and what it adds to the log

Scaled = Iterator[tuple[torch.Tensor, float]]


def scored(model: nn.Module, row: Row) -> torch.Tensor:
    """Log-probabilities of the trained tokens of a row."""
    ids, places = torch.tensor(row.ids), torch.tensor(row.scored)
    log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
    return log_probs[places - 1].gather(-1, ids[places, None])[:, 0]


def prime_rl(model: nn.Module, window: Window) -> Scaled:
    """Sums over the number of micro-batches, averaged over ranks; then all gradients by one factor."""
    count, micro_batches = sum(len(row.scored) for row in all_rows(window)), len(window[0])
    for batch in batches_of(window):
        total = torch.stack([-scored(model, row).sum() for row in batch]).sum()
        yield total / micro_batches / len(window), float(total.detach()) / count
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(len(window) * micro_batches / count)


def verl(model: nn.Module, window: Window) -> Scaled:
    """The tokens of a batch one after the other; ids and mask are rolled over the borders of its rows."""
    tokens = sum(len(row.scored) for row in all_rows(window))
    for batch in batches_of(window):
        logits = torch.cat([model(torch.tensor([row.ids])).logits[0] for row in batch])
        ids = torch.tensor([i for row in batch for i in row.ids])
        mask = torch.tensor([float(i in row.scored) for row in batch for i in range(len(row.ids))])
        log_probs = logits.log_softmax(-1).gather(-1, ids.roll(-1)[:, None])[:, 0]
        loss = -(log_probs * mask.roll(-1)).sum() / tokens * len(window)
        yield loss / len(window), float(loss.detach()) / len(window)


def batches_of(window: Window) -> list[Batch]:
    return [batch for rank in window for batch in rank]


def all_rows(window: Window) -> list[Row]:
    return [row for batch in batches_of(window) for row in batch]


# The originals' schedules


def warmup(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-8, total_iters=3)


def cosine(optimizer: Any) -> Any:
    return get_cosine_schedule_with_warmup(optimizer, 2, STEPS)
