"""A model that others look at is left as it was."""

import copy
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fsdp_sft as fs
from fsdp_sft._model.forward import probed
from fsdp_sft._model.sharded import reshard
from fsdp_sft._model.view import named_tensors
from tests.harness.device import mesh_here
from tests.harness.models import full, tiny_model
from tests.harness.ranks import run_distributed

ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 8,
    },
}


def _verify(model: Any) -> None:
    with suppress(fs.PackingError):  # rows of a pack set each other's frequencies
        fs.verify_packing(model, max_length=64)


LOOKS: dict[str, Callable[[Any], Any]] = {
    "prepare_loss": lambda model: fs.prepare_loss(model),
    "verify_packing": _verify,
}


def _state(model: nn.Module) -> dict[str, Any]:
    """All tensors and plain attributes, by name."""
    found: dict[str, Any] = dict(named_tensors(model))
    for fqn, module in model.named_modules():
        found |= {f"{fqn}:{name}": value for name, value in vars(module).items()}
    plain = (torch.Tensor, bool, int, float, str, type(None))
    return {
        name: str((value.dtype, full(value).detach().tolist())) if isinstance(value, torch.Tensor) else value
        for name, value in found.items()
        if isinstance(value, plain)
    }


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted({name for name, _ in before.items() ^ after.items()})


def _check_look(look: str, rope: str, sharded: bool) -> tuple[list[str], bool]:
    model = tiny_model("llama", max_position_embeddings=16, rope_parameters=ROPES[rope])
    if sharded:
        fs.shard_model(model, mesh=mesh_here())
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        model(input_ids=ids)  # longer than the model was made for: the cached length has grown
        oracle = copy.deepcopy(model) if not sharded else None
    reshard(model)
    before = _state(model)
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    LOOKS[look](model)
    drawn = (torch.rand(3).tolist(), random.random(), np.random.rand())
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    unmoved = drawn == (torch.rand(3).tolist(), random.random(), np.random.rand())
    changed = _changed(before, _state(model))
    if oracle is not None:
        with torch.no_grad():
            same = torch.equal(model(input_ids=ids).logits, oracle(input_ids=ids).logits)
        changed += [] if same else ["later logits"]
    return changed, unmoved


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("look", LOOKS)
def test_a_look_leaves_a_model_as_it_was(look: str, rope: str) -> None:
    assert _check_look(look, rope, sharded=False) == ([], True)


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_leaves_a_sharded_model_as_it_was(look: str) -> None:
    assert run_distributed(_check_look, 2, look, "dynamic", True) == [([], True)] * 2


class Restless(nn.Module):
    """Changes everything of itself that a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("gone", torch.zeros(1))
        self.count, self.longest, self.kept = 0, torch.tensor(4), torch.ones(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.table += 1
        self.kept.mul_(7)
        self.register_buffer("replaced", torch.ones(5))
        self.register_buffer("new_buffer", torch.ones(1))
        del self._buffers["gone"]
        self.longest, self.new_flag, self.new_tensor = torch.tensor(9), True, torch.ones(1)
        return x * self.weight * torch.rand(())


def test_whatever_a_forward_changes_is_put_back_after_an_error_too() -> None:
    model = nn.Sequential(Restless(), nn.Dropout())
    model[1].eval()
    before, identities = _state(model), {n: id(b) for n, b in model.named_buffers()}
    torch.manual_seed(3)
    with pytest.raises(ZeroDivisionError), probed(model):
        model.train()
        model(torch.ones(3))
        assert _changed(before, _state(model)) != []
        raise ZeroDivisionError
    assert _changed(before, _state(model)) == []
    assert {n: id(b) for n, b in model.named_buffers()} == identities
    after = torch.rand(())
    torch.manual_seed(3)
    assert torch.equal(torch.rand(()), after)
