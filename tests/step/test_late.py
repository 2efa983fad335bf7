"""Steps whose numbers the host reads one step late: the same steps, and none that should not be taken."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.models import full, ragged_batches, tiny_model
from tests.harness.ranks import run_distributed

STEPS = 4


def _windows(ranks: int) -> list[list[Any]]:
    """Of this rank; one of them has no target on any rank."""
    rank = dist.get_rank() if ranks > 1 else 0
    windows = [ragged_batches(2 * ranks, seed=seed)[rank::ranks] for seed in range(STEPS)]
    empty = [{**batch, "labels": torch.full_like(batch["labels"], -100)} for batch in windows[0]]
    return [*windows[:2], empty, *windows[2:]]


def _train(sync: Any, ranks: int, kind: Any) -> tuple[list[Any], list[torch.Tensor]]:
    model = tiny_model("llama")
    if ranks > 1:
        model = fs.shard_model(model, mesh=mesh_here())
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.01, fused=True, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    results = [
        fs.train_step(model, window, optimizer, scheduler=scheduler, sync=sync) for window in _windows(ranks)
    ]
    if sync == "late":
        results.append(fs.late_result(model))
        assert fs.late_result(model) is None
    return results, [full(p).detach() for p in model.parameters()]


def _check_shifted(ranks: int) -> None:
    # torch shards no fused SGD
    for kind in (torch.optim.AdamW, torch.optim.SGD) if ranks == 1 else (torch.optim.AdamW,):
        expected, parameters = _train("step", ranks, kind)
        found, own = _train("late", ranks, kind)
        first, *shifted = found
        assert first.skip_reason == "no step before"
        assert first.skipped
        assert math.isnan(first.loss)
        assert repr(shifted) == repr(expected)  # nan is not equal to itself
        assert all(torch.equal(a, b) for a, b in zip(own, parameters, strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_late_results_are_those_of_the_step_before_bit_for_bit(ranks: int) -> None:
    if ranks == 1:
        _check_shifted(1)
    else:
        run_distributed(_check_shifted, ranks, ranks)


def _check_not_finite(root: str) -> None:
    mesh = mesh_here()
    ways = {
        "train_step": lambda model, optimizer: fs.train_step(model, window, optimizer, sync="late"),
        "a step that waits": lambda model, optimizer: fs.train_step(model, window, optimizer),
        "evaluate": lambda model, optimizer: fs.evaluate(model, window),
        "save_checkpoint": lambda model, optimizer: fs.save_checkpoint(root, 2, model=model),
        "save_full_state_dict": lambda model, optimizer: fs.save_full_state_dict(model, root + ".pt"),
        "save_optimizer_state": lambda model, o: fs.save_optimizer_state(model, o, root + "-o.pt"),
        "export_hf": lambda model, optimizer: fs.export_hf(model, root + "-hf"),
        "late_result": lambda model, optimizer: fs.late_result(model),
    }
    window = ragged_batches(4)[dist.get_rank() :: 2]
    for at_first in (True, False):
        for name, way in ways.items():
            model = fs.shard_model(tiny_model("llama"), mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
            if not at_first:
                fs.train_step(model, window, optimizer, sync="late")
            before = _state(model, optimizer)
            handle = None
            if dist.get_rank() == 1:
                norm = model.model.norm.weight
                handle = norm.register_post_accumulate_grad_hook(_make_nan)
            fs.train_step(model, window, optimizer, sync="late")
            if handle is not None:
                handle.remove()
            with pytest.raises(fs.NonFiniteGradientError, match=r"norm is nan.* in the step before this one"):
                way(model, optimizer)
            after = _state(model, optimizer)
            assert before.keys() == after.keys(), name
            assert all(torch.equal(before[key], after[key]) for key in before), name
            assert all(p.grad is None for p in model.parameters())
            assert fs.late_result(model) is None, "it is said once"
            assert not fs.train_step(model, window, optimizer).skipped, "nothing was lost"


def _make_nan(parameter: Any) -> None:
    gradient = parameter.grad
    (gradient.to_local() if hasattr(gradient, "to_local") else gradient).fill_(math.nan)


def test_what_an_optimizer_makes_for_a_first_step_that_is_left_out_is_taken_back() -> None:
    model, window = tiny_model("llama"), ragged_batches(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    handle = model.model.norm.weight.register_post_accumulate_grad_hook(_make_nan)
    fs.train_step(model, window, optimizer, sync="late")
    handle.remove()
    with pytest.raises(fs.NonFiniteGradientError):
        fs.train_step(model, window, optimizer, sync="late")
    assert not optimizer.state  # memory that nothing was written to: momentum without a first step
    fs.train_step(model, window, optimizer)
    assert all(p.isfinite().all() for p in model.parameters())


def _state(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    names = {p: name for name, p in model.named_parameters()}
    found = {name: full(p).detach().clone() for p, name in names.items()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{names[parameter]} {key}"] = full(value).clone()
    return found


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_said_wherever_the_model_goes_next(
    tmp_path: Path,
) -> None:
    run_distributed(_check_not_finite, 2, str(tmp_path / "steps"), timeout=400)


def test_loading_a_checkpoint_forgets_the_step(tmp_path: Path) -> None:
    model, window = tiny_model("llama"), ragged_batches(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    fs.save_checkpoint(tmp_path, 0, model=model, optimizer=optimizer)
    fs.train_step(model, window, optimizer, sync="late")
    fs.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    assert fs.late_result(model) is None
    assert fs.train_step(model, window, optimizer, sync="late").skip_reason == "no step before"


def test_what_cannot_leave_a_step_out_on_the_device_is_refused() -> None:
    model, window = tiny_model("llama"), ragged_batches(2)
    fused = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    groups = [{"params": list(model.parameters()), "fused": False}]
    for optimizer in (torch.optim.AdamW(model.parameters()), torch.optim.AdamW(groups, fused=True)):
        with pytest.raises(fs.OptimizerError, match="AdamW here does not: give it fused=True"):
            fs.train_step(model, window, optimizer, sync="late")
    with pytest.raises(ValueError, match="GradScaler"):
        fs.train_step(model, window, fused, sync="late", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="sync must be 'step' or 'late', got 'never'"):
        fs.train_step(model, window, fused, sync="never")
