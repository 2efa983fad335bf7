"""A reader beside a job that saves and prunes: it takes the next step and never a torn one."""

import itertools
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from fsdp_sft.dcp_io import checkpoint
from tests.harness.ranks import run_distributed


def _model(value: float) -> torch.nn.Module:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def _value(model: torch.nn.Module) -> float:
    return float(torch.cat([p.detach().flatten() for p in model.parameters()]).unique().item())


def _prune_aside(root: Path, step: int) -> None:
    """As another job does between two looks: a newer step, and all older ones gone."""
    fs.save_checkpoint(root, step, model=_model(step), train_state={"step": step}, keep_last=1)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (checkpoint, "open_folder"),
        (checkpoint, "check_model"),
        (checkpoint, "read_rank_content"),
        (checkpoint, "read_tensors"),
    ],
    ids=["before it is opened", "before the check", "before its state", "before the tensors"],
)
@pytest.mark.parametrize("fallback", [True, False])
def test_a_step_that_goes_is_no_damage(
    module: Any, name: str, fallback: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs.save_checkpoint(tmp_path, 1, model=_model(1), train_state={"step": 1})
    real, left = getattr(module, name), [1, 2, 3]

    def pruned_first(*args: Any, **kwargs: Any) -> Any:
        if left:
            _prune_aside(tmp_path, left.pop(0) + 1)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, pruned_first)
    model = _model(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = fs.load_checkpoint(tmp_path, model=model, fallback=fallback)
    assert loaded.train_state == {"step": loaded.step}
    assert _value(model) == loaded.step == 4


def test_a_path_to_one_step_takes_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs.save_checkpoint(tmp_path, 1, model=_model(1))
    real, steps = checkpoint.open_folder, itertools.count(2)

    def pruned_first(*args: Any, **kwargs: Any) -> Any:
        _prune_aside(tmp_path, next(steps))
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "open_folder", pruned_first)
    with pytest.raises(fs.CheckpointCorruptError, match="step-1"):
        fs.load_checkpoint(tmp_path / "step-1", model=_model(0))


def _read_often(root: str) -> list[int]:
    steps = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Both ranks load the same steps, so both see the same number of them and stop together.
        while len(steps) < 10 or (len(set(steps)) < 3 and len(steps) < 500):
            model = _model(0)
            steps.append(fs.load_checkpoint(root, model=model).step)
            assert _value(model) == steps[-1]
    return steps


def test_two_ranks_read_while_another_job_saves_and_prunes(tmp_path: Path) -> None:
    fs.save_checkpoint(tmp_path, 0, model=_model(0))
    ended = threading.Event()

    def save() -> None:
        steps = itertools.count(1)
        while not ended.wait(0.01):
            _prune_aside(tmp_path, next(steps))

    writer = threading.Thread(target=save)
    writer.start()
    try:
        first, second = run_distributed(_read_often, 2, str(tmp_path))
    finally:
        ended.set()
        writer.join()
    assert first == second == sorted(first)
    assert len(set(first)) > 1
