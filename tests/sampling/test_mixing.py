"""Mixtures: proportions, each row as often as asked, positions at any number of ranks, packs."""

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


def group(ranks: int, mixture: fs.Mixture, *lengths: Any, shuffle: bool = True) -> list[Any]:
    own = [{"num_replicas": ranks, "rank": rank, "shuffle": shuffle} for rank in range(ranks)]
    if lengths:
        return [fs.PackedSampler(*lengths, max_length=16, mixture=mixture, **options) for options in own]
    return [fs.ResumableSampler(mixture, **options) for options in own]


def take(samplers: list[Any], number: int | None = None) -> list[Any]:
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
        ({"weights": [10, 20, 30], "epoch_rows": 60}, [10, 20, 30]),
        ({"epoch_rows": 500}, [450, 45, 5]),
        ({"weights": [size**0.5 for size in SIZES], "epoch_rows": 4264}, [2999, 949, 316]),
    ],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_the_rows_that_are_asked_for(
    options: dict[str, Any], counts: list[int], shuffle: bool
) -> None:
    mixture = fs.Mixture(SIZES, **options)
    (sampler,) = group(1, mixture, shuffle=shuffle)
    assert mixture.counts == counts
    seen: Counter[int] = Counter()
    for epoch in range(1, 4):
        rows = take([sampler])
        assert [Counter(map(owner, rows))[number] for number in range(3)] == counts
        seen.update(rows)
        assert sampler.epoch == epoch
        for number, (count, size) in enumerate(zip(counts, SIZES, strict=True)):
            times = {seen[row] for row in range(1000) if owner(row) == number}
            assert times <= {epoch * count // size, -(-epoch * count // size)}


def test_any_stretch_of_an_epoch_has_the_proportions() -> None:
    (sampler,) = group(1, fs.Mixture(SIZES, weights=[5, 3, 2], epoch_rows=2000))
    owners = [owner(row) for row in sampler]
    for start in range(0, 2000, 100):
        counted = Counter(owners[start : start + 100])
        assert all(abs(counted[number] - share) <= 3 for number, share in enumerate((50, 30, 20)))


def test_what_comes_again_comes_in_another_order() -> None:
    (sampler,) = group(1, fs.Mixture(SIZES, weights=[0, 0, 1], epoch_rows=40))
    rows = list(sampler)
    turns = [rows[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(turn) == list(range(990, 1000)) for turn in turns)
    assert len(set(map(tuple, turns))) == 4


@pytest.mark.parametrize("packs", [False, True])
def test_positions_are_exact_when_the_number_of_ranks_changes(packs: bool) -> None:
    mixture = fs.Mixture(SIZES, weights=[2, 1, 1], epoch_rows=240)
    lengths = [[1 + row % 7 for row in range(1000)]] * packs
    expected = Counter(mixture.rows(0))
    seen: Counter[int] = Counter()
    state = None
    for ranks, number in ((4, 5), (3, 4), (8, 2), (8, None)):
        samplers = group(ranks, mixture, *lengths)
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        taken = take(samplers, number)
        seen.update(row for one in taken for row in (one if packs else [one]))
        states = [json.loads(json.dumps(sampler.state_dict())) for sampler in samplers]
        assert states == [states[0]] * ranks
        state = states[0]
    assert state is not None
    assert state["epoch"] == 1
    assert seen == expected


def test_packs_of_a_mixture() -> None:
    lengths = [1 + row % 5 for row in range(1000)]
    mixture = fs.Mixture(SIZES, weights=[1, 1, 1], epoch_rows=90)
    sampler = fs.PackedSampler(lengths, max_length=20, mixture=mixture, cost=(1.0, 0.1))
    packs = list(sampler)
    assert len(packs) == len(sampler)
    assert max(sum(lengths[row] for row in pack) for pack in packs) <= 20
    assert Counter(owner(row) for pack in packs for row in pack) == {0: 30, 1: 30, 2: 30}
    with pytest.raises(ValueError, match=r"lengths has 999 entries, the data sets have \[900, 90, 10\] rows"):
        fs.PackedSampler(lengths[1:], max_length=20, mixture=mixture)


@pytest.mark.parametrize("shuffle", [True, False])
def test_packs_of_the_next_epoch_are_of_the_rows_that_are_left(shuffle: bool) -> None:
    mixture = fs.Mixture([8], epoch_rows=4)
    sampler = fs.PackedSampler([1] * 8, max_length=2, mixture=mixture, shuffle=shuffle)
    rows = [row for _ in range(2) for pack in take([sampler]) for row in pack]
    assert sorted(rows) == list(range(8))


@pytest.mark.parametrize("packs", [False, True])
def test_a_loader_with_windows_moves_the_position(packs: bool) -> None:
    rows = [
        [{"input_ids": [number, index, 1], "labels": [number, index, 1]} for index in range(size)]
        for number, size in enumerate((8, 4))
    ]
    data: Any = ConcatDataset(rows)  # type: ignore[arg-type]
    collate = fs.PackedCollator(max_length=6)
    if packs:
        sampler: Any = fs.PackedSampler([3] * 12, max_length=6, mixture=fs.Mixture(rows, weights=[1, 2]))
        loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    else:
        sampler = fs.ResumableSampler(fs.Mixture(rows, weights=[1, 2]))
        loader = DataLoader(data, batch_size=2, sampler=sampler, collate_fn=collate)
    for number, window in enumerate(fs.windows(loader, 2), start=1):
        assert len(window) == 2
        if number < 3:
            assert sampler.position == (2 if packs else 4) * number
    assert (sampler.epoch, sampler.position) == (1, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1, 2]}, "one number for each of 3 data sets"),
        ({"weights": [0, 0, 0]}, "not all 0"),
        ({"weights": [-1, 0, 3]}, "not negative"),
        ({"weights": [1, float("nan"), 1]}, "finite and not negative"),
        ({"weights": [1, 1, 1], "epoch_rows": 0}, "epoch_rows must be an integer of at least 1"),
    ],
)
def test_what_cannot_be_mixed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fs.Mixture(SIZES, **options)


def test_a_data_set_without_rows_and_a_state_of_other_proportions() -> None:
    with pytest.raises(ValueError, match="data set 1 has no rows"):
        fs.Mixture([3, 0], weights=[1, 1], epoch_rows=2)
    assert fs.Mixture([3, 0], weights=[1, 0]).counts == [3, 0]
    given, other = (fs.Mixture(SIZES, weights=counts, epoch_rows=6) for counts in ([1, 2, 3], [3, 2, 1]))
    for lengths in ([], [[1] * 1000]):
        (saved,), (later,), (plain,) = (group(1, one, *lengths) for one in (given, other, fs.Mixture(SIZES)))
        with pytest.raises(ValueError, match=r"counts=\[1, 2, 3\], and here it is \[3, 2, 1\]"):
            later.load_state_dict(saved.state_dict())
        with pytest.raises(ValueError, match="the state has"):
            plain.load_state_dict(saved.state_dict())
