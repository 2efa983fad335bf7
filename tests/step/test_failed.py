"""A step that fails leaves nothing for the next one: no gradient, nothing gathered, no count."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from fsdp_sft._compat.fsdp import is_broken_off
from tests.harness.models import (
    FLOAT32,
    full,
    largest_error,
    oracle_gradients,
    oracle_loss,
    ragged_batches,
    tiny_model,
)
from tests.harness.ranks import device_here, mesh_here, on_ranks, run_distributed
from tests.plain import step as step_of


class _Planned(Exception):
    """What the tests raise."""


@contextmanager
def _failing(model: Any, kind: str, call: int) -> Iterator[None]:
    """The middle block raises in that forward, or that backward of its output, within the block."""
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise _Planned

    def hook(_: Any, __: Any, output: torch.Tensor) -> None:
        fail() if kind == "forward" else output.register_hook(fail)

    with model.model.layers[1].mlp.register_forward_hook(hook):
        yield


FAILURES = ("forward", "backward")
MODES = ("each", "last", "reduce_scatter")


def _gradients_after_a_failure(
    mesh: Any, grad_sync: Any, policy: MixedPrecisionPolicy | None = None
) -> list[tuple[str, float]]:
    """The error of the gradients of a step after each kind of failed one."""
    found = []
    for name in FAILURES:
        for call in (1, 2):
            model = tiny_model("llama").to(device_here())
            plain = copy.deepcopy(model).cpu()
            if mesh is not None:
                fs.shard_model(model, mesh=mesh, mp_policy=policy or FLOAT32)
            rank, ranks = (mesh.get_rank(), mesh.size()) if mesh is not None else (0, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            batches, lost = (ragged_batches(3 * ranks, seed=seed) for seed in (1, 9))
            fs.train_step(model, batches[rank::ranks], torch.optim.SGD(model.parameters(), lr=0.0))
            with _failing(model, name, call), pytest.raises(_Planned):
                fs.train_step(model, lost[rank::ranks], optimizer, grad_sync=grad_sync)
            assert all(parameter.grad is None for parameter in model.parameters())
            assert not is_broken_off(model), "for a loop of the caller's own that goes on"
            before = {key: full(p).clone() for key, p in model.named_parameters()}
            result = fs.train_step(
                model, batches[rank::ranks], optimizer, grad_sync=grad_sync, max_grad_norm=None
            )
            assert not result.skipped
            moved = {key: before[key] - full(p) for key, p in model.named_parameters()}
            loss, expected = oracle_gradients(plain, batches)
            assert result.loss == pytest.approx(loss, rel=1e-5)
            found.append((f"{name} {call}", largest_error(moved, expected)))
    return found


@pytest.mark.parametrize("grad_sync", MODES)
def test_the_step_after_one_that_failed_is_like_any_other(grad_sync: str) -> None:
    errors = _gradients_after_a_failure(None, grad_sync)
    assert max(error for _, error in errors) < 1e-5, errors


def _in_modes(replicas: int, modes: tuple[str, ...]) -> list[tuple[str, float]]:
    mesh = mesh_here(dp_replicate=replicas) if replicas > 1 else mesh_here()
    rows = [row for grad_sync in modes for row in _gradients_after_a_failure(mesh, grad_sync)]
    if "last" in modes:  # with another dtype to reduce in, FSDP2 keeps gradients that wait in another place
        wider = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float32)
        rows += _gradients_after_a_failure(mesh, "last", wider)
    return rows


@pytest.mark.parametrize(
    ("ranks", "replicas", "modes"), [(2, 1, ("each", "last")), (4, 2, ("reduce_scatter",))]
)
def test_the_same_on_several_ranks(ranks: int, replicas: int, modes: tuple[str, ...]) -> None:
    for rows in run_distributed(_in_modes, ranks, replicas, modes):
        assert len(rows) == (len(modes) + ("last" in modes)) * 4
        assert max(error for _, error in rows) < 1e-5, rows


@pytest.mark.parametrize("how", ["by an exception", "without one"])
@on_ranks(2)
def test_a_window_that_was_given_up_leaves_nothing(how: str) -> None:
    """A loop of the caller's own gives a window up; the next step is like the first of all."""
    model, plain = tiny_model("llama"), tiny_model("llama").to(device_here())
    fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32)
    batches = ragged_batches(4)
    window, targets = batches[dist.get_rank() :: 2], fs.count_targets(batches[dist.get_rank() :: 2])
    raised = pytest.raises(KeyError) if how == "by an exception" else nullcontext()
    with raised, fs.gradient_sync(model, "none"):
        fs.causal_lm_loss(model, window[0], num_targets=targets).backward()
        if how == "by an exception":
            raise KeyError("the caller's")
    model.zero_grad()
    result = fs.train_step(model, window, torch.optim.SGD(model.parameters(), lr=0.0), max_grad_norm=None)
    oracle = oracle_loss(plain, [{k: v.to(device_here()) for k, v in b.items()} for b in batches])
    assert result.grad_norm == pytest.approx(step_of(plain, [oracle], [])[1], rel=1e-5)


@on_ranks(2)
def test_a_model_can_be_saved_and_trained_after_a_failed_evaluation(tmp_path: Path) -> None:
    model = tiny_model("llama")
    fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    window = ragged_batches(4)[dist.get_rank() :: 2]
    fails: list[str] = []

    def fail(*_: object) -> None:
        if fails:
            raise torch.OutOfMemoryError(fails.pop())

    model.model.layers[1].register_forward_hook(fail)
    before = fs.train_step(model, window, optimizer).grad_norm
    ids = window[0]["input_ids"].to(device_here())
    for step, call in enumerate((lambda: fs.evaluate(model, window), lambda: model(input_ids=ids))):
        fails.append("planted")
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            call()
        fs.save_checkpoint(tmp_path, step, model=model, optimizer=optimizer)
        assert fs.train_step(model, window, optimizer).grad_norm == pytest.approx(before, rel=1e-6)
