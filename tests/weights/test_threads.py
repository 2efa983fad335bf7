"""How many threads read: by the processors that a rank has to itself, however they were shared out."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fsdp_sft as fs
from fsdp_sft._ranks.launch import own_share
from fsdp_sft.weights import fill
from tests.harness.hf_folders import save_tiny
from tests.harness.ranks import run_distributed


def _bits(*cpus: int) -> int:
    return sum(1 << cpu for cpu in cpus)


@pytest.mark.parametrize(
    ("cpus", "neighbours", "expected"),
    [
        (range(8), [_bits(*range(8))], 8),  # alone
        (range(8), [_bits(*range(8))] * 4, 2),  # torchrun: all see all
        (range(4, 8), [_bits(*range(4)), _bits(*range(4, 8))], 4),  # Slurm has bound each to its own
        (range(6), [_bits(*range(6)), _bits(*range(3, 9))], 4),  # three of its own and half of three
        ([0], [_bits(0)] * 16, 0),  # more ranks than processors
        (range(90, 93), [_bits(*range(90, 93))] * 3, 1),  # thirds add up
    ],
)
def test_processors_to_itself(cpus: Any, neighbours: list[int], expected: int) -> None:
    assert own_share(cpus, neighbours) == expected


def _threads_of_a_load(folder: Path, bound: bool) -> int:
    used = []
    do_reads = fill.do_reads

    def counted(*args: Any, workers: int, **kwargs: Any) -> int:
        used.append(workers)
        return do_reads(*args, workers=workers, **kwargs)

    fill.do_reads = counted
    first = 4 * dist.get_rank()
    cpus = set(range(first, first + 4)) if bound else set(range(8))
    os.sched_getaffinity = lambda _: cpus
    fs.load_weights(fs.build_meta_model(folder), folder)
    return max(used)


@pytest.mark.parametrize(("bound", "ranks", "expected"), [(True, 2, 4), (False, 2, 4), (False, 4, 2)])
def test_a_load_reads_with_them(tmp_path: Path, bound: bool, ranks: int, expected: int) -> None:
    save_tiny(tmp_path)
    assert run_distributed(_threads_of_a_load, ranks, tmp_path, bound) == [expected] * ranks
