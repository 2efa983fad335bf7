"""Loading onto devices that are not the first, on streams that are not the default."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import fsdp_sft as fs
from tests.harness.composed import composed
from tests.harness.hf_folders import plain, save_tiny
from tests.harness.models import full
from tests.simulated.ranks import run_simulated

PIECE = 1 << 13  # bytes that are read at a time where memory is counted
SLOW = 0.005  # seconds that a copy to the device takes: far longer than reading the next piece


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"), hidden_size=64, vocab_size=1003, num_hidden_layers=6)


def _several_threads_and_small_pieces() -> None:
    """As on a node with many cores and a checkpoint of gigabytes: buffers are used again and again."""
    from fsdp_sft._tensors import stored

    stored._LARGE_BYTES = 1 << 13
    os.sched_getaffinity = lambda _: set(range(64))


def _wrong_values(model: Any, folder: Path) -> list[str]:
    expected, device = dict(plain(folder).named_parameters()), torch.accelerator.current_accelerator()
    named = [(name, full(p.detach().to(device)).cpu()) for name, p in model.named_parameters()]
    return [name for name, value in named if not torch.equal(value, expected[name])]


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
    results = run_simulated(
        _load_unsharded, 1, checkpoint, first_device=index, copy_delay=SLOW, on_own_stream=on_own_stream
    )
    assert results == [([], [index])]


def _load_sharded(folder: Path, offload: bool) -> tuple[list[str], list[int], set[str]]:
    """(wrong parameters, devices that were used, where shards are); a step is taken with it."""
    _several_threads_and_small_pieces()
    context = fs.init_distributed()
    assert context.device.index == context.rank
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    model = composed(folder, mesh=fs.build_mesh(), **options)
    where = {device for p in model.parameters() for device in (p.device.type, p.to_local().device.type)}
    wrong, touched = _wrong_values(model, folder), torch.sim.touched()
    ids = torch.arange(3, 19).view(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fs.train_step(model, [{"input_ids": ids, "labels": ids.clone()}], optimizer)
    return wrong, touched, where


def test_each_rank_loads_onto_its_own_device(checkpoint: Path) -> None:
    found = run_simulated(_load_sharded, 2, checkpoint, False, copy_delay=SLOW)
    assert found == [([], [0], {"sim"}), ([], [1], {"sim"})]


def test_shards_that_stay_on_the_host_are_loaded_there(checkpoint: Path) -> None:
    found = run_simulated(_load_sharded, 2, checkpoint, True)
    assert [(wrong, where) for wrong, _, where in found] == [([], {"cpu"})] * 2


def _memory_while_loading(folder: Path, **options: Any) -> tuple[int, int, int]:
    """(peak beside the shards, the shards, the largest one), in bytes of the device."""
    from fsdp_sft._tensors import stored
    from fsdp_sft.weights import finish

    stored._LARGE_BYTES = PIECE
    finish._PIECE_ELEMENTS = PIECE // 8
    fs.init_distributed()
    mesh = fs.build_mesh()
    before = torch.sim.memory_allocated()
    torch.sim.reset_peak_memory_stats()
    model = fs.load_pretrained(folder, mesh=mesh, **options)
    beside = torch.sim.max_memory_allocated() - torch.sim.memory_allocated()
    held = {id(p): p.to_local().nbytes for p in model.parameters()}
    return beside, torch.sim.memory_allocated() - before, max(held.values())


@pytest.mark.parametrize("new_vocab_size", [None, 5000])
def test_a_load_takes_little_beside_the_shards(tmp_path: Path, new_vocab_size: int | None) -> None:
    folder = save_tiny(tmp_path, hidden_size=64, vocab_size=4096, num_hidden_layers=2)
    for beside, shards, largest in run_simulated(
        _memory_while_loading, 2, folder, new_vocab_size=new_vocab_size
    ):
        assert largest > 16 * PIECE
        assert shards > 2 * largest
        assert beside <= 2 * PIECE + (shards // largest + 40) * 512  # the allocator rounds up to 512
