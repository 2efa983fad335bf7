"""Packs that cost every rank the same: rows once each, the modelled step, and positions."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import transformers as tf

import fsdp_sft as fs

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
