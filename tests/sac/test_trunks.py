"""Blocks that transformers knows nothing of: recomputed, sharded and compiled."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.models import full
from tests.harness.ranks import run_distributed


class Block(nn.Module):
    """A block that transformers knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + self.down(torch.relu(self.up(x)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.trunk:
            x = block(x)
        return x


def _plain_gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 24).view(3, 8)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Nano(nn.Module):
    """The trunk as nanoGPT, litgpt and nanochat have it."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"h": nn.ModuleList(Block() for _ in range(4)), "ln_f": nn.LayerNorm(8)}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.transformer["h"]:
            x = block(x)
        return self.transformer["ln_f"](x)


def test_a_trunk_in_a_namespace_is_recomputed_and_sharded() -> None:
    torch.manual_seed(0)
    model = Nano()
    expected = _plain_gradients(model)
    assert fs.apply_sac(model, 1) == [f"transformer.h.{i}" for i in range(4)]
    calls = []
    model.transformer["h"][0].up.register_forward_pre_hook(lambda *_: calls.append(0))
    assert all(map(torch.equal, _plain_gradients(model), expected))
    assert len(calls) == 2
    with pytest.raises(ValueError, match=r"'transformer' \(ModuleDict\) only holds other modules"):
        fs.apply_sac(model, blocks=["transformer"])
    run_distributed(_check_nano_sharded, 1)


def _check_nano_sharded() -> None:
    torch.manual_seed(0)
    model = Nano()
    expected = _plain_gradients(model)
    mesh = mesh_here()
    fs.apply_sac(model, 1)
    fs.shard_model(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    assert all(map(torch.equal, map(full, _plain_gradients(model)), expected))


@pytest.mark.parametrize("whole", [False, True])
def test_blocks_of_other_origin_compile_without_a_graph_break(whole: bool) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Nano()
    expected = _plain_gradients(model)
    fs.apply_sac(model, 1)
    if whole:
        model.compile(backend="aot_eager", fullgraph=True)
    else:
        fs.compile_blocks(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert all(map(torch.equal, _plain_gradients(model), expected))


def test_a_graph_break_inside_of_a_checkpoint_is_no_error() -> None:
    torch.compiler.reset()

    class Breaking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.up(x)
            torch._dynamo.graph_break()
            return self.down(x)

    for whole in (False, True):
        model = Plain()
        model.trunk = nn.ModuleList(Breaking() for _ in range(2))
        expected = _plain_gradients(model)
        fs.apply_sac(model, 1)
        model.compile(backend="aot_eager") if whole else fs.compile_blocks(model, backend="aot_eager")
        found = _plain_gradients(model)
        assert len(found) == len(expected) > 0
        assert all(map(torch.equal, found, expected))
