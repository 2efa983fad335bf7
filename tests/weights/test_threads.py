"""How many threads read: by the processors that a rank has to itself, however they were shared out."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fsdp_sft as fs
from fsdp_sft.weights import fill
from tests.harness.hf_folders import save_tiny
from tests.harness.ranks import run_distributed


def _threads_of_a_load(folder: Path, bound: bool) -> int:
    used = []
    do_reads = fill.do_reads

    def counted(*args: Any, workers: int = 1, **kwargs: Any) -> int:
        used.append(workers)
        return do_reads(*args, workers=workers, **kwargs)

    fill.do_reads = counted
    first = 4 * dist.get_rank()
    cpus = set(range(first, first + 4)) if bound else set(range(8))
    os.sched_getaffinity, os.cpu_count = lambda _: cpus, lambda: 8
    fs.load_weights(fs.build_meta_model(folder), folder)
    return max(used)


@pytest.mark.parametrize(("bound", "ranks", "expected"), [(True, 2, 4), (False, 2, 4), (False, 4, 2)])
def test_a_load_reads_with_them(tmp_path: Path, bound: bool, ranks: int, expected: int) -> None:
    save_tiny(tmp_path)
    assert run_distributed(_threads_of_a_load, ranks, tmp_path, bound) == [expected] * ranks
