"""Asynchronous saves: the state of the moment, from any device, one at a time, no error lost; the best."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft.dcp_io import folder
from tests.harness.models import full, tiny_model
from tests.harness.ranks import on_ranks, run_distributed
from tests.harness.trained import assert_same, everything, make_adamw, make_model, this_rank, train
from tests.simulated.ranks import run_simulated

write_tensors = folder.write_tensors


def slow_write(*args: Any) -> Any:
    time.sleep(0.9)
    return write_tensors(*args)


def full_disk(*args: Any) -> Any:
    raise OSError(28, "No space left on device")


def _snapshot_is_of_the_moment(root: str, model: Any, optimizer: Any) -> None:
    expected = everything(model, optimizer)
    mine = torch.arange(3) + this_rank()
    go_on = threading.Event()

    def write_later(*args: Any) -> Any:
        assert go_on.wait(60)
        return write_tensors(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "write_tensors", write_later)
        saved = fs.save_checkpoint(
            root, 1, model=model, optimizer=optimizer, rank_state={"mine": mine}, async_=True
        )
        assert not saved.path.exists()
        mine.zero_()
        train(model, optimizer, 1, 2)  # goes on while the thread writes what was
        assert not saved.path.exists()
        other = make_model(5, {})
        other_optimizer = make_adamw(other)
        threading.Timer(0.3, go_on.set).start()
        loaded = fs.load_checkpoint(root, model=other, optimizer=other_optimizer)  # waits for it
    assert loaded.step == 1
    assert torch.equal(loaded.rank_state["mine"], torch.arange(3) + this_rank())
    assert_same(everything(other, other_optimizer), expected)
    saved.wait()
    assert fs.verify_checkpoint(saved.path) == []


def _one_at_a_time(root: str, model: Any, optimizer: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "write_tensors", slow_write)
        first = fs.save_checkpoint(root, 2, model=model, optimizer=optimizer, async_=True)
        second = fs.save_checkpoint(root, 3, model=model, optimizer=optimizer, async_=True)
        assert first.path.exists()
        # It waited for the first one's slow files; the first for no more than its copies.
        assert second.blocked_seconds > max(0.5, first.blocked_seconds)
        assert not second.path.exists()
        third = fs.save_checkpoint(root, 4, model=model, optimizer=optimizer)
        assert [saved.path.exists() for saved in (second, third)] == [True, True]


def _errors_are_raised_once_on_all_ranks(root: str, model: Any, optimizer: Any) -> None:
    for step, ask in enumerate(("wait", "save", "async save", "one rank waits"), start=10):
        with pytest.MonkeyPatch.context() as patch:
            if this_rank() == 1:
                patch.setattr(folder, "write_tensors", full_disk)
            saved = fs.save_checkpoint(root, step, model=model, optimizer=optimizer, async_=True)
            saved._background.join()
        waits = ask == "wait" or (ask == "one rank waits" and this_rank() == 0)
        with pytest.raises(OSError, match="No space left") as error:
            if waits:
                saved.wait()
            else:
                fs.save_checkpoint(root, 20 + step, model=model, async_=ask == "async save")
        assert "rank 1 failed first" in "".join(error.value.__notes__)
        if ask == "one rank waits" and waits:  # the other rank has not seen it yet
            with pytest.raises(OSError, match="No space left"):
                fs.save_checkpoint(root, 20 + step, model=model)
        saved.wait()  # nothing is left to say
        assert not saved.path.exists()
    fs.save_checkpoint(root, 30, model=model, optimizer=optimizer, async_=True).wait()


def _best(root: str, model: Any) -> None:
    for step, metric in enumerate([2.0, 1.0, float("nan"), 1.5, 1.0, None, float("inf"), 3, 2.5]):
        fs.save_checkpoint(
            root, step, model=model, metric=metric, keep_last=2, keep_best=2, async_=step % 2 == 1
        )
    torch.distributed.barrier()
    assert [(i.step, i.metric) for i in fs.find_checkpoints(root)] == [(1, 1.0), (4, 1.0), (7, 3.0), (8, 2.5)]
    torch.distributed.barrier()
    fs.save_checkpoint(root, 9, model=model, metric=0.5, keep_last=1, keep_best=2)
    torch.distributed.barrier()
    assert [i.step for i in fs.find_checkpoints(root)] == [4, 9]  # of two equal ones the newer


@pytest.mark.accelerator
@on_ranks(2)
def test_async_saves_on_two_ranks(tmp_path: Path) -> None:
    model = make_model(1, {})
    optimizer = make_adamw(model)
    train(model, optimizer, 0, 1)
    _snapshot_is_of_the_moment(tmp_path, model, optimizer)
    _one_at_a_time(tmp_path, model, optimizer)
    _errors_are_raised_once_on_all_ranks(tmp_path, model, optimizer)
    assert [info.step for info in fs.find_checkpoints(tmp_path)] == [1, 2, 3, 4, 30]
    _best(f"{tmp_path}/best", model)


PROGRAM = """
    import sys, time, torch
    import fsdp_sft as fs
    from fsdp_sft.dcp_io import folder
    write_tensors = folder.write_tensors
    def write(*args):
        time.sleep(0.2)
        if sys.argv[2] == "fail":
            raise OSError(28, "No space left on device")
        return write_tensors(*args)
    folder.write_tensors = write
    model = torch.nn.Linear(3, 3)
    fs.save_checkpoint(sys.argv[1], 1, model=model, async_=True)
    print("the program ends")
