"""ResumableSampler in a loader: the shares of torch's sampler, and what ``windows`` reports of any loader."""

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import fsdp_sft as fs
from tests.harness.ranks import run_distributed


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shares_in_the_order_of_the_rows_are_those_of_torchs_sampler(ranks: int) -> None:
    for rank in range(ranks):
        own = fs.ResumableSampler(23, shuffle=False, num_replicas=ranks, rank=rank)
        assert list(own) == list(DistributedSampler(range(23), ranks, rank, shuffle=False))


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


def _ids(windows: Any) -> list[list[list[int]]]:
    """The ids of each batch of each window."""
    return [[batch["input_ids"].flatten().tolist() for batch in window] for window in windows]


def _steps(rows: int, count: int, state: Any = None) -> tuple[list[Any], Any]:
    """The windows of so many steps, over epochs, and the state after them."""
    sampler = fs.ResumableSampler(rows, seed=3)
    sampler.load_state_dict(state or sampler.state_dict())
    loader = DataLoader(_Rows(), 2, sampler=sampler, drop_last=True)
    seen: list[Any] = []
    while len(seen) < count:
        seen += _ids(itertools.islice(fs.windows(loader, 2), count - len(seen)))
    return seen, sampler.state_dict()


@pytest.mark.parametrize("rows", [10, 11], ids=["all rows", "a tail that the loader drops"])
def test_windows_report_rows_and_a_resumed_loop_continues(rows: int) -> None:
    whole, _ = _steps(rows, 7)
    assert [len(window) for window in whole] == [2, 2, 1, 2, 2, 1, 2]
    for stop in range(1, 7):
        start, state = _steps(rows, stop)
        assert start + _steps(rows, 7 - stop, state)[0] == whole, stop


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
    whole = _ids(fs.windows(_loader(kind)[1], 2))
    assert len(whole) in (4, 8)
    source, loader = _loader(kind, workers)
    passed = fs.windows(loader, 2)
    start, state = _ids(itertools.islice(passed, 3)), source.state_dict()
    passed.close()
    again, loader = _loader(kind, workers)
    again.load_state_dict(state)
    assert start + _ids(fs.windows(loader, 2)) == whole
    assert (again.epoch, again.position) == (1, 0)


# --- made before there is a process group ---

MAKE: dict[str, Any] = {
    "rows": lambda: fs.ResumableSampler(16, seed=2),
    "packs": lambda: fs.PackedSampler([4] * 16, max_length=8, seed=2),
}


def _made_before(kind: str) -> list[Any]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed.distributed_c10d._world, "default_pg", None)
        early = MAKE[kind]()
        assert early.num_replicas == 1
        before = early.state_dict()
    late = MAKE[kind]()
    assert (early.num_replicas, early.rank, len(early)) == (world, rank, len(late))
    assert list(early) == list(late)
    early.mark_consumed(1)
    late.mark_consumed(1)
    assert early.state_dict() == late.state_dict() != before
    return list(early)


@pytest.mark.parametrize("kind", MAKE)
def test_a_sampler_made_before_the_process_group_serves_all_ranks(kind: str) -> None:
    seen = [str(row) for share in run_distributed(_made_before, 2, kind) for row in share]
    assert len(seen) == len(set(seen)), "ranks have different rows"
