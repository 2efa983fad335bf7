"""Several streams read as one: proportions, ends, and going on in the middle."""

import itertools
import json
from collections import Counter

import pytest
from torch.utils.data import DataLoader, IterableDataset

import fsdp_sft as fs


class Shuffled:
    """A stream with an order for each epoch, and a list of what it was asked for."""

    def __init__(self, name, size):
        self.name, self.size, self.epoch, self.epochs = name, size, 0, []

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.epochs.append(epoch)

    def __iter__(self):
        return iter([f"{self.name}{(row + self.epoch) % self.size}" for row in range(self.size)])


def from_which(rows):
    return Counter(row[0] for row in rows)


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [5, 2, 1], [0.9, 0.099, 0.001], [7]])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_stretch_has_the_proportions_that_were_asked_for(weights, epoch):
    mixed = fs.MixedStream([range(1)] * len(weights), weights=weights, seed=3)
    mixed.set_epoch(epoch)
    for number in (1, 10, 100, 12_345, 300_000):
        counts = mixed.counts(number)
        assert sum(counts) == number
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - number * weight / sum(weights)) <= 4, (number, counts)
    for start in (0, 17, 4_321, 250_000):
        stretch = [b - a for a, b in zip(mixed.counts(start), mixed.counts(start + 1000), strict=True)]
        assert all(abs(n - 1000 * w / sum(weights)) <= 4 for n, w in zip(stretch, weights, strict=True)), (
            stretch
        )


def test_an_epoch_reads_every_stream_to_its_end_and_small_ones_again_in_another_order():
    small, large = Shuffled("a", 3), Shuffled("b", 30)
    mixed = fs.MixedStream([small, large], weights=[1, 2])
    rows = list(mixed)
    assert {f"b{i}" for i in range(30)} <= set(rows)
    counts = from_which(rows)
    assert counts["b"] == 30
    assert abs(counts["a"] - 15) <= 2
    of_small = [row for row in rows if row[0] == "a"]
    assert [sorted(of_small[i : i + 3]) for i in (0, 3, 6)] == [["a0", "a1", "a2"]] * 3
    assert len(set(small.epochs)) == len(small.epochs) >= 5  # each time another number: another order
    before = list(small.epochs)
    mixed.set_epoch(1)
    assert list(mixed) != rows
    assert not set(before) & set(small.epochs[len(before) :])


def test_or_ends_with_the_first_that_ends():
    rows = list(fs.MixedStream([["a"] * 3, ["b"] * 1000], weights=[1, 2], stop="first"))
    counts = from_which(rows)
    assert counts["a"] == 3
    assert abs(counts["b"] - 6) <= 3


def test_a_stream_of_weight_0_is_not_read():
    def broken():
        raise AssertionError("it was read")

    class Broken:
        __iter__ = staticmethod(broken)

    assert list(fs.MixedStream([["a"], Broken()], weights=[1, 0])) == ["a"]
    assert fs.MixedStream([["a"], Broken()], weights=[1, 0]).counts(9) == [9, 0]


def encoded(number, first):
    return [fs.EncodedChat(input_ids=[first + row] * 5, labels=[first + row] * 5) for row in range(number)]


def packs_of(world_sizes, steps, state=None):
    """Rows in the order of training: so many ranks, one number after the other, read ``steps`` packs each."""
    seen = []
    for world_size in world_sizes:
        taken = []
        for rank in range(world_size):
            rows = fs.MixedStream([encoded(40, 100), encoded(12, 900)], weights=[2, 1], seed=1)
            stream = fs.PackedStream(rows, max_length=16, buffer_size=8, num_replicas=world_size, rank=rank)
            if state is not None:
                stream.load_state_dict(json.loads(json.dumps(state)))
            taken.append(list(itertools.islice(stream, steps)))
        stream.mark_consumed(len(taken[-1]))
        state = stream.state_dict()
        seen += [pack for of_ranks in zip(*taken, strict=True) for pack in of_ranks]
    return [
        row["input_ids"][0] if isinstance(row, dict) else row.input_ids[0] for p in seen for row in p
    ], state


def test_packs_of_it_go_on_at_another_number_of_ranks():
    straight, _ = packs_of([1], 18)
    resized, state = packs_of([2, 3, 1], 3)
    assert resized == straight
    assert state["position"] == 18


def test_a_position_of_other_weights_is_refused():
    rows = [encoded(40, 100), encoded(12, 900)]
    stream = fs.PackedStream(fs.MixedStream(rows, weights=[2, 1]), max_length=16)
    other = fs.PackedStream(fs.MixedStream(rows, weights=[1, 1]), max_length=16)
    with pytest.raises(ValueError, match="the state has order="):
        other.load_state_dict(stream.state_dict())
    plain = fs.PackedStream(rows[0], max_length=16)
    with pytest.raises(ValueError, match=r"the state lacks \['order'\]"):
        stream.load_state_dict(plain.state_dict())


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(encoded(20, 100))


def test_loaders_with_workers_are_streams_and_it_is_not_read_by_several_workers():
    loader = DataLoader(Numbers(), batch_size=None, num_workers=1)
    rows = list(fs.MixedStream([loader, encoded(20, 900)]))
    assert len(rows) >= 40

    class Outer(IterableDataset):
        def __iter__(self):
            return iter(fs.MixedStream([Numbers()]))

    with pytest.raises(RuntimeError, match="one of 2 workers"):
        list(DataLoader(Outer(), batch_size=None, num_workers=2))
    with pytest.raises(TypeError, match="no len"):
        next(iter(DataLoader(fs.MixedStream([[1]]), batch_size=1)))


def test_shares_of_a_stream_are_seen_below_it():
    split = Shuffled("a", 5)
    split._distributed = type("Distributed", (), {"world_size": 2})()
    stream = fs.PackedStream(fs.MixedStream([split]), max_length=4, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="one of 2 shares already"):
        next(iter(stream))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": [1]}, ValueError, "a number for each of the 2 streams"),
        ({"weights": [0, 0]}, ValueError, "one of them above 0"),
        ({"weights": [1, -1]}, ValueError, "finite and not negative"),
        ({"weights": [1, float("nan")]}, ValueError, "finite and not negative"),
        ({"weights": ["1", 1]}, TypeError, "weights must be numbers"),
        ({"stop": "last"}, ValueError, "stop must be 'all' or 'first'"),
        ({"streams": [iter([1]), [2]]}, TypeError, "stream 0 is a list_iterator"),
        ({"streams": [[1], 7]}, TypeError, "stream 1 is a int"),
        ({"streams": []}, ValueError, "each of the 0 streams"),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        fs.MixedStream(**{"streams": [["a"], ["b"]], **options})


@pytest.mark.parametrize("stop", ["all", "first"])
def test_a_stream_without_rows_is_named(stop):
    with pytest.raises(ValueError, match="stream 1 has no rows"):
        list(fs.MixedStream([["a"], []], stop=stop))
