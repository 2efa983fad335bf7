"""Rows that can be told by their first two tokens, and the batches that a caller makes of them by hand."""

import random
from collections.abc import Sequence
from typing import Any

import torch

VOCABULARY = 101
NUM_ROWS = 41  # no multiple of what any mesh takes at a step
LONGEST = 12
Row = dict[str, list[int]]


def drawn_rows(seed: int) -> list[Row]:
    """Ragged rows; a few have no target, and none begins like another."""
    generator = random.Random(seed)
    rows = []
    for index in range(NUM_ROWS):
        name = [3 + index % 40, 50 + index // 40]
        ids = name + [generator.randrange(3, VOCABULARY) for _ in range(generator.randint(1, LONGEST - 2))]
        first = len(ids) if index % 13 == 7 else generator.randint(1, len(ids) - 1)
        rows.append({"input_ids": ids, "labels": [-100] * first + ids[first:]})
    return rows


def padded(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """A batch of rows, filled up on the right."""
    width = max(2, *(len(row["input_ids"]) for row in rows))
    batch = {
        "input_ids": torch.zeros(len(rows), width, dtype=torch.int64),
        "attention_mask": torch.zeros(len(rows), width, dtype=torch.int64),
        "labels": torch.full((len(rows), width), -100),
    }
    for place, row in enumerate(rows):
        length = len(row["input_ids"])
        batch["input_ids"][place, :length] = torch.tensor(row["input_ids"])
        batch["attention_mask"][place, :length] = 1
        batch["labels"][place, :length] = torch.tensor(row["labels"])
    return batch


def of_classes(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """A batch for a classifier: one of three classes a row."""
    batch = padded(rows)
    batch["labels"] = torch.tensor([sum(row["input_ids"]) % 3 for row in rows])
    return batch


def of_answers(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """A batch for an encoder-decoder: the labels are what the decoder says, and are not shifted."""
    batch = padded(rows)
    answers = padded(
        [{"input_ids": row["input_ids"][::-1], "labels": row["input_ids"][::-1]} for row in rows]
    )
    batch["labels"] = answers["labels"]
    return batch


def rows_of(batch: dict[str, Any]) -> list[list[int]]:
    """The tokens of each row of a batch, padded or packed; a pack's filling is no row."""
    return [row for row, _ in _split(batch)]


def labels_of(batch: dict[str, Any]) -> list[list[int]]:
    """The labels of each of these rows."""
    return [labels for _, labels in _split(batch)]


def _split(batch: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    ids, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
    if "position_ids" not in batch:
        lengths = batch["attention_mask"].sum(1).tolist()
        if batch["labels"].ndim == 1:  # of a classifier
            labels = [[label] * length for label, length in zip(labels, lengths, strict=True)]
        return [(row[:n], own[:n]) for row, own, n in zip(ids, labels, lengths, strict=True)]
    starts = [place for place, position in enumerate(batch["position_ids"][0].tolist()) if position == 0]
    bounds = list(zip(starts, [*starts[1:], len(ids[0])], strict=True))
    return [(ids[0][a:b], labels[0][a:b]) for a, b in bounds if any(ids[0][a:b])]
