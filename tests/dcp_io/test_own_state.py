"""What modules and optimizers keep in ways of their own comes back, or saving it is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_sft as fs


class Amax(nn.Linear):
    """Extra state, as fp8 layers have."""

    def get_extra_state(self) -> Any:
        return {"amax": 3.0}


class Packed(nn.Module):
    """A weight that is stored in another form, under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.signs = torch.ones(6)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}packed"] = (self.signs > 0).to(torch.uint8)


class Viewed(nn.Linear):
    """A weight whose state dict has a view of its memory."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}transposed"] = self.weight.detach().t()


class Secretive(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}bias"] = self.bias


def test_a_view_of_a_weight_is_read_in_place(tmp_path: Path) -> None:
    saved, loaded = Viewed(3, 2, bias=False), Viewed(3, 2, bias=False)
    fs.save_checkpoint(tmp_path, 1, model=saved)
    fs.load_checkpoint(tmp_path, model=loaded)
    assert torch.equal(saved.weight, loaded.weight)


def test_what_would_not_come_back_is_refused(tmp_path: Path) -> None:
    for model, message in (
        (nn.Sequential(Amax(2, 2)), r"0\._extra_state of Sequential is a dict, and a file holds plain"),
        (Packed(), r"copies \(packed\)"),
        (Secretive(2, 2), r"left out \(weight\)"),
    ):
        with pytest.raises(fs.UnstorableStateError, match=message):
            fs.save_checkpoint(tmp_path / "steps", 1, model=model)
        with pytest.raises(fs.UnstorableStateError, match=message):
            fs.save_full_state_dict(model, tmp_path / "model.safetensors")
    assert not (tmp_path / "steps").exists()
    frozen = Secretive(2, 2)
    frozen.weight.requires_grad_(False)
    fs.save_checkpoint(tmp_path, 1, model=frozen)


# --- optimizers ---


class Merged(torch.optim.Optimizer):
    """Two optimizers in one, whose state is gathered whenever it is asked for."""

    def __init__(self, first: Any, second: Any) -> None:
        self.optimizers, self.defaults = [first, second], {}

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return {parameter: state for one in self.optimizers for parameter, state in one.state.items()}


class Proxy(torch.optim.Optimizer):
    """As accelerate wraps one: its state is the other's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]


class Counting(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "calls": 3}


def _stepped(model: nn.Module) -> torch.optim.Optimizer:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    return optimizer


def test_an_optimizer_whose_state_is_elsewhere_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    around: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    around.inner = _stepped(model)  # as sharpness-aware ones have one
    orphan = _stepped(model)
    orphan.state["lookahead"] = {"steps": 3}
    cases = [
        (Merged(_stepped(model), torch.optim.AdamW([model.bias])), "made anew"),
        (around, r"another optimizer inside \(inner\)"),
        (orphan, "'lookahead'"),
        (Counting(model.parameters(), lr=0.1), r"more than state and param_groups \(calls\)"),
    ]
    for optimizer, message in cases:
        with pytest.raises(fs.UnstorableStateError, match=message):
            fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
        assert list(tmp_path.iterdir()) == []


def test_a_proxy_is_as_good_as_what_it_stands_for(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    inner = _stepped(model)
    fs.save_checkpoint(tmp_path, 1, model=model, optimizer=Proxy(inner))
    fresh = torch.optim.AdamW(model.parameters())
    fs.load_checkpoint(tmp_path, model=model, optimizer=Proxy(fresh))
    for parameter, state in inner.state.items():
        assert all(torch.equal(fresh.state[parameter][name], value) for name, value in state.items())