"""


@pytest.mark.parametrize(("outcome", "code"), [("succeed", 0), ("fail", 1)])
def test_a_program_that_ends_waits_for_its_save(tmp_path: Path, outcome: str, code: int) -> None:
    # Not a fork of the tests: how Python itself ends is what matters.
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), outcome]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == code, ended.stderr
    assert "the program ends" in ended.stdout
    assert ("asynchronous save failed" in ended.stderr) == ("No space left" in ended.stderr) == bool(code)
    assert [info.step for info in fs.find_checkpoints(tmp_path) if info.sound] == ([] if code else [1])
    assert [name for name in os.listdir(tmp_path) if name.startswith(".tmp")] == []


def _destroy_meanwhile(root: str, slow: int) -> None:
    model = make_model(0, {})
    fs.save_checkpoint(root, 1, model=model)
    with pytest.MonkeyPatch.context() as patch:
        if slow in (this_rank(), -1):
            patch.setattr(folder, "write_tensors", slow_write)
        saved = fs.save_checkpoint(root, 2, model=model, async_=True, keep_last=1)
        torch.distributed.destroy_process_group()  # as programs do at their end
        saved.wait()
    assert saved.path.exists()


@pytest.mark.parametrize("slow", [0, 1, -1])
def test_a_save_outlives_the_process_group(slow: int, tmp_path: Path) -> None:
    """Otherwise its ranks would each be a job of one, name an unsound step, and delete the one before."""
    run_distributed(_destroy_meanwhile, 2, str(tmp_path), slow)
    assert fs.verify_checkpoint(tmp_path / "step-2") == []
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step-2"]


# --- saving from devices that are not the first, while copies are slow and training goes on ----------------

SLOW = 0.005  # seconds that a copy to or from the device takes


def _values(model: Any) -> dict[str, torch.Tensor]:
    return {name: full(p).detach().cpu().clone() for name, p in model.named_parameters()}


def _train_on_while_saving(root: Path, async_: bool) -> dict[str, Any]:
    context = fs.init_distributed()
    torch.manual_seed(0)
    model = fs.shard_model(tiny_model("llama").to(context.device), mesh=fs.build_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.arange(24, device=context.device).view(2, 12)
    fs.train_step(model, [{"input_ids": ids, "labels": ids}], optimizer)
    torch.rand(3, device=context.device)
    wrong: list[str] = []
    for step in (1, 2):  # the second in memory that the first has used
        expected, drawn = _values(model), torch.sim.get_rng_state(context.device.index)
        allocated = torch.sim.memory_allocated()
        torch.sim.reset_peak_memory_stats()
        saved = fs.save_checkpoint(root, step, model=model, optimizer=optimizer, async_=async_)
        on_device = torch.sim.max_memory_allocated() - allocated
        for parameter in model.parameters():
            parameter.data.add_(1.0)  # what the next step would do
        torch.rand(3, device=context.device)
        saved.wait()
        fs.load_checkpoint(saved.path, model=model, optimizer=optimizer)
        after = _values(model)
        wrong += [name for name in expected if not torch.equal(expected[name], after[name])]
        if not torch.equal(torch.sim.get_rng_state(context.device.index), drawn):
            wrong.append("generator")
        for parameter in model.parameters():
            parameter.data.mul_(2.0)
    return {"wrong": wrong, "on the device": on_device, "touched": torch.sim.touched()}


def test_a_save_beside_training_takes_nothing_of_the_device(tmp_path: Path) -> None:
    for async_ in (False, True):
        found = run_simulated(_train_on_while_saving, 2, tmp_path / str(async_), async_, copy_delay=SLOW)
        assert found == [{"wrong": [], "on the device": 0, "touched": [rank]} for rank in range(2)]
