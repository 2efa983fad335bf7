"""Compiled blocks have room for their variants."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_sft as fs


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    from torch._dynamo import config

    torch.compiler.reset()
    with config.patch(recompile_limit=config.recompile_limit):
        yield
    torch.compiler.reset()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _compiled_variants(lengths: int) -> int:
    """Graphs compiled in training with ragged rows and evaluations in between."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model = Trunk()
    fs.apply_sac(model, "1/3")
    fs.compile_blocks(model, backend=backend, dynamic=False)
    for length in range(2, 2 + lengths):
        model.train()(torch.ones(length, 4)).sum().backward()
        with torch.no_grad():
            model.eval()(torch.ones(length, 4))
    return len(graphs)


def test_ragged_rows_and_evaluations_are_compiled_to_the_last() -> None:
    one = _compiled_variants(1)
    torch.compiler.reset()
    assert _compiled_variants(3) == 3 * one
