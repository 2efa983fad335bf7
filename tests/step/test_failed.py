"""A step that fails leaves nothing for the next one: no gradient, nothing gathered, no count."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.device import device_here, mesh_here
from tests.harness.models import full, largest_error, oracle_gradients, ragged_batches, tiny_model
from tests.harness.ranks import run_distributed


class _Planned(Exception):
    """What the tests raise."""


class _Failure:
    """The middle block raises in a forward, or the gradient of its output in a backward, once it is armed."""

    def __init__(self, model: Any, kind: str) -> None:
        self._kind, self._left = kind, 0
        model.model.layers[1].mlp.register_forward_hook(self._hook)

    @contextmanager
    def armed(self, call: int) -> Iterator[None]:
        """Raise in that call within the block."""
        self._left = call
        yield
        self._left = 0

    def _hook(self, _: Any, __: Any, output: torch.Tensor) -> None:
        if self._kind == "forward":
            self._fail()
        elif output.requires_grad:
            output.register_hook(self._fail)

    def _fail(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            raise _Planned


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
            failure = _Failure(model, name)
            if mesh is not None:
                fs.shard_model(model, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
            rank, ranks = (mesh.get_rank(), mesh.size()) if mesh is not None else (0, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            batches = ragged_batches(3 * ranks)
            lost = ragged_batches(3 * ranks, seed=9)
            fs.train_step(model, batches[rank::ranks], torch.optim.SGD(model.parameters(), lr=0.0))
            with failure.armed(call), pytest.raises(_Planned):
                fs.train_step(model, lost[rank::ranks], optimizer, grad_sync=grad_sync)
            assert all(parameter.grad is None for parameter in model.parameters())
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
    for failure, error in _gradients_after_a_failure(None, grad_sync):
        assert error < 1e-5, (failure, error)


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
        for failure, error in rows:
            assert error < 1e-5, (failure, error)
