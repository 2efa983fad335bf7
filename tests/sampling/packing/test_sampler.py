"""PackedSampler: every row once an epoch, balanced over ranks, resumed at any number of them."""

import itertools
import json
import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader

import fsdp_sft as fs
from tests.harness.packs import chat_lengths, drawn_rows
from tests.harness.ranks import run_distributed

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


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_an_epoch_has_every_row_once(ranks: int, shuffle: bool) -> None:
    group = samplers(ranks, shuffle=shuffle)
    lengths = [len(sampler) for sampler in group]
    rounds = take(group)
    assert lengths == [len(rounds)] * ranks
    assert rows_of(rounds) == Counter(range(400))
    assert all(pack and sum(LENGTHS[row] for row in pack) <= 512 for one in rounds for pack in one)
    fewest = len(fs.pack_lengths(LENGTHS, 512))
    assert len(rounds) == -(-fewest // ranks)
    assert {(sampler.epoch, sampler.position) for sampler in group} == {(1, 0)}
    again = take(group)
    assert rows_of(again) == Counter(range(400))
    assert (again == rounds) is (not shuffle)


@pytest.mark.parametrize("later", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_resuming_in_an_epoch_loses_no_row_and_sees_none_twice(ranks: int, later: int) -> None:
    whole = take(samplers(ranks))
    for done in (1, len(whole) // 2, len(whole) - 1):
        first = samplers(ranks)
        start = take(first, done)
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in first]
        assert states == [states[0]] * ranks, "the state is global"
        second = samplers(later)
        for sampler in second:
            sampler.load_state_dict(states[0])
        rest = take(second)
        assert rows_of(start) + rows_of(rest) == Counter(range(400))
        if later == ranks:
            assert start + rest == whole
        assert {(sampler.epoch, sampler.position) for sampler in second} == {(1, 0)}


def test_the_number_of_ranks_may_change_again_and_again() -> None:
    seen: Counter[int] = Counter()
    state = None
    for ranks, rounds in ((2, 5), (3, 4), (3, 2), (1, 7), (4, 3), (2, None)):
        group = samplers(ranks)
        for sampler in group:
            if state is not None:
                sampler.load_state_dict(state)
        seen += rows_of(take(group, rounds))
        state = group[0].state_dict()
    assert seen == Counter(range(400))
    assert state is not None
    assert (state["epoch"], state["position"]) == (1, 0)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_fewer_rows_than_ranks_need(ranks: int) -> None:
    (rounds,) = take(samplers(ranks, lengths=[3, 4], targets=[1, 1], max_length=8))
    assert sorted(map(len, rounds)) == [0] * (ranks - 2) + [1, 1]
    batch = fs.PackedCollator(max_length=8)([])
    assert (batch["labels"] == -100).all()


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


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_workers_fetched_ahead_are_not_lost(workers: int) -> None:
    rows = drawn_rows(60)
    lengths, targets = fs.row_sizes(rows)

    def loader(sampler: fs.PackedSampler) -> DataLoader[Any]:
        collate = fs.PackedCollator(max_length=48)
        return DataLoader(rows, batch_sampler=sampler, collate_fn=collate, num_workers=workers)

    def sampler(state: Any = None) -> fs.PackedSampler:
        made = fs.PackedSampler(lengths, max_length=48, num_targets=targets, seed=5)
        if state is not None:
            made.load_state_dict(state)
        return made

    whole = [batch["input_ids"].tolist() for batch in loader(sampler())]
    first = sampler()
    start = []
    for batch in itertools.islice(loader(first), 4):
        start.append(batch["input_ids"].tolist())
        first.mark_consumed(1)
    rest = [batch["input_ids"].tolist() for batch in loader(sampler(first.state_dict()))]
    assert start + rest == whole


def test_windows_report_packs_and_a_resumed_loop_continues() -> None:
    rows = drawn_rows(60)
    lengths, targets = fs.row_sizes(rows)

    def run(sampler: fs.PackedSampler, steps: int) -> list[list[Any]]:
        loader = DataLoader(rows, batch_sampler=sampler, collate_fn=fs.PackedCollator(max_length=48))
        seen: list[list[Any]] = []
        while len(seen) < steps:
            for window in fs.windows(loader, 3):
                seen.append([batch["input_ids"].tolist() for batch in window])
                if len(seen) == steps:
                    break
        return seen

    def sampler() -> fs.PackedSampler:
        return fs.PackedSampler(lengths, max_length=48, num_targets=targets, seed=5)

    per_epoch = -(-len(sampler()) // 3)
    whole = run(sampler(), 2 * per_epoch + 1)
    for stop in (1, per_epoch - 1, per_epoch, per_epoch + 1):
        first, second = sampler(), sampler()
        start = run(first, stop)
        second.load_state_dict(first.state_dict())
        assert start + run(second, len(whole) - stop) == whole, stop


def test_epochs_can_be_set_and_the_current_one_is_not_restarted() -> None:
    (sampler,) = samplers(1)
    first = list(sampler)
    sampler.mark_consumed(4)
    sampler.set_epoch(0)
    assert list(sampler) == first[4:]
    assert len(sampler) == len(first) - 4
    sampler.set_epoch(2)
    assert list(sampler) not in (first, first[4:])
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.end_epoch()
    assert sampler.epoch == 0, "it has not begun"


def test_states_of_other_data_are_refused() -> None:
    (sampler,) = samplers(1)
    state = sampler.state_dict()
    for key in ("num_rows", "max_length", "seed", "shuffle", "rows_crc32"):
        with pytest.raises(ValueError, match=f"{key}={state[key] + 1}"):
            sampler.load_state_dict({**state, key: state[key] + 1})
    with pytest.raises(ValueError, match="lacks"):
        sampler.load_state_dict({"epoch": 1})
    assert sampler.state_dict() == state, "a refused state changes nothing"
    other = fs.PackedSampler(LENGTHS[::-1], max_length=512, num_targets=TARGETS[::-1])
    with pytest.raises(ValueError, match="rows_crc32"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"lengths": []}, ValueError, "no rows"),
        ({"lengths": [3, 600], "targets": None}, ValueError, "row 1 has 600 tokens"),
        ({"targets": TARGETS[:-1]}, ValueError, "399 entries, lengths 400"),
        ({"targets": [0.5] * 400}, TypeError, "float"),
        ({"targets": [10**6] * 400}, ValueError, "row 0 .*cannot have 1000000 targets"),
        ({"targets": [-1] * 400}, ValueError, "row 0 .*cannot have -1 targets"),
        ({"max_length": 0}, ValueError, "capacity|max_length"),
    ],
)
def test_impossible_samplers_are_refused(options: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        samplers(1, **options)
    with pytest.raises(ValueError, match="rank must be in"):
        fs.PackedSampler(LENGTHS, max_length=512, num_replicas=2, rank=2)


def deal_on_ranks(rows: list[dict[str, list[int]]], state: Any, rounds: int | None) -> dict[str, Any]:
    lengths, targets = fs.row_sizes(rows)
    sampler = fs.PackedSampler(lengths, max_length=48, num_targets=targets)
    if state is not None:
        sampler.load_state_dict(state)
    loader = DataLoader(
        rows, batch_sampler=sampler, collate_fn=fs.PackedCollator(max_length=48), num_workers=1
    )
    seen = []
    for batch in itertools.islice(loader, rounds):
        starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
        seen += [part.tolist() for part in batch["input_ids"][0].tensor_split(starts[1:])]
        sampler.mark_consumed(1)
    return {"rows": seen, "state": sampler.state_dict()}


def test_real_ranks_share_an_epoch_and_another_number_of_them_finishes_it() -> None:
    rows = drawn_rows(60)
    first = run_distributed(deal_on_ranks, 2, rows, None, 5)
    assert first[0]["state"] == first[1]["state"]
    second = run_distributed(deal_on_ranks, 3, rows, first[0]["state"], None)
    seen = Counter(tuple(ids) for result in first + second for ids in result["rows"] if set(ids) != {0})
    assert seen == Counter(tuple(one["input_ids"]) for one in rows)
    assert {result["state"]["epoch"] for result in second} == {1}
