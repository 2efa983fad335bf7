"""A recomputed router sends every token where its forward has sent it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fsdp_sft as fs
from fsdp_sft.sac.decisions import decides
from tests.harness.architectures import quiet, tiny_architecture
from tests.harness.device import device_here
from tests.harness.losses import gradients_of, with_loss
from tests.harness.models import largest_error, ragged_batches, tiny_model


class Disturbed(nn.Module):
    """A router whose every second call, the recomputation, moves one expert by a unit in the last place."""

    def __init__(self, router: Any, *, disturb: bool) -> None:
        super().__init__()
        self.weight, self.top_k, self.disturb, self.calls = router.weight, router.top_k, disturb, 0

    def forward(self, hidden: torch.Tensor) -> Any:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits = F.linear(hidden, self.weight)
        self.calls += 1
        with torch.no_grad():
            up = torch.nextafter(logits, torch.full_like(logits, torch.inf)) - logits
            up[:, [0, 1, 3]] = 0
        logits = logits + up * (self.disturb and self.calls % 2 == 0)
        probabilities = logits.softmax(-1)
        values, indices = probabilities.topk(self.top_k, dim=-1)
        values /= values.sum(-1, keepdim=True)
        return logits, values, indices


def _tied(*, disturb: bool) -> Any:
    """A mixture whose second and third expert are tied for every token, and are other experts."""
    model = tiny_model("mixtral", num_experts_per_tok=1).to(device_here())
    for block in model.model.layers:
        with torch.no_grad():
            block.mlp.gate.weight[1] *= 100  # so that a unit in the last place shows behind the softmax
            block.mlp.gate.weight[2] = block.mlp.gate.weight[1]
        block.mlp.gate = Disturbed(block.mlp.gate, disturb=disturb)
    return with_loss(model, router_loss="off")


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    summed, _ = fs.loss_sum(model, _batch())
    summed.backward()
    return gradients_of(model)


def _batch() -> dict[str, torch.Tensor]:
    return {name: value.to(device_here()) for name, value in ragged_batches(2)[0].items()}


@pytest.mark.parametrize("chosen", [{"ratio": 1}, {"save": "self_attn"}], ids=["1", "operations"])
def test_a_recomputed_router_decides_as_before(chosen: dict[str, Any]) -> None:
    plain = _gradients(_tied(disturb=False))
    model = _tied(disturb=True)
    fs.apply_sac(model, **chosen)
    _gradients(model)  # its first forward asks about the model's own loss
    seen: list[torch.Tensor] = []  # what the experts of each block are given, by call
    for block in model.model.layers:
        block.mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1].clone()))
        block.mlp.gate.calls = 0
    found = _gradients(model)
    forward, again = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(forward) == len(model.model.layers) == len(again)
    assert all(map(torch.equal, forward, reversed(again)))
    assert largest_error(found, plain) <= 1e-5
    assert {int(i) for indices in forward for i in indices.flatten()} <= {0, 1, 3}


def test_a_second_backward_decides_the_same() -> None:
    model = tiny_model("mixtral").to(device_here())
    fs.apply_sac(model, 1)
    summed, _ = fs.loss_sum(with_loss(model, router_loss="off", impl="logits"), _batch())
    parameters = list(model.parameters())
    first = torch.autograd.grad(summed, parameters, retain_graph=True)
    second = torch.autograd.grad(summed, parameters)
    assert all(map(torch.equal, first, second))


class Choosing(nn.Module):
    """Everything that decides, on one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        total = y.topk(2, dim=0).values.sum() + (y.sort(descending=True).values * torch.arange(6.0)).sum()
        total = total + y.max(dim=0, keepdim=True).values.sum() + y.min(dim=1).values.square().sum()
        total = total + y.kthvalue(2).values.sum() + y.median(dim=-1).values.sum()
        chosen = F.one_hot(y.argmax(-1), 6) + F.one_hot(y.argsort(stable=True)[:, 0], 6)
        return x + (total + chosen * y).tanh()


def test_every_operation_that_decides_is_repeated() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Choosing(), Choosing())
    x = torch.randn(5, 6)
    model(x).sum().backward()
    expected = gradients_of(model)
    fs.apply_sac(model, blocks=["0", "1"])
    model(x).sum().backward()
    found = gradients_of(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_only_blocks_that_decide_pay() -> None:
    with quiet():
        for name, expected in {
            "LlamaForCausalLM": False,
            "Gemma3ForCausalLM": False,
            "MambaForCausalLM": False,
            "MixtralForCausalLM": True,
            "PhimoeForCausalLM": True,
            "GptOssForCausalLM": True,
        }.items():
            blocks = fs.find_blocks(tiny_architecture(name))
            assert any(map(decides, blocks.values())) == expected, name
