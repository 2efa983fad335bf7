"""Orders of rows and packs: each row once an epoch on any ranks, resumed on any others; what is refused."""

import contextlib
import itertools
import json
import zlib
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import fsdp_sft as fs
from tests.harness.models import tiny_model
from tests.harness.packs import chat_lengths, drawn_rows
from tests.harness.ranks import run_distributed

ROWS = 120
LENGTHS, TARGETS = chat_lengths(ROWS)
COST = (1.0, 0.1)
MIXTURE = fs.Mixture([80, 30, 10], weights=[2, 1, 1], epoch_rows=100)
packs = partial(fs.PackedSampler, LENGTHS, max_length=512, num_targets=TARGETS)
# How each is made; the checksum of its first two epochs on one rank and two: with another one, positions that
# were saved would mean other rows.
KINDS: dict[str, tuple[Any, int]] = {
    "rows": (partial(fs.ResumableSampler, ROWS), 1455555094),
    "packs": (packs, 592024065),
    "packs by cost": (partial(packs, cost=COST), 63023767),
    "rows of a mixture": (partial(fs.ResumableSampler, MIXTURE), 1221667653),
    "packs of a mixture": (partial(packs, mixture=MIXTURE), 593244227),
}


def made(kind: str, ranks: int, state: Any = None, **options: Any) -> list[Any]:
    group = [KINDS[kind][0](num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]
    for sampler in group if state else ():
        sampler.load_state_dict(json.loads(json.dumps(state)))
    return group


def places(group: list[Any]) -> set[tuple[int, int]]:
    return {(sampler.epoch, sampler.position) for sampler in group}


def take(group: list[Any], rounds: int | None = None) -> list[int]:
    """``rounds`` items of each rank in step, or all, reported as consumed: their rows, as they are dealt."""
    shares = [list(itertools.islice(sampler, rounds)) for sampler in group]
    for sampler in group:
        sampler.mark_consumed(len(shares[0]))
    dealt = [item for together in zip(*shares, strict=True) for item in together]
    return [row for item in dealt for row in (item if isinstance(item, list) else [item])]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_once_on_any_ranks_and_resumed_on_any_others(kind: str, shuffle: bool) -> None:
    expected = Counter(take(made(kind, 1, shuffle=shuffle)))
    assert expected == Counter(range(ROWS)) or "mixture" in kind
    for ranks in (1, 2, 3, 8):
        group = made(kind, ranks, shuffle=shuffle)
        (rounds,) = {len(sampler) for sampler in group}
        whole = take(group)
        assert places(group) == {(1, 0)}
        for done in {1, rounds // 2, rounds - 1}:
            first = made(kind, ranks, shuffle=shuffle)
            start = take(first, done)
            states = [sampler.state_dict() for sampler in first]
            assert states == [states[0]] * ranks, "the state is global"
            for later in (1, 2, 3, 8):
                second = made(kind, later, states[0], shuffle=shuffle)
                seen = start + take(second)
                filled = seen[expected.total() :]  # a last round of rows is filled up, one of packs is split
                assert Counter(seen[: expected.total()]) == expected
                assert len(filled) < (1 if "packs" in kind else later)
                assert later != ranks or seen == whole
                assert places(second) == {(1, 0)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_ranks_may_change_again_and_again(kind: str) -> None:
    expected, seen, state = take(made(kind, 1)), list[int](), None
    for ranks, rounds in ((2, 2), (3, 1), (3, 1), (1, 2), (2, None)):
        group = made(kind, ranks, state)
        seen += take(group, rounds)
        state = group[0].state_dict()
    assert Counter(seen[: len(expected)]) == Counter(expected)
    assert (state["epoch"], state["position"]) == (1, 0)  # type: ignore[index]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_packs_of_any_rows_on_any_ranks(data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=40))
    group, later = (
        [fs.PackedSampler(lengths, max_length=16, num_replicas=ranks, rank=rank) for rank in range(ranks)]
        for ranks in data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    )
    start = take(group, data.draw(st.integers(0, len(group[0]))))
    for sampler in later:
        sampler.load_state_dict(group[0].state_dict())
    rest = take(later) if later[0].epoch == 0 else []
    assert Counter(start + rest) == Counter(range(len(lengths)))


@pytest.mark.parametrize("kind", KINDS)
def test_positions_of_earlier_runs_mean_the_same_rows(kind: str) -> None:
    rows = [take(group) for group in (made(kind, 1), made(kind, 2)) for _ in range(2)]
    assert zlib.crc32(json.dumps(rows).encode()) == KINDS[kind][1]


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_differ_follow_by_themselves_and_can_be_set(kind: str) -> None:
    (sampler,) = made(kind, 1)
    first, second = list(sampler), take([sampler]) and list(sampler)
    assert (first != second, sampler.epoch) == (True, 1)
    sampler.set_epoch(0)
    assert list(sampler) == first, "back, without a resume"
    sampler.mark_consumed(4)
    sampler.set_epoch(0)
    assert list(sampler) == first[4:], "the current epoch is not begun anew"
    assert len(sampler) == len(first) - 4
    sampler.set_epoch(2)
    sampler.end_epoch()
    assert sampler.epoch == 2, "it has not begun"


STREAM = partial(fs.PackedStream, drawn_rows(9), max_length=48)


@pytest.mark.parametrize("kind", [*KINDS, "stream"])
def test_states_of_other_data_and_options_are_refused(kind: str) -> None:
    (sampler,) = [STREAM(num_replicas=1, rank=0)] if kind == "stream" else made(kind, 1)
    state = sampler.state_dict()
    for key in state.keys() - {"epoch", "position", "ranks"}:
        with pytest.raises(ValueError, match=rf"the state has {key}=.*, and here it is .*use the same data"):
            sampler.load_state_dict({**state, "epoch": 3, key: "another"})
    with pytest.raises(ValueError, match="=None, and here it is"):
        sampler.load_state_dict({"epoch": 1})
    assert sampler.state_dict() == state, "a refused state changes nothing"
    for other in KINDS.keys() - {kind}:
        with pytest.raises(ValueError, match="the state"):
            sampler.load_state_dict(made(other, 1)[0].state_dict())


def test_other_rows_and_proportions_are_another_order() -> None:
    reverse = fs.PackedSampler(LENGTHS[::-1], max_length=512, num_targets=TARGETS[::-1])
    with pytest.raises(ValueError, match="rows_crc32"):
        reverse.load_state_dict(packs().state_dict())
    other = fs.Mixture([80, 30, 10], weights=[1, 2, 1], epoch_rows=100)
    with pytest.raises(ValueError, match=r"counts=\[50, 25, 25\], and here it is \[25, 50, 25\]"):
        fs.ResumableSampler(other).load_state_dict(fs.ResumableSampler(MIXTURE).state_dict())


IMPOSSIBLE: dict[str, tuple[Any, type[Exception], str]] = {
    "no rows": (lambda: fs.ResumableSampler(0), ValueError, "number of rows must be .* at least 1, got 0"),
    "a path for rows": (lambda: fs.ResumableSampler("rows.jsonl"), TypeError, "got str"),
    "a rank beyond the ranks": (lambda: packs(num_replicas=2, rank=2), ValueError, "rank must be in"),
    "a rank below 0": (lambda: STREAM(num_replicas=2, rank=-1), ValueError, "rank must be in"),
    "no rows to pack": (lambda: fs.PackedSampler([], max_length=8), ValueError, "number of rows must be"),
    "a row beyond a pack": (
        lambda: fs.pack_lengths([3, 9], 8), ValueError, "row 1 has 9 tokens, a pack holds 1 to 8; truncate",
    ),
    "an empty row": (lambda: fs.pack_lengths([3, 0], 8), ValueError, "row 1 has 0 tokens.*empty rows"),
    "half a token": (lambda: fs.pack_lengths([3.0], 8), TypeError, "float"),  # type: ignore[list-item]
    "no room": (lambda: fs.PackedSampler([3], max_length=0), ValueError, "capacity"),
    "half a target": (lambda: packs(num_targets=[0.5] * ROWS), TypeError, "float"),
    "targets of fewer rows": (
        lambda: packs(num_targets=TARGETS[1:]), ValueError, "119 entries, lengths 120",
    ),
    "a mixture of other rows": (
        lambda: fs.PackedSampler([3] * 9, max_length=8, mixture=MIXTURE), ValueError,
        r"lengths has 9 entries, the data sets have \[80, 30, 10\] rows",
    ),
    "a weight too few": (lambda: fs.Mixture([3, 4], weights=[1]), ValueError, "one number for each of 2"),
    "no weight": (lambda: fs.Mixture([3, 4], weights=[0, 0]), ValueError, "not all 0"),
    "a negative weight": (lambda: fs.Mixture([3, 4], weights=[-1, 3]), ValueError, "not negative"),
    "a weight that is nan": (lambda: fs.Mixture([3], weights=[float("nan")]), ValueError, "finite"),
    "an epoch of nothing": (lambda: fs.Mixture([3], epoch_rows=0), ValueError, "epoch_rows must be"),
    "rows of an empty set": (
        lambda: fs.Mixture([3, 0], weights=[1, 1], epoch_rows=2), ValueError,
        r"\[1, 1\] rows of data sets of \[3, 0\]: .* weight 0",
    ),
    "no buffer": (lambda: STREAM(buffer_size=0), ValueError, "buffer_size"),
    "rows that are read once": (
        lambda: fs.PackedStream(iter(drawn_rows(9)), max_length=48), TypeError, "read again in each epoch",
    ),
    "a collator without room": (lambda: fs.PackedCollator(max_length=0), ValueError, "max_length"),
    "a multiple of nothing": (
        lambda: fs.PackedCollator(max_length=4, pad_to_multiple_of=0), ValueError, "pad_to_multiple_of",
    ),
    "a probe of nothing": (
        lambda: fs.verify_packing(tiny_model("llama"), max_length=0), ValueError, "max_length",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_cannot_be_is_refused(what: str) -> None:
    call, error, message = IMPOSSIBLE[what]
    with pytest.raises(error, match=message):
        call()


# --- what an epoch of a mixture has ---

SIZES = [900, 90, 10]


def owners(rows: list[int]) -> Counter[int]:
    """How many of the rows each data set has."""
    return Counter(0 if row < 900 else 1 if row < 990 else 2 for row in rows)


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
        seen.update(rows)
        assert ([owners(rows)[number] for number in range(3)], sampler.epoch) == (counts, epoch)
        for own, count in zip((range(900), range(900, 990), range(990, 1000)), counts, strict=True):
            assert {seen[row] for row in own} <= {epoch * count // len(own), -(-epoch * count // len(own))}


def test_any_stretch_of_an_epoch_has_the_proportions() -> None:
    rows = list(fs.ResumableSampler(fs.Mixture(SIZES, weights=[5, 3, 2], epoch_rows=2000)))
    for start in range(0, 2000, 100):
        counted = owners(rows[start : start + 100])
        assert all(abs(counted[number] - share) <= 3 for number, share in enumerate((50, 30, 20)))


def test_what_comes_again_comes_in_another_order() -> None:
    rows = list(fs.ResumableSampler(fs.Mixture(SIZES, weights=[0, 0, 1], epoch_rows=40)))
    turns = [rows[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(turn) == list(range(990, 1000)) for turn in turns)
    assert len(set(map(tuple, turns))) == 4


@pytest.mark.parametrize("shuffle", [True, False])
def test_packs_of_the_next_epoch_are_of_the_rows_that_are_left(shuffle: bool) -> None:
    sampler = fs.PackedSampler([1] * 8, max_length=2, mixture=fs.Mixture([8], epoch_rows=4), shuffle=shuffle)
    assert sorted(take([sampler]) + take([sampler])) == list(range(8))


def test_a_state_has_the_options_as_they_are_now() -> None:
    """Those that are set after the start, and keys of the caller's own, which are none of them."""
    (sampler,) = made("rows", 1)
    sampler.seed = 7
    state = {**sampler.state_dict(), "note": 1}
    made("rows", 1, state, seed=7)
    with pytest.raises(ValueError, match="the state has seed=7, and here it is 0"):
        made("rows", 1, state)


def test_packs_are_made_anew_for_another_seed() -> None:
    sampler = packs()
    first, sampler.seed = list(sampler), 7
    assert list(sampler) == list(packs(seed=7)) != first


# --- in a loader: the shares of the sampler of torch, and what ``windows`` reports of any loader ---


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shares_in_the_order_of_the_rows_are_those_of_torchs_sampler(ranks: int) -> None:
    for rank in range(ranks):
        own = fs.ResumableSampler(23, shuffle=False, num_replicas=ranks, rank=rank)
        assert list(own) == list(DistributedSampler(range(23), ranks, rank, shuffle=False))


# --- what a loader took, whatever its batches look like ---


class _Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A data set that gives one row for an index, or a complete batch of another shape."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        ids = torch.full(self.shape, 5 + (index if isinstance(index, int) else index[0]))
        return {"input_ids": ids, "labels": ids}


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
        "one batch for an index": (sampler, {"batch_size": None, "sampler": sampler, "dataset": _Data(3, 4)}),
        "packing collator": (sampler, {"batch_size": 2, "sampler": sampler, "collate_fn": _in_one_row}),
        "packs that are padded": (packs, {"batch_sampler": packs}),
        "packs for a data set": (packs, {"batch_size": None, "sampler": packs, "dataset": _Data(3, 4)}),
        "a batch sampler of one's own": (sampler, {"batch_sampler": _Pairs(sampler)}),
        "torch's batch sampler": (sampler, {"batch_sampler": BatchSampler(sampler, 2, drop_last=True)}),
        "a tail that the loader drops": (sampler, {"batch_size": 3, "sampler": sampler, "drop_last": True}),
    }
    source, options = kinds[kind]
    return source, DataLoader(**{"dataset": _Data(4), **options}, num_workers=workers)


def _ids(windows: Any) -> list[list[list[int]]]:
    """The ids of each batch of each window."""
    return [[batch["input_ids"].flatten().tolist() for batch in window] for window in windows]


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *itertools.product(
            (
                *("one batch for an index", "packing collator", "packs that are padded"),
                *("packs for a data set", "a batch sampler of one's own", "torch's batch sampler"),
            ),
            (0, 1),
        ),
        ("a tail that the loader drops", 0),
    ],
)
def test_no_batch_is_lost_after_a_resume(kind: str, workers: int) -> None:
    whole = _ids(fs.windows(_loader(kind)[1], 2))
    assert len(whole) in (3, 4, 8)
    source, loader = _loader(kind, workers)
    with contextlib.closing(fs.windows(loader, 2)) as passed:
        start, state = _ids(itertools.islice(passed, len(whole) - 1)), source.state_dict()
    again, loader = _loader(kind, workers)
    again.load_state_dict(state)
    assert start + _ids(fs.windows(loader, 2)) == whole
    assert (again.epoch, again.position) == (1, 0)


# --- made before there is a process group ---


def _made_before(kind: str) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed.distributed_c10d._world, "default_pg", None)
        early = KINDS[kind][0]()
        assert early.num_replicas == 1
        before = early.state_dict()
    late = KINDS[kind][0]()
    assert (early.num_replicas, early.rank, len(early)) == (2, torch.distributed.get_rank(), len(late))
    assert list(early) == list(late)
    for sampler in (early, late):
        sampler.mark_consumed(1)
    assert early.state_dict() == late.state_dict() != before
    return list(early)


@pytest.mark.parametrize("kind", ["rows", "packs"])
def test_a_sampler_made_before_the_process_group_serves_all_ranks(kind: str) -> None:
    seen = [str(row) for share in run_distributed(_made_before, 2, kind) for row in share]
    assert len(seen) == len(set(seen)), "ranks have different rows"
