"""The rows of a program, and its batches."""

from typing import Any

import torch

from tests.compositions.rows import Row, drawn_rows, padded
from tests.programs.writing import Program

NUM_ROWS = 32  # a multiple of what the ranks take at a step, so that an epoch has no rest
BATCH_ROWS = 2


def rows_for(program: Program) -> list[Row]:
    """Each begins with two tokens that no other begins with."""
    return drawn_rows(program.seed)[:NUM_ROWS]


def collated(program: Program, rows: list[Row]) -> dict[str, Any]:
    """A padded batch, whose mask may number the documents, as some collators do: all but 0 is no padding."""
    batch = padded(rows)
    if program.settings["mask"] != "ones":
        batch["attention_mask"] *= torch.arange(1, len(rows) + 1)[:, None]
    return batch


def held_out(program: Program) -> list[dict[str, Any]]:
    """Batches to evaluate on, an even number."""
    rows = drawn_rows(program.seed + 1)[:6]
    return [collated(program, [row]) for row in rows]


def names_of(batch: dict[str, Any]) -> list[tuple[int, int]]:
    """Which rows a batch is of."""
    return [(ids[0], ids[1]) for ids in batch["input_ids"].tolist()]


PROMPT = torch.arange(3, 11).view(2, 4)
