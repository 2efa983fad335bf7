"""Rows to pack, and what they give one by one: the oracle of the packing tests."""

import random
from typing import Any

import torch

from tests.harness.models import VOCAB
from tests.plain import gradients


def row(*ids: int, targets: int | None = None) -> dict[str, list[int]]:
    """A row that trains its last ``targets`` tokens, or all."""
    ignored = 0 if targets is None else len(ids) - targets
    return {"input_ids": list(ids), "labels": [-100] * ignored + list(ids[ignored:])}


def drawn_rows(count: int, *, longest: int = 24, seed: int = 3) -> list[dict[str, list[int]]]:
    """Rows of 1 to ``longest`` tokens; one has no target and one consists of a single token."""
    generator = random.Random(seed)
    rows = []
    for index in range(count):
        length = {0: 1}.get(index) or generator.randint(2, longest)
        ids = [generator.randrange(3, VOCAB) for _ in range(length)]
        rows.append(row(*ids, targets=0 if index == 1 else generator.randint(1, length)))
    return rows


def chat_lengths(count: int, *, seed: int = 0, longest: int = 512) -> tuple[list[int], list[int]]:
    """Lengths with a long tail, and targets that are between nothing and nearly all of a row."""
    generator = random.Random(seed)
    lengths = [min(longest, 2 + int(generator.lognormvariate(4, 1))) for _ in range(count)]
    return lengths, [int(length * generator.betavariate(1, 1.5)) for length in lengths]


def gradients_of_separate_rows(model: Any, rows: list[dict[str, list[int]]]) -> tuple[float, dict[str, Any]]:
    """Sum over the targets of rows that go through the model one by one, written out plainly."""
    batches = [{name: torch.tensor([ids]) for name, ids in one.items()} for one in rows]
    targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    loss, found = gradients(model, batches)
    return loss * targets, {name: gradient * targets for name, gradient in found.items()}


def assert_same(actual: Any, expected: Any, name: str = "") -> None:
    """Dicts within dicts have the same keys, and in them the same values, tensors bit by bit."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
        for key, value in expected.items():
            assert_same(actual[key], value, f"{name}/{key}")
    elif isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, name
        assert torch.equal(actual, expected), name
    else:
        assert actual == expected, name
