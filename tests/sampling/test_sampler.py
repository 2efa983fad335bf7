"""ResumableSampler: every row once, and exact resumption at any number of ranks."""

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import fsdp_sft as fs
from tests.harness.ranks import run_distributed


def _samplers(ranks: int, num_rows: int = 23, **options: object) -> list[fs.ResumableSampler]:
    return [fs.ResumableSampler(num_rows, num_replicas=ranks, rank=r, **options) for r in range(ranks)]


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


# --- what a loader took, whatever its batches look like ---


class _Batches(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A data set that gives complete batches, of three rows each."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        ids = torch.full((3, 4), 5 + (index if isinstance(index, int) else index[0]))
        return {"input_ids": ids, "labels": ids}


class _Rows(_Batches):
    """One row for an index."""

    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        return {name: tensor[0] for name, tensor in super().__getitem__(index).items()}


class _Pairs:
    """A batch sampler of one's own, by twos; it does not say so."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        rows = iter(self.sampler)
        return zip(rows, rows, strict=False)

    def __len__(self) -> int:
        return len(self.sampler) // 2


def _in_one_row(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}


def _loader(kind: str, workers: int = 0) -> tuple[Any, DataLoader[Any]]:
    sampler = fs.ResumableSampler(16, seed=1)
    packs = fs.PackedSampler([4] * 16, max_length=8, seed=1)
    kinds: dict[str, Any] = {
        "one batch for an index": (sampler, {"batch_size": None, "sampler": sampler, "dataset": _Batches()}),
        "packing collator": (sampler, {"batch_size": 2, "sampler": sampler, "collate_fn": _in_one_row}),
        "packs that are padded": (packs, {"batch_sampler": packs}),
        "packs for a data set": (packs, {"batch_size": None, "sampler": packs, "dataset": _Batches()}),
        "a batch sampler of one's own": (sampler, {"batch_sampler": _Pairs(sampler)}),
        "torch's batch sampler": (sampler, {"batch_sampler": BatchSampler(sampler, 2, drop_last=True)}),
    }
    source, options = kinds[kind]
    return source, DataLoader(**{"dataset": _Rows(), **options}, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "kind",
    [
        "one batch for an index",
        "packing collator",
        "packs that are padded",
        "packs for a data set",
        "a batch sampler of one's own",
        "torch's batch sampler",
    ],
)
def test_no_batch_is_lost_after_a_resume(kind: str, workers: int) -> None:
    def ids(window: list[dict[str, torch.Tensor]]) -> list[list[int]]:
        return [batch["input_ids"].flatten().tolist() for batch in window]

    whole = [ids(window) for window in fs.windows(_loader(kind)[1], 2)]
    assert len(whole) in (4, 8)
    source, loader = _loader(kind, workers)
    passed = fs.windows(loader, 2)
    start = [ids(next(passed)) for _ in range(3)]
    state = source.state_dict()
    passed.close()
    again, loader = _loader(kind, workers)
    again.load_state_dict(state)
    assert start + [ids(window) for window in fs.windows(loader, 2)] == whole
    assert (again.epoch, again.position) == (1, 0)


def _rows() -> Any:
    sampler = fs.ResumableSampler(16, seed=2)
    return sampler, {"sampler": sampler, "batch_size": 2}


def _packs() -> Any:
    sampler = fs.PackedSampler([4] * 16, max_length=8, seed=2)
    return sampler, {"batch_sampler": sampler}


# --- made before there is a process group ---


def _made_before(make: Any) -> list[list[Any]]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed.distributed_c10d._world, "default_pg", None)
        early, _ = make()
        assert early.num_replicas == 1
        before = early.state_dict()
    late, _ = make()
    assert (early.num_replicas, early.rank, len(early)) == (world, rank, len(late))
    assert list(early) == list(late)
    early.mark_consumed(1)
    late.mark_consumed(1)
    assert early.state_dict() == late.state_dict() != before
    return [list(early)]


@pytest.mark.parametrize("make", [_rows, _packs])
def test_a_sampler_made_before_the_process_group_serves_all_ranks(make: Any) -> None:
    shares = [share for (share,) in run_distributed(_made_before, 2, make)]
    seen = [str(row) for share in shares for row in share]
    assert len(seen) == len(set(seen)), "ranks have different rows"
