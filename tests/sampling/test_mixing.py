"""Mixtures: proportions, each row as often as asked, positions at any number of ranks, packs."""

import itertools
from collections import Counter
from typing import Any

import pytest

import fsdp_sft as fs

SIZES = [900, 90, 10]


def owner(row: int) -> int:
    return 0 if row < 900 else 1 if row < 990 else 2


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
    sampler = fs.ResumableSampler(mixture, shuffle=shuffle)
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
    sampler = fs.ResumableSampler(fs.Mixture(SIZES, weights=[5, 3, 2], epoch_rows=2000))
    owners = [owner(row) for row in sampler]
    for start in range(0, 2000, 100):
        counted = Counter(owners[start : start + 100])
        assert all(abs(counted[number] - share) <= 3 for number, share in enumerate((50, 30, 20)))


def test_what_comes_again_comes_in_another_order() -> None:
    sampler = fs.ResumableSampler(fs.Mixture(SIZES, weights=[0, 0, 1], epoch_rows=40))
    rows = list(sampler)
    turns = [rows[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(turn) == list(range(990, 1000)) for turn in turns)
    assert len(set(map(tuple, turns))) == 4


@pytest.mark.parametrize("shuffle", [True, False])
def test_packs_of_the_next_epoch_are_of_the_rows_that_are_left(shuffle: bool) -> None:
    mixture = fs.Mixture([8], epoch_rows=4)
    sampler = fs.PackedSampler([1] * 8, max_length=2, mixture=mixture, shuffle=shuffle)
    rows = [row for _ in range(2) for pack in take([sampler]) for row in pack]
    assert sorted(rows) == list(range(8))
