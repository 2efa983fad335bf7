"""Operators of the simulated device: what the CPU computes."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.harness import device
from tests.harness.device import device_here
from tests.harness.ranks import run_distributed


def _gradients(module: nn.Module, values: torch.Tensor) -> list[torch.Tensor]:
    values = values.detach().requires_grad_()
    module(values).square().sum().backward()
    return [values.grad.cpu(), *(p.grad.cpu() for p in module.parameters())]


def _convolutions() -> None:
    for make in (
        lambda: nn.Conv1d(6, 4, 3, padding=2, stride=2, groups=2),
        lambda: nn.Conv1d(6, 6, 3, bias=False),
        lambda: nn.ConvTranspose1d(6, 4, 3, groups=2),
    ):
        torch.manual_seed(0)
        module, values = make(), torch.randn(2, 6, 9)
        expected = _gradients(module, values)
        module.zero_grad()
        found = _gradients(module.to(device_here()), values.to(device_here()))
        assert all(map(torch.equal, found, expected))


def _recomputed_in_a_graph() -> None:
    from torch.utils.checkpoint import checkpoint

    def block(values: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(values.sin(), 0.5).cos()

    def gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        values = torch.arange(64.0, device=device_here(), requires_grad=True)
        torch.manual_seed(3)
        function(values).sum().backward()
        return values.grad

    def recomputing(values: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, values, use_reentrant=False)

    expected, found = (gradient(torch.compile(one, backend="aot_eager")) for one in (block, recomputing))
    assert 10 < int((expected == 0).sum()) < 54
    assert torch.equal(found, expected)


@pytest.mark.parametrize("check", [_convolutions, _recomputed_in_a_graph])
def test_it_is_what_the_cpu_computes(check: Callable[[], None]) -> None:
    with device.asking("sim"):
        run_distributed(check, 1)
