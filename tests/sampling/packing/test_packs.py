"""Packing: every row once, apart from its neighbours, fairly dealt, and resumed at any number of ranks."""

import copy
import itertools
import math
import random
import time
from collections import Counter
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings, strategies as st

import fsdp_sft as fs
from tests.harness.models import largest_error, tiny_model
from tests.harness.packs import chat_lengths, drawn_rows, gradients_of_separate_rows, row


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
    assert sorted(itertools.chain(*packs)) == list(range(len(lengths)))
    tokens = sorted(sum(lengths[row] for row in pack) for pack in packs)
    assert tokens == naive_best_fit_decreasing(lengths, capacity)
    assert packs == fs.pack_lengths(torch.tensor(lengths, dtype=torch.int32), capacity)


def test_a_quarter_of_a_million_lengths_take_no_quadratic_time() -> None:
    lengths = random.Random(0).choices(range(1, 4097), k=250_000)
    start = time.process_time()
    fs.pack_lengths(lengths, 4096)
    assert time.process_time() - start < 2, "about 0.3 s; benchmarks/speed/packing.py measures"


def as_lists(batch: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    assert {(v.dtype, v.ndim, v.shape[0]) for v in batch.values()} == {(torch.int64, 2, 1)}
    return {name: value[0].tolist() for name, value in batch.items()}


def test_rows_are_joined_and_no_first_token_is_told_from_the_row_before() -> None:
    rows = [row(5, 6, 7), row(8), row(9, 10, targets=1), row(11, 12, targets=0)]
    before = copy.deepcopy(rows)
    encoded = [fs.EncodedChat(**one) for one in rows]
    tensors = [{name: torch.tensor(values) for name, values in one.items()} for one in rows]
    for each in (rows, encoded, tensors):
        assert as_lists(fs.PackedCollator(max_length=8)(each)) == {
            "input_ids": [5, 6, 7, 8, 9, 10, 11, 12],
            "labels": [-100, 6, 7, -100, -100, 10, -100, -100],
            "position_ids": [0, 1, 2, 0, 0, 1, 0, 1],
        }
    assert rows == before


def test_padding_is_a_row_of_its_own_without_targets() -> None:
    for length, multiple in ((8, 8), (7, 4)):
        collator = fs.PackedCollator(max_length=length, pad_to_multiple_of=multiple)
        assert as_lists(collator([row(5, 6, 7), row(8, 9)])) == {
            "input_ids": [5, 6, 7, 8, 9, 0, 0, 0],
            "labels": [-100, 6, 7, -100, 9, -100, -100, -100],
            "position_ids": [0, 1, 2, 0, 1, 0, 1, 2],
        }


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


@pytest.mark.parametrize("multiple", [1, 128])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "mixtral"])
def test_gradients_of_a_pack_are_the_sum_over_its_rows(family: str, attention: str, multiple: int) -> None:
    model = tiny_model(family, attn_implementation=attention, use_cache=True)
    rows = drawn_rows(6)
    loss, expected = gradients_of_separate_rows(model, rows)
    batch = fs.PackedCollator(max_length=128, pad_to_multiple_of=multiple)(rows)
    targets = sum(label != -100 for one in rows for label in one["labels"][1:])
    packed = fs.causal_lm_loss(model, batch, num_targets=targets) * targets
    packed.backward()
    actual = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert model.config.use_cache is True
    assert float(packed.detach()) == pytest.approx(loss, rel=1e-6)
    assert largest_error(actual, expected) < 1e-6


# --- packs of a round are alike: in cost, where one is given, else in tokens and targets --------------------

# Training FLOPs of a token and of a squared token of a model with 7 billion parameters.
COST = (4.0e10, 7.86e5)


def long_tailed(number: int, most: int) -> list[int]:
    draws = torch.randn(number, generator=torch.Generator().manual_seed(0))
    return [int(length) for length in (600 * torch.exp(1.3 * draws)).clamp(1, most)]


