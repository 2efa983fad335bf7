"""Rows that can be told by their first two tokens, and the batches that a caller makes of them by hand."""

import random
from collections.abc import Sequence
from typing import Any

import torch

VOCABULARY = 101
NUM_ROWS = 41  # no multiple of what any mesh takes at a step
LONGEST = 12
WEIGHTS = (0.25, 0.0, 1.0, 2.5)
Row = dict[str, Any]


def drawn_rows(seed: int, *, weighted: bool = False) -> list[Row]:
    """Ragged rows; a few have no target, and none begins like another.

    Args:
        seed: Of their tokens.
        weighted: Whether most have ``token_weights``, one for each token.
    """
    generator = random.Random(seed)
    rows = []
    for index in range(NUM_ROWS):
        ids = [
            3 + index % 40,
            50 + index // 40,
            *[generator.randrange(3, VOCABULARY) for _ in range(generator.randint(1, LONGEST - 2))],
        ]
        first = len(ids) if index % 13 == 7 else generator.randint(1, len(ids) - 1)
        row: Row = {"input_ids": ids, "labels": [-100] * first + ids[first:]}
        if weighted and index % 3:
            # A row that weighs nothing may be all of a window, which is skipped then.
            row["token_weights"] = [*(WEIGHTS[token % 4] for token in ids[:-1]), 1.0]
        rows.append(row)
    return rows


def padded(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """A batch of rows, filled up on the right."""
    width = max(2, *(len(row["input_ids"]) for row in rows))
    batch = {
        "input_ids": torch.zeros(len(rows), width, dtype=torch.int64),
        "attention_mask": torch.zeros(len(rows), width, dtype=torch.int64),
        "labels": torch.full((len(rows), width), -100),
    }
    if any("token_weights" in row for row in rows):
        batch["loss_weights"] = torch.ones(len(rows), width)
    for place, row in enumerate(rows):
        length = len(row["input_ids"])
        if "token_weights" in row:
            batch["loss_weights"][place, :length] = torch.tensor(row["token_weights"])
        batch["input_ids"][place, :length] = torch.tensor(row["input_ids"])
        batch["attention_mask"][place, :length] = 1
        batch["labels"][place, :length] = torch.tensor(row["labels"])
    return batch


def of_answers(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """A batch for an encoder-decoder: the labels are what the decoder says, and are not shifted."""
    answers = [{"input_ids": row["input_ids"], "labels": row["input_ids"][::-1]} for row in rows]
    return padded(rows) | {"labels": padded(answers)["labels"]}


def rows_of(batch: dict[str, Any]) -> list[list[int]]:
    """The tokens of each row of a batch, padded or packed; a pack's filling is no row."""
    return _split(batch, "input_ids")


def labels_of(batch: dict[str, Any]) -> list[list[int]]:
    """The labels of each of these rows."""
    return _split(batch, "labels")


def weights_of(batch: dict[str, Any]) -> list[list[float]]:
    """The factor of each label's loss."""
    return _split({"loss_weights": torch.ones(batch["input_ids"].shape), **batch}, "loss_weights")


def _split(batch: dict[str, Any], key: str) -> list[Any]:
    ids, values = batch["input_ids"].tolist(), batch[key].tolist()
    if "position_ids" not in batch:
        return [own[:n] for own, n in zip(values, batch["attention_mask"].sum(1).tolist(), strict=True)]
    starts = [place for place, position in enumerate(batch["position_ids"][0].tolist()) if position == 0]
    bounds = list(zip(starts, [*starts[1:], len(ids[0])], strict=True))
    return [values[0][a:b] for a, b in bounds if any(ids[0][a:b])]
