"""PackedSampler: every row once an epoch, balanced over ranks, resumed at any number of them."""

import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import fsdp_sft as fs
from tests.harness.packs import chat_lengths

LENGTHS, TARGETS = chat_lengths(400)


def samplers(
    ranks: int, lengths: Any = LENGTHS, targets: Any = TARGETS, **options: Any
) -> list[fs.PackedSampler]:
    options = {"max_length": 512, "num_targets": targets, **options}
    return [fs.PackedSampler(lengths, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


def take(group: list[fs.PackedSampler], rounds: int | None = None) -> list[list[list[int]]]:
    """``rounds`` packs of each rank in step, or all, reported as consumed: [round][rank][row]."""
    taken = [list(itertools.islice(sampler, rounds)) for sampler in group]
    assert len({len(packs) for packs in taken}) == 1, "as many batches on every rank"
    for sampler in group:
        sampler.mark_consumed(len(taken[0]))
    return [list(packs) for packs in zip(*taken, strict=True)]


def rows_of(rounds: list[list[list[int]]]) -> Counter[int]:
    return Counter(row for one in rounds for pack in one for row in pack)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_data_on_any_ranks(data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=40))
    first, second = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    group = samplers(first, lengths=lengths, targets=None, max_length=16)
    start = take(group, data.draw(st.integers(0, len(group[0]))))
    later = samplers(second, lengths=lengths, targets=None, max_length=16)
    for sampler in later:
        sampler.load_state_dict(group[0].state_dict())
    rest = take(later) if later[0].epoch == 0 else []
    assert rows_of(start) + rows_of(rest) == Counter(range(len(lengths)))


def spread(rounds: list[list[list[int]]], sizes: list[int]) -> tuple[float, float]:
    """(mean over rounds of the largest over the mean of ranks; the same of the sums over all rounds)."""
    loads = [[sum(sizes[row] for row in pack) for pack in one] for one in rounds]
    totals = [sum(column) for column in zip(*loads, strict=True)]
    per_round = [max(load) * len(load) / sum(load) for load in loads if sum(load)]
    return sum(per_round) / len(per_round), max(totals) * len(totals) / sum(totals)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_have_about_as_many_tokens_and_targets(ranks: int) -> None:
    lengths, targets = chat_lengths(20_000, seed=1, longest=2048)
    group = samplers(ranks, lengths=lengths, targets=targets, max_length=2048)
    rounds = take(group)[:-1]
    tokens_each, tokens_all = spread(rounds, lengths)
    targets_each, targets_all = spread(rounds, targets)
    assert tokens_each < 1.002
    assert tokens_all < 1.001
    assert targets_each < 1.04
    assert targets_all < 1.01
    packs = [pack for one in rounds for pack in one]
    random.Random(0).shuffle(packs)
    unsorted = [packs[i : i + ranks] for i in range(0, len(packs), ranks)]
    assert spread(unsorted, targets)[0] - 1 > 4 * (targets_each - 1), "rounds of packs as they come"


def test_rounds_do_not_come_in_the_order_of_their_targets() -> None:
    lengths, targets = chat_lengths(20_000, seed=1, longest=2048)
    rounds = take(samplers(4, lengths=lengths, targets=targets, max_length=2048))[:-1]
    sums = torch.tensor([sum(targets[row] for pack in one for row in pack) for one in rounds]).double()
    correlation = torch.corrcoef(torch.stack([sums[:-1], sums[1:]]))[0, 1]
    assert abs(float(correlation)) < 4 / math.sqrt(len(rounds))
