"""A GradScaler with parameters that are kept on the host, on devices whose copies are slow."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.models import ragged_batches, tiny_model
from tests.harness.ranks import run_distributed
from tests.simulated.ranks import run_simulated


def _trained(device: str, scaled_before: bool) -> tuple[list[float], list[float], dict[str, Any]]:
    """(losses, norms, parameters) of two steps in float16, the scaler made by whichever way."""
    model = tiny_model("llama")
    fs.shard_model(
        model,
        mesh=fs.build_mesh(device_type=device),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=device != "cpu"),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    if scaled_before:
        scaler.scale(torch.ones((), device=device))
    rank = torch.distributed.get_rank()
    windows = [ragged_batches(2, seed=2 * step + rank) for step in range(2)]
    results = [fs.train_step(model, window, optimizer, scaler=scaler) for window in windows]
    assert not any(result.skipped for result in results)
    assert scaler.get_scale() == 1024.0
    shards = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}
    return [r.loss for r in results], [r.grad_norm for r in results], shards


def _both_ways(device: str) -> list[Any]:
    return [_trained(device, scaled_before) for scaled_before in (False, True)]


def test_gradients_on_the_host_are_divided_by_the_scale() -> None:
    on_devices = run_simulated(_both_ways, 2, "sim", copy_delay=0.003)
    on_cpus = run_distributed(_both_ways, 2, "cpu")
    # Devices multiply float16 into float32, CPUs do not.
    for of_rank, expected_of_rank in zip(on_devices, on_cpus, strict=True):
        for found, expected in zip(of_rank, expected_of_rank, strict=True):
            assert found[0] == pytest.approx(expected[0], rel=1e-3)
            assert found[1] == pytest.approx(expected[1], rel=1e-2)
            for name, tensor in expected[2].items():
                torch.testing.assert_close(found[2][name], tensor, rtol=1e-2, atol=1e-3)


class _FailsOnce(torch.optim.SGD):
    fails = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise torch.OutOfMemoryError("of the optimizer")
        return super().step(closure)


@pytest.mark.parametrize("what", ["an optimizer that fails", "an optimizer of frozen parameters"])
def test_the_scaler_goes_on_after(what: str) -> None:
    model, plain = tiny_model("llama"), tiny_model("llama")
    batches = ragged_batches(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    first, rest = list(model.model.layers[0].parameters()), list(model.parameters())
    rest = [p for p in rest if not any(p is other for other in first)]
    if what == "an optimizer that fails":
        optimizers = [_FailsOnce(first, lr=0.0), torch.optim.SGD(rest, lr=0.0)]
        with pytest.raises(torch.OutOfMemoryError, match="of the optimizer"):
            fs.train_step(model, batches, optimizers, scaler=scaler)
    else:
        optimizers = [torch.optim.SGD(first, lr=0.0), torch.optim.SGD(rest, lr=0.0)]
        for each in (model, plain):
            each.model.layers[0].requires_grad_(False)
    expected = fs.train_step(plain, batches, torch.optim.SGD(plain.parameters(), lr=0.0)).grad_norm
    for _ in range(2):
        result = fs.train_step(model, batches, optimizers, scaler=scaler)
        assert not result.skipped
        assert result.grad_norm == pytest.approx(expected, rel=1e-5)
