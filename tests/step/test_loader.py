"""Windows of a loader's batches, the same number on all ranks."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.ranks import run_distributed


def _check_windows() -> None:
    rank = dist.get_rank()
    batches = ragged_batches(9)
    lengths = [len(window) for window in fs.windows(batches[: 5 + 2 * rank], 3)]
    assert lengths == [3, 2], "the rank with fewest batches ends the pass for all"
    assert [len(window) for window in fs.windows(batches[:6], 3)] == [3, 3]
    with pytest.raises(ValueError, match="no target on any rank"):
        list(fs.windows(batches[-1:] * 2, 1))
    list(fs.windows(batches[-1:] if rank else batches[:1], 1))

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
    with pytest.raises(ValueError, match="grad_accum_steps must be a positive integer"):
        fs.windows(batches, 0)


def test_windows_keep_ranks_together() -> None:
    run_distributed(_check_windows, 2, timeout=60)


def _check_loader_that_does_not_start() -> None:
    class Broken:
        def __iter__(self) -> Any:
            if dist.get_rank() == 1:
                raise OSError("cannot fork")
            return iter(ragged_batches(3))

    model = fs.shard_model(tiny_model("gpt2"), mesh=mesh_here())
    with pytest.raises(OSError, match="cannot fork"):
        list(fs.windows(Broken(), 1))
    with pytest.raises(OSError, match="cannot fork"):
        fs.evaluate(model, Broken())


def test_a_loader_that_does_not_start_on_one_rank_raises_on_all() -> None:
    run_distributed(_check_loader_that_does_not_start, 2, timeout=30)


def _shuffled_alone(kind: str) -> list[str]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = [{"input_ids": [index] * 2, "labels": [index] * 2} for index in range(3, 19)]
    own = rows[rank::ranks] if kind == "parts" else rows
    torch.manual_seed(rank)
    options: dict[str, Any] = {
        "collate_fn": lambda rows: {k: torch.tensor([r[k] for r in rows]) for k in rows[0]}
    }
    if kind == "sampler":
        options["sampler"] = fs.ResumableSampler(own)
    else:
        options["shuffle"] = kind != "in order"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(fs.windows(DataLoader(own, 2, **options), 1))  # type: ignore[arg-type]
    return [str(each.message) for each in caught if "shuffle the same rows" in str(each.message)]


@pytest.mark.parametrize("kind", ["whole", "parts", "sampler", "in order"])
def test_ranks_that_shuffle_the_same_rows_for_themselves_are_told(kind: str) -> None:
    first, second = run_distributed(_shuffled_alone, 2, kind)
    assert len(first) == (kind == "whole")
    assert second == []
    assert all("2 ranks shuffle the same rows" in text and "ResumableSampler" in text for text in first)
