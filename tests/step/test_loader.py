"""Windows of a loader's batches, the same number on all ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import fsdp_sft as fs
from fsdp_sft.step.window import num_rows
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.ranks import mesh_here, on_ranks, run_distributed


@on_ranks(2, timeout=60)
def test_windows_keep_ranks_together() -> None:
    rank, batches = dist.get_rank(), ragged_batches(9)
    lengths = [len(window) for window in fs.windows(batches[: 5 + 2 * rank], 3)]
    assert lengths == [3, 2], "the rank with fewest batches ends the pass for all"
    assert [len(window) for window in fs.windows(batches[:6], 3)] == [3, 3]
    with pytest.raises(ValueError, match="the epoch has no window"):
        list(fs.windows(batches[:rank], 1))

    def failing() -> Any:
        yield from batches[:2]
        if rank == 1:
            raise OSError("bad sector")
        yield from batches[2:]

    seen = []
    with pytest.raises(OSError, match="bad sector") as caught:
        for window in fs.windows(failing(), 2):
            seen.append(len(window))
    assert seen == [2]
    assert "rank 1 failed first while reading the next window" in caught.value.__notes__[0]

    class Broken:
        def __iter__(self) -> Any:
            if rank == 1:
                raise OSError("cannot fork")
            return iter(batches)

    model = fs.shard_model(tiny_model("gpt2"), mesh=mesh_here())
    for call in (lambda: list(fs.windows(Broken(), 1)), lambda: fs.evaluate(model, Broken())):
        with pytest.raises(OSError, match="cannot fork"):
            call()
    loader = DataLoader(list(range(24)), 2)
    for given, match in (
        ({"grad_accum_steps": 0}, "grad_accum_steps must be an integer of at least 1, got 0"),
        ({}, "one of the two"),
        ({"grad_accum_steps": 1, "global_batch": 8}, "one of the two"),
        (
            {"global_batch": 6},
            "global_batch=6 is no multiple of 4, which 2 ranks take at once with a batch size",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            fs.windows(loader, **given)
    sampler = fs.PackedSampler([6] * 16, max_length=12)
    packs = DataLoader(batches + batches, batch_sampler=sampler, collate_fn=lambda pack: pack[0])
    assert len(next(iter(fs.windows(packs, global_batch=4)))) == 2, "a pack is a batch"
    buckets = DataLoader(list(range(24)), batch_sampler=[[0, 1], [2]])  # batches of unequal sizes
    for unknown in (batches, buckets):
        with pytest.raises(ValueError, match="whose batches have a known size"):
            fs.windows(unknown, global_batch=8)


class _Rows:
    """A loader without a size of its batches, whose sampler counts rows."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.sampler, self.consumed = batches, self, []

    def __iter__(self) -> Any:
        return iter(self.batches)

    def mark_consumed(self, count: int) -> None:
        self.consumed.append(count)


@on_ranks(2, timeout=60)
def test_batches_are_mapped_where_they_are_read() -> None:
    batches = ragged_batches(4)

    def renamed(batch: Any) -> Any:
        """One row of a batch of two, under the names that a step takes."""
        return {"input_ids": batch["tokens"][:1], "labels": batch["targets"][:1]}

    theirs = [{"tokens": batch["input_ids"], "targets": batch["labels"]} for batch in batches]
    loader = _Rows([{**batch, "input_ids": batch["tokens"]} for batch in theirs])
    found = [batch for window in fs.windows(loader, 2, map_fn=renamed) for batch in window]
    assert [batch["labels"].tolist() for batch in found] == [own["labels"][:1].tolist() for own in batches]
    assert loader.consumed == [4, 4], "rows that the loader has taken, not those of the mapped batches"
    with pytest.raises(KeyError, match="tokens") as caught:
        list(fs.windows(batches if dist.get_rank() else theirs, 2, map_fn=renamed))
    assert "rank 1 failed first while reading the next window" in caught.value.__notes__[0]


def _rows(number: int, first: int = 3) -> list[dict[str, Any]]:
    return [{"input_ids": [index] * 2, "labels": [index] * 2} for index in range(first, first + number)]


def _stack(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("how", ["load_state_dict", "set_epoch", "mark_consumed"])
def test_a_sampler_that_is_moved_in_the_middle_of_a_pass(how: str) -> None:
    rows: Any = _rows(8)
    state = {**fs.ResumableSampler(rows).state_dict(), "position": 4}
    given = {"load_state_dict": state, "set_epoch": 3, "mark_consumed": 1}[how]
    sampler = fs.ResumableSampler(rows)
    loader: Any = DataLoader(rows, 2, sampler=sampler, collate_fn=_stack)
    windows = fs.windows(loader, 1)
    next(windows)
    getattr(sampler, how)(given)
    with pytest.raises(fs.BatchError, match="was moved in the middle of a pass"):
        next(windows)
    if how != "mark_consumed":  # after the last window it may be moved
        sampler.load_state_dict({**state, "position": 6})
        next(windows := fs.windows(loader, 1))
        getattr(sampler, how)(given)
        with pytest.raises(StopIteration):
            next(windows)
        assert (sampler.epoch, sampler.position) == ((0, 4) if how == "load_state_dict" else (3, 0))
    if how == "load_state_dict":  # as is advised
        sampler.load_state_dict(state)
        assert len(list(fs.windows(loader, 1))) == 2


def _micro_batches(**shape: int) -> list[int]:
    mesh, rows = mesh_here(**shape), _rows(24)
    loader: Any = DataLoader(rows, 2, sampler=fs.ResumableSampler(rows, mesh=mesh), collate_fn=_stack)
    return [len(window) for window in fs.windows(loader, global_batch=8, mesh=mesh)]


@pytest.mark.parametrize(("ranks", "shape", "expected"), [(1, {}, 4), (2, {}, 2), (2, {"cp": 2}, 4)])
def test_a_global_batch_makes_as_many_steps_on_any_number_of_ranks(
    ranks: int, shape: Any, expected: int
) -> None:
    assert run_distributed(_micro_batches, ranks, **shape)[0] == [expected] * 3


def test_a_batch_without_a_tensor_has_no_rows_to_count() -> None:
    with pytest.raises(fs.BatchError, match="a batch without a tensor"):
        num_rows({"text": ["a"]})
