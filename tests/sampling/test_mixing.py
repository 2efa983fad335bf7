"""MixedSampler: proportions, each row as often as asked, positions at any number of ranks, packs."""

import itertools
import json
from collections import Counter
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, DataLoader

import fsdp_sft as fs

SIZES = [900, 90, 10]


def owner(row: int) -> int:
    return 0 if row < 900 else 1 if row < 990 else 2


def group(ranks: int, **options: Any) -> list[fs.MixedSampler]:
    return [fs.MixedSampler(SIZES, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


def take(samplers: list[fs.MixedSampler], number: int | None = None) -> list[Any]:
    """What ranks get in step, in the order in which it was dealt out; reported as consumed."""
    taken = [list(itertools.islice(sampler, number)) for sampler in samplers]
    for sampler in samplers:
        sampler.mark_consumed(len(taken[0]))
    return [one for together in zip(*taken, strict=True) for one in together]


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({}, [900, 90, 10]),
        ({"weights": [1, 1, 2], "epoch_rows": 400}, [100, 100, 200]),
        ({"weights": [0.5, 0.5, 0]}, [500, 500, 0]),
        ({"counts": [10, 20, 30]}, [10, 20, 30]),
        ({"temperature": 1}, [900, 90, 10]),
        ({"temperature": 1e9, "epoch_rows": 300}, [100, 100, 100]),
        ({"temperature": 2, "epoch_rows": 4264}, [2999, 949, 316]),
    ],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_the_rows_that_are_asked_for(
    options: dict[str, Any], counts: list[int], shuffle: bool
) -> None:
    (sampler,) = group(1, **options, shuffle=shuffle)
    assert sampler.counts == counts
    seen: Counter[int] = Counter()
    for epoch in range(1, 4):
        rows = take([sampler])
        assert [Counter(map(owner, rows))[number] for number in range(3)] == counts
        seen.update(rows)
        assert sampler.epoch == epoch
        assert sampler.rows_seen == [epoch * count for count in counts]
        assert sampler.epochs == [epoch * count / size for count, size in zip(counts, SIZES, strict=True)]
        for number, (count, size) in enumerate(zip(counts, SIZES, strict=True)):
            times = {seen[row] for row in range(1000) if owner(row) == number}
            assert times <= {epoch * count // size, -(-epoch * count // size)}


def test_any_stretch_of_an_epoch_has_the_proportions() -> None:
    (sampler,) = group(1, weights=[5, 3, 2], epoch_rows=2000)
    owners = [owner(row) for row in sampler]
    for start in range(0, 2000, 100):
        counted = Counter(owners[start : start + 100])
        assert all(abs(counted[number] - share) <= 3 for number, share in enumerate((50, 30, 20)))


def test_what_comes_again_comes_in_another_order() -> None:
    (sampler,) = group(1, counts=[0, 0, 40])
    rows = list(sampler)
    turns = [rows[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(turn) == list(range(990, 1000)) for turn in turns)
    assert len(set(map(tuple, turns))) == 4


@pytest.mark.parametrize("packs", [False, True])
def test_positions_are_exact_when_the_number_of_ranks_changes(packs: bool) -> None:
    options: dict[str, Any] = {"weights": [2, 1, 1], "epoch_rows": 240}
    if packs:
        options |= {"lengths": [1 + row % 7 for row in range(1000)], "max_length": 16}
    expected = Counter(group(1, weights=[2, 1, 1], epoch_rows=240)[0])
    seen: Counter[int] = Counter()
    state = None
    for ranks, number in ((4, 5), (3, 4), (8, 2), (8, None)):
        samplers = group(ranks, **options)
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        taken = take(samplers, number)
        seen.update(row for one in taken for row in (one if packs else [one]))
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in samplers]
        assert states == [states[0]] * ranks
        state = states[0]
        if number is not None:
            counted = Counter(owner(row) for row in seen.elements())
            assert samplers[0].rows_seen == [counted[index] for index in range(3)]
    assert state is not None
    assert state["epoch"] == 1
    assert seen == expected


def test_packs_of_a_mixture() -> None:
    lengths = [[1 + row % 5 for row in range(size)] for size in SIZES]
    (sampler,) = group(1, counts=[30, 30, 30], lengths=lengths, max_length=20, cost=(1.0, 0.1))
    packs = list(sampler)
    flat = [length for part in lengths for length in part]
    assert len(packs) == len(sampler)
    assert max(sum(flat[row] for row in pack) for pack in packs) <= 20
    assert Counter(owner(row) for pack in packs for row in pack) == {0: 30, 1: 30, 2: 30}


@pytest.mark.parametrize("packs", [False, True])
def test_a_loader_with_windows_moves_the_position(packs: bool) -> None:
    rows = [
        [{"input_ids": [number, index, 1], "labels": [number, index, 1]} for index in range(size)]
        for number, size in enumerate((8, 4))
    ]
    data: Any = ConcatDataset(rows)  # type: ignore[arg-type]
    collate = fs.PackedCollator(max_length=6)
    if packs:
        sampler = fs.MixedSampler(rows, counts=[4, 8], lengths=[3] * 12, max_length=6)
        loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    else:
        sampler = fs.MixedSampler(rows, counts=[4, 8])
        loader = DataLoader(data, batch_size=2, sampler=sampler, collate_fn=collate)
    for number, window in enumerate(fs.windows(loader, 2), start=1):
        assert len(window) == 2
        if number < 3:
            assert sum(sampler.rows_seen) == 4 * number
    assert (sampler.epoch, sampler.rows_seen, sampler.epochs) == (1, [4, 8], [0.5, 2.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1, 1, 1], "counts": [1, 1, 1]}, "one of weights, counts and temperature"),
        ({"counts": [1, 2]}, "there are 3 data sets"),
        ({"counts": [0, 0, 0]}, "not all 0"),
        ({"counts": [-1, 0, 3]}, "not negative"),
        ({"weights": [0, 0, 0]}, "above 0"),
        ({"weights": [1, float("nan"), 1]}, "finite and not negative"),
        ({"temperature": 0.5}, "at least 1"),
        ({"counts": [1, 1, 1], "epoch_rows": 7}, "epoch_rows goes with"),
        ({"epoch_rows": 7}, "epoch_rows goes with"),
        ({"weights": [1, 1, 1], "epoch_rows": 0}, "epoch_rows must be a positive integer"),
        ({"lengths": [1] * 1000}, "both lengths and max_length"),
        ({"max_length": 4}, "both lengths and max_length"),
        ({"cost": (1.0, 0.0)}, "are for packs"),
        ({"lengths": [1] * 999, "max_length": 4}, "has 999 entries"),
        ({"lengths": [[1] * 900, [1] * 91, [1] * 9], "max_length": 4}, r"has \[900, 91, 9\] entries"),
    ],
)
def test_what_cannot_be_mixed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fs.MixedSampler(SIZES, **options)


def test_a_data_set_without_rows_and_a_state_of_other_proportions() -> None:
    with pytest.raises(ValueError, match="data set 1 has no rows"):
        fs.MixedSampler([3, 0], counts=[1, 1])
    assert fs.MixedSampler([3, 0], weights=[1, 0]).counts == [3, 0]
    state = fs.MixedSampler(SIZES, counts=[1, 2, 3]).state_dict()
    with pytest.raises(ValueError, match=r"counts=\[1, 2, 3\], this sampler \[3, 2, 1\]"):
        fs.MixedSampler(SIZES, counts=[3, 2, 1]).load_state_dict(state)
