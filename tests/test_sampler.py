"""ResumableSampler: every row once, and exact resumption at any number of ranks."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import fsdp_sft as fs


def _samplers(ranks: int, num_rows: int = 23, **options: object) -> list[fs.ResumableSampler]:
    return [fs.ResumableSampler(num_rows, num_replicas=ranks, rank=r, **options) for r in range(ranks)]


def _take(samplers: list[fs.ResumableSampler], rows: int) -> list[int]:
    """``rows`` rows from each rank in step, in the global order."""
    iterators = [iter(sampler) for sampler in samplers]
    taken = [[next(iterator) for iterator in iterators] for _ in range(rows)]
    for sampler in samplers:
        sampler.mark_consumed(rows)
    return [row for step in taken for row in step]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_epoch_is_a_fair_share_of_every_row(ranks: int, drop_last: bool, shuffle: bool) -> None:
    samplers = _samplers(ranks, shuffle=shuffle, drop_last=drop_last)
    shares = [list(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {len(samplers[0])}
    rows = [row for share in shares for row in share]
    if drop_last:
        assert len(set(rows)) == len(rows) == 23 // ranks * ranks
    else:
        assert set(rows) == set(range(23))
        assert len(rows) == -(-23 // ranks) * ranks
    if not shuffle:
        expected = [
            list(DistributedSampler(range(23), ranks, r, shuffle=False, drop_last=drop_last))
            for r in range(ranks)
        ]
        assert shares == expected, "the shares are DistributedSampler's"


@pytest.mark.parametrize("later", [1, 2, 3, 4])
def test_resuming_at_another_number_of_ranks_loses_and_repeats_nothing(later: int) -> None:
    before = _samplers(2, num_rows=24)
    seen = _take(before, 5)
    assert len({tuple(sorted(s.state_dict().items())) for s in before}) == 1, "the state is global"
    after = _samplers(later, num_rows=24)
    for sampler in after:
        sampler.load_state_dict(before[0].state_dict())
    rest = [list(sampler) for sampler in after]
    rows = {row for share in rest for row in share}
    left = set(range(24)) - set(seen)
    assert rows >= left
    padding = sum(map(len, rest)) - len(left)
    assert padding == -len(left) % later, "only a last round that does not divide is filled up"
    in_order = list(fs.ResumableSampler(24, num_replicas=1, rank=0))
    merged = [share[i] for i in range(max(map(len, rest))) for share in rest if i < len(share)]
    assert (seen + merged)[:24] == in_order


def test_epochs_differ_follow_by_themselves_and_can_be_set() -> None:
    (sampler,) = _samplers(1)
    first = list(sampler)
    assert _take([sampler], 23) == first
    assert (sampler.epoch, sampler.position) == (1, 0)
    second = list(sampler)
    assert second != first
    assert sorted(second) == sorted(first)
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.mark_consumed(4)
    sampler.set_epoch(0)
    assert list(sampler) == first[4:], "setting the current epoch does not restart it"
    assert len(sampler) == 19


@pytest.mark.parametrize("rows", [10, 11], ids=["all rows", "a tail that the loader drops"])
def test_windows_report_rows_and_a_resumed_loop_continues(rows: int) -> None:
    def collate(chosen: list[int]) -> dict[str, torch.Tensor]:
        ids = torch.tensor(chosen)[:, None].repeat(1, 2) + 5
        return {"input_ids": ids, "labels": ids}

    def loader(sampler: fs.ResumableSampler) -> DataLoader:
        return DataLoader(range(rows), batch_size=2, sampler=sampler, collate_fn=collate, drop_last=True)

    def ids(window: list[dict[str, torch.Tensor]]) -> list[int]:
        return [int(row[0]) for batch in window for row in batch["input_ids"]]

    def run(sampler: fs.ResumableSampler, steps: int) -> list[list[int]]:
        seen = []
        while len(seen) < steps:
            for window in fs.windows(loader(sampler), 2):
                seen.append(ids(window))
                if len(seen) == steps:
                    break
        return seen

    whole = run(fs.ResumableSampler(rows, seed=3), 7)
    assert [len(window) for window in whole] == [4, 4, 2, 4, 4, 2, 4]
    assert len(set(sum(whole[:3], []))) == 10
    for stop in range(1, 7):
        first = fs.ResumableSampler(rows, seed=3)
        start = run(first, stop)
        second = fs.ResumableSampler(rows, seed=3)
        second.load_state_dict(first.state_dict())
        assert start + run(second, 7 - stop) == whole, stop


def test_a_loader_that_drops_its_tail_goes_on_to_the_next_epoch() -> None:
    sampler = fs.ResumableSampler(5, shuffle=False)
    loader = DataLoader(
        range(5),
        batch_size=2,
        sampler=sampler,
        drop_last=True,
        collate_fn=lambda rows: {"input_ids": torch.tensor([rows]), "labels": torch.tensor([rows])},
    )
    assert len(list(fs.windows(loader, 1))) == 2
    assert (sampler.epoch, sampler.position) == (1, 0)
    assert len(list(fs.windows(loader, 1))) == 2


def test_states_of_other_data_are_refused() -> None:
    (sampler,) = _samplers(1)
    for key, value in (("num_rows", 24), ("seed", 1), ("shuffle", 0)):
        with pytest.raises(ValueError, match=f"{key}={value}"):
            sampler.load_state_dict({**sampler.state_dict(), key: value})
    with pytest.raises(ValueError, match="lacks"):
        sampler.load_state_dict({"epoch": 1})
    with pytest.raises(ValueError, match="outside"):
        sampler.load_state_dict({**sampler.state_dict(), "position": 99})


def test_impossible_samplers_are_refused() -> None:
    with pytest.raises(ValueError, match="0 rows cannot give"):
        fs.ResumableSampler(0)
    with pytest.raises(ValueError, match="use more rows"):
        fs.ResumableSampler(3, num_replicas=4, rank=0, drop_last=True)
    with pytest.raises(ValueError, match="rank must be in"):
        fs.ResumableSampler(3, num_replicas=2, rank=2)
    assert [list(s) for s in _samplers(4, num_rows=1)] == [[0]] * 4


def test_rows_are_counted_however_a_collator_joins_them() -> None:
    def row(index: int) -> dict[str, list[int]]:
        return {"input_ids": [index + 5] * 3, "labels": [index + 5] * 3}

    rows = [row(index) for index in range(10)]
    sampler = fs.ResumableSampler(rows, seed=1)
    packed = DataLoader(rows, 4, sampler=sampler, collate_fn=fs.PackedCollator(max_length=64))
    positions = [(sampler.epoch, sampler.position) for _ in fs.windows(packed, 1)]
    assert positions == [(0, 4), (0, 8), (1, 0)]

    inner = fs.ResumableSampler(rows, seed=1)
    batches = torch.utils.data.BatchSampler(inner, 4, drop_last=True)
    nested = DataLoader(rows, batch_sampler=batches, collate_fn=fs.PackedCollator(max_length=64))
    assert [inner.position for _ in fs.windows(nested, 1)] == [4, 8]
    assert (inner.epoch, inner.position) == (1, 0)