def order_of(lengths: list[int], capacity: int, ranks: int, **options: Any) -> list[list[list[int]]]:
    """The packs of an epoch: [round][rank][row]."""
    group = [
        fs.PackedSampler(lengths, max_length=capacity, num_replicas=ranks, rank=rank, **options)
        for rank in range(ranks)
    ]
    return [list(packs) for packs in zip(*group, strict=True)]


def step_over_even(rounds: list[list[list[int]]], lengths: list[int]) -> float:
    """What an epoch takes where ranks wait for each other in each round, over what it would take evenly."""

    def cost(pack: list[int]) -> float:
        return sum(COST[0] * lengths[row] + COST[1] * lengths[row] ** 2 for row in pack)

    costs = [[cost(pack) for pack in packs] for packs in rounds]
    return sum(map(max, costs)) * len(rounds[0]) / sum(map(sum, costs))


@pytest.mark.parametrize(
    ("capacity", "ranks", "rows", "most"),
    # Each rank's sampler makes the whole order.
    [(4096, 8, 10_000, 1.01), (4096, 48, 4_000, 1.03), (32768, 8, 10_000, 1.02), (32768, 16, 10_000, 1.03)],
)
def test_no_rank_waits_long(capacity: int, ranks: int, rows: int, most: float) -> None:
    lengths = long_tailed(rows, capacity)
    rounds, before = (order_of(lengths, capacity, ranks, cost=cost) for cost in (COST, None))
    assert step_over_even(rounds, lengths) <= most < step_over_even(before, lengths)
    assert len(rounds) <= len(before)
    for one in (rounds, before):
        assert Counter(itertools.chain(*itertools.chain(*one))) == Counter(range(rows))
        assert max(sum(lengths[row] for row in pack) for packs in one for pack in packs) <= capacity


def spread(rounds: list[list[list[int]]], sizes: list[int]) -> tuple[float, float]:
    """(mean over rounds of the largest over the mean of ranks; the same of the sums over all rounds)."""
    loads = [[sum(sizes[row] for row in pack) for pack in one] for one in rounds]
    totals = [sum(column) for column in zip(*loads, strict=True)]
    per_round = [max(load) * len(load) / sum(load) for load in loads if sum(load)]
    return sum(per_round) / len(per_round), max(totals) * len(totals) / sum(totals)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_have_about_as_many_tokens_and_targets_in_rounds_of_any_order(ranks: int) -> None:
    lengths, targets = chat_lengths(20_000, seed=1, longest=2048)
    rounds = order_of(lengths, 2048, ranks, num_targets=targets)[:-1]
    (tokens_each, tokens_all), (targets_each, targets_all) = spread(rounds, lengths), spread(rounds, targets)
    assert max(tokens_each / 1.002, tokens_all / 1.001, targets_each / 1.04, targets_all / 1.01) < 1
    packs = [pack for one in rounds for pack in one]
    random.Random(0).shuffle(packs)
    unsorted = [packs[i : i + ranks] for i in range(0, len(packs), ranks)]
    assert spread(unsorted, targets)[0] - 1 > 4 * (targets_each - 1), "rounds of packs as they come"
    sums = torch.tensor([sum(targets[row] for pack in one for row in pack) for one in rounds]).double()
    correlation = torch.corrcoef(torch.stack([sums[:-1], sums[1:]]))[0, 1]
    assert abs(float(correlation)) < 4 / math.sqrt(len(rounds)), "rounds come in no order of their targets"


def test_the_cost_of_attention_is_counted_from_the_config() -> None:
    sizes = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "intermediate_size": 512}
    config, sliding = tf.LlamaConfig(**sizes), tf.MistralConfig(**sizes, sliding_window=64)
    # 3 layers, as 3 forwards, 2 products of 2 FLOPs each, and half of the row on average.
    squared = 3 * 3 * 2 * 2 * 256 / 2
    assert fs.attention_cost(config) == (fs.model_flops_per_token(config, 1) - 2 * squared, squared)
    assert fs.attention_cost(sliding) == (fs.model_flops_per_token(sliding, 64), 0)
