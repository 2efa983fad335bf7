"""PackedStream: packs of a stream within a buffer, resumed without losing or repeating a row."""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

import fsdp_sft as fs
from tests.harness.packs import assert_same, drawn_rows, row


class Source(IterableDataset):
    """A stream that counts what is read of it."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.read = rows, 0

    def __iter__(self) -> Any:
        for one in self.rows:
            self.read += 1
            yield one


def streams(ranks: int, rows: Any, **options: Any) -> list[fs.PackedStream]:
    options = {"max_length": 48, "buffer_size": 17, **options}
    return [fs.PackedStream(rows, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


def take_rows(group: list[fs.PackedStream], rounds: int | None = None) -> list[list[list[Any]]]:
    taken = [list(itertools.islice(stream, rounds)) for stream in group]
    assert len({len(packs) for packs in taken}) == 1
    for stream in group:
        stream.mark_consumed(len(taken[0]))
    return [list(packs) for packs in zip(*taken, strict=True)]


def ids_of(rows: Iterable[Any]) -> Counter[Any]:
    return Counter(tuple(one["input_ids"]) for one in rows)


def rows_of(rounds: list[list[list[Any]]]) -> list[Any]:
    return [one for packs in rounds for pack in packs for one in pack]


STREAMED = drawn_rows(100)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_stream_is_packed_within_its_buffer(ranks: int) -> None:
    rounds = take_rows(streams(ranks, STREAMED))
    assert ids_of(rows_of(rounds)) == ids_of(STREAMED)
    sizes = [sum(len(r["input_ids"]) for r in pack) for one in rounds for pack in one]
    assert 0 < min(sizes) <= max(sizes) <= 48
    source = Source(STREAMED)
    next(iter(fs.PackedStream(source, max_length=48, buffer_size=17, num_replicas=1, rank=0)))
    assert source.read == 17


def test_a_stream_goes_on_to_its_next_epoch() -> None:
    (stream,) = streams(1, STREAMED)
    whole, state = take_rows([stream]), stream.state_dict()
    assert (state["epoch"], state["position"]) == (0, len(whole))
    (resumed,) = streams(1, STREAMED)
    resumed.load_state_dict(state)
    assert take_rows([resumed], 2) == whole[:2], "it was consumed to its end"
    assert (resumed.epoch, resumed.position) == (1, 2)
    resumed.end_epoch()
    assert (resumed.epoch, resumed.position) == (2, 0)
    assert take_rows([resumed]) == whole
    assert list(streams(1, [])[0]) == []


def test_a_stream_feeds_a_loader_and_tokenised_rows_may_come_from_workers() -> None:
    source = DataLoader(STREAMED, batch_size=None, num_workers=2)  # type: ignore[arg-type]
    (stream,) = streams(1, source)
    collator = fs.PackedCollator(max_length=48)
    batches = list(DataLoader(stream, batch_size=None, collate_fn=collator))
    expected = [collator(pack) for (pack,) in take_rows(streams(1, STREAMED))]
    assert_same(dict(enumerate(batches)), dict(enumerate(expected)))
    with pytest.raises(RuntimeError, match="num_workers=0 here"):
        list(DataLoader(stream, batch_size=None, collate_fn=collator, num_workers=1))


def test_a_bad_row_of_a_stream_is_named() -> None:
    rows = [*STREAMED[:20], row(*range(1, 60))]
    with pytest.raises(ValueError, match="row 3 has 59 tokens") as caught:
        list(streams(1, rows)[0])
    assert "from row 17 of the stream" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="labels"):
        list(streams(1, [{"input_ids": [1]}])[0])


class Shuffling(Source):
    """A stream with an order for each epoch, as a Hugging Face stream that shuffles."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(self.rows[self.epoch :] + self.rows[: self.epoch])


class Files(Shuffling):
    """A stream of files that are read in another order in each epoch."""

    def __iter__(self) -> Any:
        return itertools.chain(*(self.rows[(self.epoch + turn) % 3 :: 3] for turn in range(3)))


_SIXTY = [row(*[number] * (3 + number % 5)) for number in range(60)]


def _hub(kind: str) -> Any:
    """A stream of ``datasets`` in one file or several; skips the test without that package."""
    datasets = pytest.importorskip("datasets")
    if kind == "function":
        return datasets.IterableDataset.from_generator(lambda: iter(_SIXTY))
    whole = datasets.Dataset.from_list(_SIXTY)
    found = whole.to_iterable_dataset(num_shards=1 if kind == "1 shard" else 3)
    if kind == "interleaved":
        parts = [whole.select(range(start, 60, 2)) for start in range(2)]
        streamed = [part.to_iterable_dataset(num_shards=3).shuffle(seed=3, buffer_size=8) for part in parts]
        return datasets.interleave_datasets(streamed, stopping_strategy="all_exhausted_without_replacement")
    if "shard" in kind:
        return found
    shuffled = found.shuffle(seed=3, buffer_size=16)
    if kind == "mapped":
        return shuffled.map(lambda one: {"labels": one["input_ids"]})
    return shuffled.filter(lambda one: one["input_ids"][0] % 3) if kind == "filtered" else shuffled


HUB = ("function", "1 shard", "3 shards", "shuffled", "interleaved", "mapped", "filtered")
KINDS: dict[str, Any] = {
    "list": lambda: _SIXTY,
    "generator": lambda: Source(_SIXTY),
    "files": lambda: Files(_SIXTY),
    "files in a loader": lambda: DataLoader(Files(_SIXTY), batch_size=None),
    **{kind: functools.partial(_hub, kind) for kind in HUB},
    "workers": lambda: DataLoader(_hub("shuffled"), batch_size=None, num_workers=2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_resumed_in_any_epoch_with_each_row_once(kind: str) -> None:
    """In epochs 0 to 3, at three places, with the same number of ranks and another."""

    def opened(ranks: int, epoch: int, state: Any = None) -> list[fs.PackedStream]:
        found = streams(ranks, KINDS[kind](), max_length=16, buffer_size=10)
        for stream in found:
            stream.load_state_dict(state) if state else stream.set_epoch(epoch)
        return found

    rows = [one for one in _SIXTY if kind != "filtered" or one["input_ids"][0] % 3]
    has_workers = "workers" in kind  # of which each reading starts two
    for epoch in (2,) if has_workers else range(4):
        whole = take_rows(opened(2, epoch))
        assert ids_of(rows_of(whole)) == ids_of(rows)
        for cut in (len(whole) // 2,) if has_workers else (1, len(whole) // 2, len(whole) - 1):
            first = opened(2, epoch)
            start = take_rows(first, cut)
            state, other = (json.loads(json.dumps(stream.state_dict())) for stream in first)
            assert state == other, "that of the whole job"
            assert start + take_rows(opened(2, epoch, state)) == whole, (epoch, cut)
            for ranks in () if has_workers else (1, 3):
                rest = take_rows(opened(ranks, epoch, state))
                assert ids_of(rows_of(start + rest)) == ids_of(rows), (epoch, cut)


def test_rows_that_are_a_share_already_are_not_shared_again() -> None:
    source = Source(drawn_rows(20))
    # As datasets.distributed.split_dataset_by_node leaves it.
    source._distributed = SimpleNamespace(world_size=4)
    with pytest.raises(ValueError, match="one of 4 shares already"):
        next(iter(streams(2, source)[0]))
    assert next(iter(streams(1, source)[0]))
