"""Loads onto devices that are not the first, by so many threads, without what lies beside a rank's part."""

import itertools
import mmap
import os
import resource
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import CPUOffloadPolicy

import fsdp_sft as fs
from fsdp_sft._tensors import reader as read, stored
from fsdp_sft._tensors.boxes import Box
from fsdp_sft.weights import fill
from fsdp_sft.weights.resolve import open_checkpoint
from tests.harness.composed import composed
from tests.harness.hf_folders import plain, save_tiny
from tests.harness.models import full
from tests.harness.ranks import run_distributed
from tests.simulated.ranks import run_simulated

PIECE = 1 << 13  # bytes that are read at a time where memory is counted
SLOW = 0.005  # seconds that a copy to the device takes: far longer than reading the next piece


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), hidden_size=64, vocab_size=1003, num_hidden_layers=6)


def _several_threads_and_small_pieces() -> None:
    """As on a node with many cores and a checkpoint of gigabytes: buffers are used again and again."""
    stored._LARGE_BYTES = 1 << 13
    os.sched_getaffinity = lambda _: set(range(64))


def _wrong_values(model: Any, folder: Path) -> list[str]:
    expected, device = dict(plain(folder).named_parameters()), torch.accelerator.current_accelerator()
    return [
        name
        for name, p in model.named_parameters()
        if not torch.equal(full(p.detach().to(device)).cpu(), expected[name])
    ]


def _load_unsharded(folder: Path, *, on_own_stream: bool) -> tuple[list[str], list[int]]:
    _several_threads_and_small_pieces()
    device = torch.device("sim", torch.accelerator.current_device_index())
    model = fs.build_meta_model(folder)
    stream = torch.sim.Stream(device) if on_own_stream else torch.accelerator.current_stream(device)
    with torch.sim.stream(stream):
        # Holds the stream up: whoever does not queue behind this writes before the memory is the model's.
        for _ in range(200):
            torch.empty(1).pin_memory().to(device, non_blocking=True)
        model.to_empty(device=device)
        fs.load_weights(model, folder)
    stream.synchronize()
    return _wrong_values(model, folder), torch.sim.touched()


