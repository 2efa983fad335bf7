"""Packs of a round are alike: in cost, where one is given, else in tokens and targets."""

import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
import transformers as tf

import fsdp_sft as fs
from tests.harness.packs import chat_lengths

# Training FLOPs of a token and of a squared token of a model with 7 billion parameters.
COST = (4.0e10, 7.86e5)


def long_tailed(number: int, most: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    lengths = 600 * torch.exp(1.3 * torch.randn(number, generator=generator))
    return [int(length) for length in lengths.clamp(1, most)]


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
    rounds = order_of(lengths, capacity, ranks, cost=COST)
    before = order_of(lengths, capacity, ranks)
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
    config = tf.LlamaConfig(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=8, intermediate_size=512
    )
    a, b = fs.attention_cost(config)
    # 3 layers, as 3 forwards, 2 products of 2 FLOPs each, and half of the row on average.
    assert b == 3 * 3 * 2 * 2 * 256 / 2
    assert a == fs.model_flops_per_token(config, 1) - 2 * b
    sliding = tf.MistralConfig(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=8, intermediate_size=512, sliding_window=64
    )
    assert fs.attention_cost(sliding)[1] == 0
    assert fs.attention_cost(sliding)[0] == fs.model_flops_per_token(sliding, 64)
