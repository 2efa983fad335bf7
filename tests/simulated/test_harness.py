"""Ranks of the harness on simulated devices."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from tests.harness import device
from tests.harness.places import ROOT
from tests.harness.ranks import RankFailedError, run_distributed
from tests.simulated import build, cannot


@pytest.fixture
def simulated(kind_of_device: None) -> Iterator[None]:
    with device.asking("sim"):
        yield


def _who_am_i() -> tuple[int, str, str, float]:
    total = torch.full((1,), float(dist.get_rank()), device=device.device_here())
    dist.all_reduce(total)
    return os.getpid(), device.device_type(), str(fs.init_distributed().device), float(total)


def test_ranks_have_a_device_each_and_serve_again(simulated: None) -> None:
    first = run_distributed(_who_am_i, 2)
    assert [entry[1:] for entry in first] == [("sim", "sim:0", 1.0), ("sim", "sim:1", 1.0)]
    assert run_distributed(_who_am_i, 2) == first, "other processes"
    with device.asking("cpu"):
        ordinary = run_distributed(_who_am_i, 2)
    assert [entry[1:3] for entry in ordinary] == [("cpu", "cpu")] * 2


def _use(index: int) -> None:
    torch.ones(1, device=f"sim:{index}")


def test_a_rank_that_uses_the_device_of_another_fails(simulated: None) -> None:
    run_distributed(_use, 1, 0)
    with pytest.raises(RankFailedError, match=r"the rank of device 0 has used device \[1\] too"):
        run_distributed(_use, 1, 1)


def _read_by_the_host() -> int:
    here = torch.zeros(1, device=device.device_here())
    torch.accelerator.synchronize()
    return ctypes.c_int.from_address(here.data_ptr()).value


def test_a_rank_whose_host_reads_device_memory_fails(simulated: None) -> None:
    with pytest.raises(RankFailedError, match=r"Segmentation fault[^$]*_read_by_the_host"):
        run_distributed(_read_by_the_host, 1)


def test_without_a_compiler_the_test_is_skipped_with_the_reason(
    simulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing is compiled yet
    monkeypatch.setenv("PATH", "")
    build.folder.cache_clear()
    with pytest.raises(pytest.skip.Exception, match="neither g\\+\\+ nor c\\+\\+ is on the PATH"):
        run_distributed(_who_am_i, 2)


def test_every_exception_names_a_test() -> None:
    for start, reason in cannot.REASONS.items():
        path, _, name = start.partition("::")
        assert not name or f"def {name.partition('[')[0]}" in (ROOT / path).read_text(), start
        assert reason, start
