"""How files are read: by how many threads, and without what lies beside a rank's part."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import fsdp_sft as fs
from fsdp_sft._tensors import reader as read
from fsdp_sft._tensors.boxes import Box
from fsdp_sft.weights import fill
from fsdp_sft.weights.resolve import open_checkpoint
from tests.harness.hf_folders import save_tiny
from tests.harness.ranks import run_distributed

TENSORS, ROWS, COLUMNS, RANKS = 8, 2048, 2048, 4


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
def test_threads_are_those_of_the_processors_that_a_rank_has_to_itself(
    tmp_path: Path, bound: bool, ranks: int, expected: int
) -> None:
    save_tiny(tmp_path)
    assert run_distributed(_threads_of_a_load, ranks, tmp_path, bound) == [expected] * ranks


def _fetched() -> int:
    """Bytes that this process has had read from storage so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _fetch_share(checkpoint: Any) -> tuple[int, int]:
    """(bytes fetched, bytes asked for) to read one rank's rows of each tensor, nothing in the page cache."""
    fd = os.open(next(iter(checkpoint.values())).file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    reads, box = [], Box((ROWS // RANKS, 0), (ROWS // RANKS, COLUMNS))
    for key, stored in checkpoint.items():
        reads += stored.reads(stored.piece(key), box, torch.empty(box.shape))
    before = _fetched()
    asked = read.do_reads(reads)
    return _fetched() - before, asked


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc/self/io")
def test_what_lies_beside_a_part_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"w{i:02}": torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16) for i in range(TENSORS)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with_advice, asked = _fetch_share(checkpoint)
    assert asked == TENSORS * ROWS * COLUMNS * 2 // RANKS
    monkeypatch.setattr(read, "advise", lambda *_: None)
    plainly, _ = _fetch_share(checkpoint)
    if plainly < 1.2 * asked:
        pytest.skip(f"this file system fetches {plainly} bytes for {asked} without being told")
    assert asked <= with_advice <= 1.15 * asked, f"{plainly} without advice"