@pytest.mark.parametrize("on_own_stream", [False, True], ids=["default stream", "stream of its own"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_load_is_right_on_any_device_and_stream(checkpoint: Path, index: int, on_own_stream: bool) -> None:
    assert run_simulated(
        _load_unsharded, 1, checkpoint, first_device=index, copy_delay=SLOW, on_own_stream=on_own_stream
    ) == [([], [index])]


def _load_sharded(folder: Path, offload: bool) -> tuple[list[str], list[int], set[str]]:
    """(wrong parameters, devices that were used, where shards are); a step is taken with it."""
    _several_threads_and_small_pieces()
    context = fs.init_distributed()
    assert context.device.index == context.rank
    model = composed(folder, mesh=fs.build_mesh(), offload_policy=CPUOffloadPolicy() if offload else None)
    where = {device for p in model.parameters() for device in (p.device.type, p.to_local().device.type)}
    wrong, touched = _wrong_values(model, folder), torch.sim.touched()
    ids = torch.arange(3, 19).view(2, 8)
    fs.train_step(
        model, [{"input_ids": ids, "labels": ids.clone()}], torch.optim.SGD(model.parameters(), lr=0.1)
    )
    return wrong, touched, where


def test_each_rank_loads_onto_its_own_device(checkpoint: Path) -> None:
    assert run_simulated(_load_sharded, 2, checkpoint, False, copy_delay=SLOW) == [
        ([], [0], {"sim"}),
        ([], [1], {"sim"}),
    ]


def test_shards_that_stay_on_the_host_are_loaded_there(checkpoint: Path) -> None:
    assert [(wrong, where) for wrong, _, where in run_simulated(_load_sharded, 2, checkpoint, True)] == [
        ([], {"cpu"})
    ] * 2


def _memory_while_loading(folder: Path, **options: Any) -> tuple[int, int, int]:
    """(peak beside the shards, the shards, the largest one), in bytes of the device."""
    stored._LARGE_BYTES, fill._PIECE_ELEMENTS = PIECE, PIECE // 8
    fs.init_distributed()
    mesh = fs.build_mesh()
    before = torch.sim.memory_allocated()
    torch.sim.reset_peak_memory_stats()
    model = fs.load_pretrained(folder, mesh=mesh, **options)
    after, largest = torch.sim.memory_allocated(), max(p.to_local().nbytes for p in model.parameters())
    return torch.sim.max_memory_allocated() - after, after - before, largest


@pytest.mark.parametrize(
    "saved", [{"hidden_size": 64, "vocab_size": 4096, "num_hidden_layers": 2}], indirect=True
)
@pytest.mark.parametrize("new_vocab_size", [None, 5000])
def test_a_load_takes_little_beside_the_shards(saved: Path, new_vocab_size: int | None) -> None:
    for beside, shards, largest in run_simulated(
        _memory_while_loading, 2, saved, new_vocab_size=new_vocab_size
    ):
        assert largest > 16 * PIECE
        assert shards > 2 * largest
        assert beside <= 2 * PIECE + (shards // largest + 40) * 512  # the allocator rounds up to 512


# --- how files are read: by how many threads, and without what lies beside a rank's part -------------------

TENSORS, ROWS, COLUMNS, RANKS = 8, 2048, 2048, 4


def _threads_of_a_load(folder: Path, bound: bool) -> int:
    cpus = {4 * dist.get_rank() + number for number in range(4)} if bound else set(range(8))
    os.sched_getaffinity, os.cpu_count = lambda _: cpus, lambda: 8
    with mock.patch.object(fill, "do_reads", wraps=fill.do_reads) as reads:
        fs.load_weights(fs.build_meta_model(folder), folder)
    return max(call.kwargs.get("workers", 1) for call in reads.call_args_list)


@pytest.mark.parametrize(("bound", "ranks", "expected"), [(True, 2, 4), (False, 2, 4), (False, 4, 2)])
def test_threads_are_those_of_the_processors_that_a_rank_has_to_itself(
    saved: Path, bound: bool, ranks: int, expected: int
) -> None:
    assert run_distributed(_threads_of_a_load, ranks, saved, bound) == [expected] * ranks


@pytest.mark.skipif(sys.platform != "linux", reason="other systems map memory as it is written")
def test_fresh_memory_is_mapped_before_it_is_written() -> None:
    fresh = torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.uint8)  # malloc may have some left
    fresh[:100] = 7
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    read.map_pages(fresh[1:])
    mapped = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fresh[100:] = 7
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - mapped < (mapped - faults) / 10
    assert bool((fresh == 7).all())


def _fetched() -> int:
    """Bytes that this process has had read from storage so far."""
    return next(
        int(line.split()[1])
        for line in Path("/proc/self/io").read_text().splitlines()
        if line.startswith("read_bytes")
    )


def _fetch_share(checkpoint: Any) -> tuple[int, int]:
    """(bytes fetched, bytes asked for) to read one rank's rows of each tensor, nothing in the page cache."""
    fd = os.open(next(iter(checkpoint.values())).file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    box = Box((ROWS // RANKS, 0), (ROWS // RANKS, COLUMNS))
    before = _fetched()
    asked = read.do_reads(
        itertools.chain(
            *(one.reads(one.piece(key), box, torch.empty(box.shape)) for key, one in checkpoint.items())
        )
    )
    return _fetched() - before, asked


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc/self/io")
def test_what_lies_beside_a_part_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(
        {f"w{i:02}": torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16) for i in range(TENSORS)},
        tmp_path / "model.safetensors",
    )
    checkpoint = open_checkpoint(tmp_path)
    with_advice, asked = _fetch_share(checkpoint)
    assert asked == TENSORS * ROWS * COLUMNS * 2 // RANKS
    given: list[tuple[int, int, int, str]] = []
    monkeypatch.setattr(read, "advise", lambda *advice: given.append(advice))
    plainly, _ = _fetch_share(checkpoint)
    assert len({at for _, at, _, advice in given if advice == "POSIX_FADV_WILLNEED"}) == TENSORS - 1
    if plainly < 1.2 * asked:
        pytest.skip(f"this file system fetches {plainly} bytes for {asked} without being told")
    assert asked <= with_advice <= 1.15 * asked, f"{plainly} without advice"


def test_short_rows_that_lie_far_apart_are_read_alone_onto_any_device() -> None:
    far = stored.InFile(Path(), stored.TensorEntry(torch.uint8, (8, 1 << 19), 0, 1 << 22))
    assert [
        one.num_bytes
        for one in far.reads(far.piece("far"), Box((0, 0), (8, 99)), torch.empty((8, 99), device="meta"))
    ] == [99] * 8
