"""Kills, flipped bits, a rank that stands still, hostile and changed files: nothing is lost or silent.

``FAULTS=20`` in the environment makes twenty times as many trials: `make test-faults`.
"""

import os
import random
import signal
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from fsdp_sft._tensors.boxes import local_of
from tests.faults import hostile, kills, mutated
from tests.harness.ranks import mesh_here, on_ranks, run_distributed
from tests.harness.trained import assert_same, everything

TIMES = int(os.environ.get("FAULTS", "1"))
STOPPED_SECONDS = 4
WAYS = [(everyone, async_) for everyone in (False, True) for async_ in (False, True)]


@pytest.mark.parametrize("point", list(kills.POINTS))
def test_a_kill_at_a_named_moment(point: str, tmp_path: Path) -> None:
    for everyone, async_ in WAYS if TIMES > 1 else [WAYS[list(kills.POINTS).index(point) % len(WAYS)]]:
        trial = kills.Trial(everyone, async_, keep_last=2, victim=kills.POINTS[point][0], point=point)
        verdict, loaded, inside = kills.run_trial(trial, tmp_path)
        assert verdict in kills.FINE, trial
        assert inside
        assert loaded == (3 if point in ("after rename", "mid-prune") else 2)


def test_a_kill_while_exporting(tmp_path: Path) -> None:
    assert kills.run_export_trial(tmp_path, everyone=True) == "exact"


def test_kills_at_random_moments(tmp_path: Path) -> None:
    for trial in kills.random_trials(8 * TIMES):
        assert kills.run_trial(trial, tmp_path)[0] in kills.FINE, trial


def _flip(path: Path, position: int, bit: int) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        data = bytearray(path.read_bytes())
        data[position] ^= bit
        path.write_bytes(data)
    dist.barrier()


@on_ranks(2, timeout=120 * TIMES)
def test_flipped_bits_never_load(tmp_path: Path) -> None:
    model, optimizer = kills.make(mesh_here(), width=16)  # small, so that JSON is a good part of all bytes
    state: dict[str, Any] = {"train_state": {"lr": [0.1] * 99}, "rank_state": {"rows": torch.arange(9)}}
    step = fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer, **state).path
    kills.fill(model, optimizer, 77)
    before, generator = everything(model, optimizer, local_of), torch.get_rng_state()
    sizes = {path: path.stat().st_size for path in sorted(step.rglob("*")) if path.is_file()}
    draw = random.Random(1)
    for _ in range(60 * TIMES):
        (path,) = draw.choices([*sizes], [*sizes.values()])
        place = (path, draw.randrange(sizes[path]), 1 << draw.randrange(8))
        _flip(*place)
        with pytest.raises(fs.CheckpointCorruptError):
            fs.load_checkpoint(step, model=model, optimizer=optimizer)
        _flip(*place)
        assert_same(everything(model, optimizer, local_of), before)
        assert torch.equal(torch.get_rng_state(), generator)


def _stopped(root: str, async_: bool) -> None:
    fs.init_distributed(timeout=timedelta(seconds=STOPPED_SECONDS))
    model, optimizer = kills.make(mesh_here(), width=16)
    fs.save_checkpoint(root, 1, model=model, optimizer=optimizer, async_=async_).wait()
    processes: list[Any] = [None, None]
    dist.all_gather_object(processes, os.getpid())
    started = time.perf_counter()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # rank 0 wakes it when it has given up
    with pytest.raises(fs.LostRankError):
        fs.save_checkpoint(root, 2, model=model, optimizer=optimizer, async_=async_).wait()
    assert time.perf_counter() - started < STOPPED_SECONDS + 6
    if dist.get_rank() == 0:
        os.kill(processes[1], signal.SIGCONT)
    dist.barrier()  # the default group is not broken


def _go_on(root: str) -> None:
    model, optimizer = kills.make(mesh_here(), width=16)
    assert fs.load_checkpoint(root, model=model, optimizer=optimizer).step in (1, 2)
    fs.save_checkpoint(root, 3, model=model, optimizer=optimizer)
    assert fs.verify_checkpoint(f"{root}/step-3") == []
    assert not list(Path(root).glob(".tmp*"))


@pytest.mark.parametrize("async_", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stopped_rank_ends_the_save_on_all_ranks(async_: bool, tmp_path: Path) -> None:
    run_distributed(_stopped, 2, str(tmp_path), async_)
    run_distributed(_go_on, 2, str(tmp_path))


def test_hostile_checkpoints_are_refused(tmp_path: Path) -> None:
    (results,) = run_distributed(hostile.run_attacks, 1, str(tmp_path), large=TIMES > 1, timeout=120 * TIMES)
    assert len(results) > 25
    assert Counter(verdict for _, verdict, _ in results) == {"refused": len(results)}, results
    assert max(grown for name, _, grown in results if " MB " not in name) < 200e6, results


def test_a_changed_file_is_refused_or_read_as_written(tmp_path: Path) -> None:
    (results,) = run_distributed(mutated.run_trials, 1, 25 * TIMES, str(tmp_path), timeout=120 * TIMES)
    wrong = [(name, outcome) for name, outcome in results if outcome not in mutated.FINE]
    assert wrong == []
    assert {name for name, _ in results} == set(mutated.READERS)
    refused = sum(outcome == "refused" for _, outcome in results)
    assert refused > len(results) / 2, "the changes do no harm"
