"""Packing: every row once, apart from its neighbours, fairly dealt, and resumed at any number of ranks."""

import copy
import random
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import fsdp_sft as fs
from tests.harness.models import largest_error, tiny_model
from tests.harness.packs import drawn_rows, gradients_of_separate_rows, row


def naive_best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """Tokens of each pack, ascending, by looking at every pack for every row."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, space in enumerate(free) if space >= length]
        if fitting:
            free[min(fitting, key=lambda i: free[i])] -= length
        else:
            free.append(capacity - length)
    return sorted(capacity - space for space in free)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3000), st.data())
def test_packs_are_those_of_best_fit_decreasing(capacity: int, data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    packs = fs.pack_lengths(lengths, capacity)
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    tokens = sorted(sum(lengths[row] for row in pack) for pack in packs)
    assert tokens == naive_best_fit_decreasing(lengths, capacity)
    assert packs == fs.pack_lengths(torch.tensor(lengths, dtype=torch.int32), capacity)


def test_a_quarter_of_a_million_lengths_take_no_quadratic_time() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(1, 4096) for _ in range(250_000)]
    start = time.process_time()
    fs.pack_lengths(lengths, 4096)
    assert time.process_time() - start < 2, "about 0.3 s; benchmarks/speed/packing.py measures"


def as_lists(batch: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    assert {(v.dtype, v.ndim, v.shape[0]) for v in batch.values()} == {(torch.int64, 2, 1)}
    return {name: value[0].tolist() for name, value in batch.items()}


def test_rows_are_joined_and_no_first_token_is_told_from_the_row_before() -> None:
    rows = [row(5, 6, 7), row(8), row(9, 10, targets=1), row(11, 12, targets=0)]
    before = copy.deepcopy(rows)
    batch = as_lists(fs.PackedCollator(max_length=8)(rows))
    assert batch == {
        "input_ids": [5, 6, 7, 8, 9, 10, 11, 12],
        "labels": [-100, 6, 7, -100, -100, 10, -100, -100],
        "position_ids": [0, 1, 2, 0, 0, 1, 0, 1],
    }
    assert rows == before
    encoded = [fs.EncodedChat(r["input_ids"], r["labels"]) for r in rows]
    assert as_lists(fs.PackedCollator(max_length=8)(encoded)) == batch
    tensors = [{name: torch.tensor(values) for name, values in r.items()} for r in rows]
    assert as_lists(fs.PackedCollator(max_length=8)(tensors)) == batch


def test_padding_is_a_row_of_its_own_without_targets() -> None:
    rows = [row(5, 6, 7), row(8, 9)]
    expected = {
        "input_ids": [5, 6, 7, 8, 9, 3, 3, 3],
        "labels": [-100, 6, 7, -100, 9, -100, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 0, 1, 2],
    }
    fixed = fs.PackedCollator(max_length=8, padding="max_length", pad_token_id=3)
    assert as_lists(fixed(rows)) == expected
    multiple = fs.PackedCollator(max_length=7, pad_to_multiple_of=4, pad_token_id=3)
    assert as_lists(multiple(rows)) == expected


def test_an_empty_pack_and_a_single_token_leave_something_to_shift() -> None:
    collator = fs.PackedCollator(max_length=8)
    nothing = {"input_ids": [0, 0], "labels": [-100, -100], "position_ids": [0, 1]}
    assert as_lists(collator([])) == nothing
    assert as_lists(collator([row(7)])) == {**nothing, "input_ids": [7, 0], "position_ids": [0, 0]}
    assert fs.count_targets([collator([])]) == 0


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([row(1, 2, 3), row(4, 5)], "5 tokens, max_length is 4; give PackedSampler the same"),
        ([{"input_ids": [1, 2]}], "labels"),
        ([{"input_ids": [1, 2], "labels": [1]}], "one length"),
        ([{"input_ids": [], "labels": []}], "length of at least 1"),
        ([{"input_ids": [1.5], "labels": [1]}], "integers"),
        ([{"messages": []}], "encode_chat first"),
        ([[1, 2]], "encode_chat first"),
    ],
)
def test_bad_rows_are_refused(rows: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        fs.PackedCollator(max_length=4)(rows)


def test_sizes_of_rows() -> None:
    assert fs.row_sizes([row(5, 6, 7), row(8), row(9, 10, targets=0)]) == ([3, 1, 2], [2, 0, 0])
    with pytest.raises(ValueError, match="row 1: "):
        fs.row_sizes([row(5), {"input_ids": [1]}])


@pytest.mark.parametrize("padding", ["longest", "max_length"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "mixtral"])
def test_gradients_of_a_pack_are_the_sum_over_its_rows(family: str, attention: str, padding: str) -> None:
    model = tiny_model(family, attn_implementation=attention, use_cache=True)
    rows = drawn_rows(6)
    loss, expected = gradients_of_separate_rows(model, rows)
    batch = fs.PackedCollator(max_length=128, padding=padding)(rows)
    targets = sum(label != -100 for one in rows for label in one["labels"][1:])
    packed = fs.causal_lm_loss(model, batch, num_targets=targets) * targets
    packed.backward()
    actual = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert model.config.use_cache is True
    assert float(packed.detach()) == pytest.approx(loss, rel=1e-6)
    assert largest_error(actual, expected) < 1e-6
