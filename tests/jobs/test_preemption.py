"""Signals to one rank stop all ranks at the same step."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch

import fsdp_sft as fs
from tests.harness.ranks import mesh_here, run_distributed


def _loop(root: str, number: int, victim: int) -> tuple[int, int, list[int]]:
    """Train until stopped; (step, signal, steps on the disk)."""
    model = fs.shard_model(torch.nn.Linear(4, 4), mesh=mesh_here(), blocks={})
    rank = torch.distributed.get_rank()
    with fs.PreemptionGuard() as guard:
        if rank == victim:  # in the middle of some step, different from what the others do
            threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        for step in range(1, 1000):
            model(torch.ones(2, 4)).sum().backward()
            time.sleep(0.01 * (rank + 1))
            if guard.should_stop():
                assert guard.should_stop()
                fs.save_checkpoint(root, step, model=model)
                break
    torch.distributed.barrier()
    return step, int(guard.signal), [info.step for info in fs.find_checkpoints(root) if info.sound]


@pytest.mark.parametrize(("number", "victim"), [(signal.SIGTERM, 1), (signal.SIGUSR1, 0)])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path, number: int, victim: int) -> None:
    results = run_distributed(_loop, 3, str(tmp_path), int(number), victim)
    step = results[0][0]
    assert 1 <= step < 999
    assert results == [(step, int(number), [step])] * 3


def test_handlers_come_back_and_nested_guards_tell_each_other() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with fs.PreemptionGuard() as outer:
            assert not outer.should_stop()
            with fs.PreemptionGuard(signals=[signal.SIGUSR1]) as inner:
                os.kill(os.getpid(), signal.SIGUSR1)
                assert inner.should_stop()
            assert inner.signal == outer.signal == signal.SIGUSR1, "without asking the other ranks again"
            assert (outer.should_stop(), heard) == (True, [])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_guard_says_that_it_needs_its_block() -> None:
    with pytest.raises(RuntimeError, match="within its block"):
        fs.PreemptionGuard().should_stop()


WITH_WORKERS = """
    import os, signal, sys, threading, time
    import torch
    from torch.utils.data import DataLoader
    import fsdp_sft as fs

    def collate(rows):
        return {"input_ids": torch.tensor([rows]), "labels": torch.tensor([rows])}

    def kept(worker_id):
        open(f"{sys.argv[1]}/worker-{worker_id}", "w").close()

    if __name__ == "__main__":
        options = dict(num_workers=2, collate_fn=collate, worker_init_fn=kept, persistent_workers=True)
        loader = DataLoader(range(10_000), 2, multiprocessing_context=sys.argv[3], **options)
        meter = fs.ThroughputMeter(world_size=1) if sys.argv[2] == "watched" else None
        with fs.PreemptionGuard() as guard:
            for step, window in enumerate(fs.windows(loader, 1, meter=meter), 1):
                if step == 3:  # as a scheduler does: every process of the job, in mid-step
                    print("now", flush=True)
                for _ in range(20):
                    time.sleep(0.01)
                if guard.should_stop():
                    print(f"stopped by {guard.signal.name}", flush=True)
                    saved = f"{sys.argv[1]}/saved"
                    fs.save_checkpoint(saved, step, model=torch.nn.Linear(2, 2), async_=True).wait()
                    raise SystemExit(fs.REQUEUE_EXIT_CODE)
"""


@pytest.mark.parametrize(
    ("method", "loader"),
    [("fork", "plain"), ("spawn", "plain"), ("forkserver", "plain"), ("fork", "watched")],
)
def test_a_loaders_workers_outlive_the_signal(tmp_path: Path, method: str, loader: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(WITH_WORKERS))
    command = [sys.executable, str(script), str(tmp_path), loader, method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "now\n"
        os.killpg(process.pid, signal.SIGTERM)
        assert (process.wait(60), process.stdout.readline()) == (85, "stopped by SIGTERM\n")
    assert (tmp_path / "worker-1").exists(), "the loader's own worker_init_fn is called too"
    assert [info.sound for info in fs.find_checkpoints(tmp_path / "saved")] == [True]


def test_a_loader_is_left_alone_without_a_guard_or_workers() -> None:
    loader, busy = (torch.utils.data.DataLoader([1, 2], num_workers=number) for number in (0, 1))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert list(fs.keep_workers_alive(loader)) == [torch.tensor([1]), torch.tensor([2])]
    with fs.PreemptionGuard():
        assert list(fs.keep_workers_alive([3])) == [3]
        for each in (loader, busy):
            assert list(fs.keep_workers_alive(each)) == [torch.tensor([1]), torch.tensor([2])]
        assert busy.worker_init_fn is None
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
