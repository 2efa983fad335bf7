"""A rank that reads its part of a file does not have the rest of it fetched."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fsdp_sft._tensors import reader as read
from fsdp_sft._tensors.boxes import Box
from fsdp_sft.weights.resolve import open_checkpoint

TENSORS, ROWS, COLUMNS, RANKS = 8, 2048, 2048, 4


def fetched() -> int:
    """Bytes that this process has had read from storage so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _fetch_share(checkpoint: Any) -> tuple[int, int]:
    """(bytes fetched, bytes asked for) to read one rank's rows of each tensor, nothing in the page cache."""
    fd = os.open(next(iter(checkpoint.values())).file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    reads = []
    box = Box((ROWS // RANKS, 0), (ROWS // RANKS, COLUMNS))
    for key, stored in checkpoint.items():
        dest = torch.empty(box.shape)
        reads += stored.reads(stored.piece(key), box, dest)
    before = fetched()
    asked = read.do_reads(reads)
    return fetched() - before, asked


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc/self/io")
def test_what_lies_beside_a_part_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"w{i:02}": torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16) for i in range(TENSORS)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with_advice, asked = _fetch_share(checkpoint)
    assert asked == TENSORS * ROWS * COLUMNS * 2 // RANKS
    with monkeypatch.context() as without:
        without.setattr(read, "advise", lambda *_: None)
        plainly, _ = _fetch_share(checkpoint)
    if plainly < 1.2 * asked:
        pytest.skip(f"this file system fetches {plainly} bytes for {asked} without being told")
    assert asked <= with_advice <= 1.15 * asked, f"{plainly} without advice"
