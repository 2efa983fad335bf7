"""One contract for everything that keeps a position, whatever the order of calls."""

import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import fsdp_sft as fs

ROWS = [
    {"input_ids": [number] * (2 + number % 5), "labels": [number] * (2 + number % 5)}
    for number in range(3, 39)
]
LENGTH = 8


PACKS = fs.PackedCollator(max_length=LENGTH)


def _sampler(ranks: int, rank: int, rows: Any = ROWS) -> Any:
    sampler = fs.ResumableSampler(rows, num_replicas=ranks, rank=rank)
    return sampler, DataLoader(ROWS, 2, sampler=sampler, collate_fn=fs.PackedCollator(max_length=64))


def _packed_sampler(ranks: int, rank: int) -> Any:
    sampler = fs.PackedSampler(
        [len(row["input_ids"]) for row in ROWS], max_length=LENGTH, num_replicas=ranks, rank=rank
    )
    return sampler, DataLoader(ROWS, batch_sampler=sampler, collate_fn=PACKS)


def _mixed_sampler(ranks: int, rank: int) -> Any:
    return _sampler(ranks, rank, fs.Mixture([ROWS[:18], ROWS[18:]]))


def _stream(ranks: int, rank: int, rows: Any = ROWS) -> Any:
    stream = fs.PackedStream(rows, max_length=LENGTH, buffer_size=12, num_replicas=ranks, rank=rank)
    return stream, DataLoader(stream, batch_size=None, collate_fn=PACKS)


def _mixed_stream(ranks: int, rank: int) -> Any:
    datasets = pytest.importorskip("datasets")
    parts = [datasets.Dataset.from_list(rows).to_iterable_dataset() for rows in (ROWS[:12], ROWS[12:])]
    rows = datasets.interleave_datasets(
        parts,
        probabilities=[0.4, 0.6],
        seed=0,
        stopping_strategy="all_exhausted_without_replacement",
    )
    return _stream(ranks, rank, rows)


KINDS: dict[str, Callable[[int, int], Any]] = {
    "sampler": _sampler,
    "packed sampler": _packed_sampler,
    "mixed sampler": _mixed_sampler,
    "stream": _stream,
    "mixed stream": _mixed_stream,
}


def _ids(window: list[Any]) -> list[int]:
    """The rows of a window: each is of one id."""
    found = []
    for batch in window:
        ids, positions = batch["input_ids"].flatten(), batch["position_ids"].flatten()
        found += ids[(positions == 0) & (batch["labels"].flatten() != -100).roll(-1)].tolist()
    return found


def _pass(loader: Any, most: int | None = None) -> list[int]:
    return [row for window in itertools.islice(fs.windows(loader, 1), most) for row in _ids(window)]


def _quietly(call: Callable[..., Any], *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args)


LOOPS: dict[str, Callable[[Any, int], None]] = {
    "no set_epoch": lambda keeper, epoch: None,
    "from 0 again": lambda keeper, epoch: _quietly(keeper.set_epoch, epoch),
    "from the epoch that was restored": lambda keeper, epoch: (
        keeper.set_epoch(epoch) if epoch >= keeper.epoch else None
    ),
}


def test_a_pass_that_goes_on_leaves_the_generator_from_which_dropout_draws() -> None:
    _, loader = _sampler(1, 0)
    _pass(loader, 3)
    before = torch.get_rng_state()
    _pass(loader, 3)
    assert torch.equal(torch.get_rng_state(), before), "as in the job that did not stop"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("stop", [(0, 3), (1, 0), (1, 3)], ids=str)
def test_a_resumed_loop_sees_the_rows_of_one_that_never_stopped(
    kind: str, loop: str, stop: tuple[int, int]
) -> None:
    keeper, loader = KINDS[kind](1, 0)
    epochs, windows = stop
    seen = [row for _ in range(epochs) for row in _pass(loader)]
    seen += _pass(loader, windows) if windows else []
    again, loader = KINDS[kind](1, 0)
    again.load_state_dict(keeper.state_dict())
    for epoch in range(epochs if loop == "no set_epoch" else 0, 2):
        LOOPS[loop](again, epoch)
        if loop != "from the epoch that was restored" or epoch >= epochs:
            seen += _quietly(_pass, loader)
    _, unbroken = KINDS[kind](1, 0)
    assert Counter(seen) == Counter([*_pass(unbroken), *_pass(unbroken)])
    assert len(seen) >= 2 * len(ROWS)


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_that_was_trained_is_passed_over_with_a_warning(kind: str) -> None:
    keeper, loader = KINDS[kind](1, 0)
    _pass(loader)
    _pass(loader, 2)
    again, loader = KINDS[kind](1, 0)
    again.load_state_dict(keeper.state_dict())
    with pytest.warns(UserWarning, match="epoch 0 was trained before the checkpoint, which is in epoch 1"):
        again.set_epoch(0)
    assert list(loader) == []


@pytest.mark.parametrize("kind", KINDS)
def test_draws_that_nobody_counts_are_said(kind: str) -> None:
    keeper, loader = KINDS[kind](1, 0)
    # A generator of the caller's own hides what keeps the position.
    next(iter(fs.windows((batch for batch in loader), 1)))
    with pytest.warns(UserWarning, match="were not marked as consumed"):
        keeper.state_dict()


class _Shuffled(IterableDataset[Any]):
    """A stream of the caller's own, whose order depends on the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(self.epoch))
        return iter([ROWS[index] for index in order.tolist()])


def _of_workers(**options: Any) -> Any:
    _, loader = _stream(1, 0, DataLoader(_Shuffled(), batch_size=None, **options))
    return loader


@pytest.mark.parametrize("persistent", [False, True])
def test_each_epoch_has_its_own_order_whatever_workers_read(persistent: bool) -> None:
    loader, plain = _of_workers(num_workers=1, persistent_workers=persistent), _of_workers()
    first, second = _pass(loader), _pass(loader)
    assert (first, second) == (_pass(plain), _pass(plain))
    assert first != second
