"""What would not come back is refused when it is saved: state kept elsewhere, ranks with other tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_sft as fs
from tests.harness.ranks import run_distributed
from tests.harness.trained import assert_same


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


class Secretive(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}bias"] = self.bias


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
    frozen = Secretive(2, 2).requires_grad_(False)
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
        assert_same(fresh.state[parameter], state)


# --- ranks with other tensors, state that no file holds ---


def _save(root: str, difference: str) -> None:
    fs.init_distributed()
    last = torch.distributed.get_rank() == 1
    model = nn.ModuleDict({"a": nn.Linear(4, 5 if last and difference == "shape" else 3)})
    if last and difference == "name":
        model["b"] = nn.Linear(2, 2)
    if last and difference == "dtype":
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    if not (last and difference == "state"):
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
    with pytest.raises(fs.CheckpointError, match=r"1 ranks \(1\) have tensors of other names, shapes"):
        fs.save_checkpoint(root, 1, model=model, optimizer=optimizer)


@pytest.mark.parametrize("difference", ["shape", "name", "dtype", "state"])
def test_they_are_named_and_nothing_is_left(difference: str, tmp_path: Path) -> None:
    run_distributed(_save, 3, str(tmp_path), difference)
    assert not list(tmp_path.glob("*step*"))
    assert not list(tmp_path.glob(".*step*"))


def test_what_could_not_be_loaded_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"x/y": torch.zeros(2, 2)}
    with pytest.raises(fs.UnstorableStateError, match="without a slash"):
        fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
    state = {f"a tensor of its own {number}": torch.zeros(1) for number in range(3)}
    fs.save_checkpoint(tmp_path, 1, model=model, rank_state=state)
    monkeypatch.setattr("fsdp_sft._tensors.safetensors.MAX_HEADER_BYTES", 900)
    with pytest.raises(fs.CheckpointError, match=r"rank 0 has \d+ tensors, whose names"):
        fs.save_checkpoint(tmp_path, 2, model=model, rank_state=state)
    assert [info.step for info in fs.find_checkpoints(tmp_path)] == [1]
    assert not list(tmp_path.glob(".tmp*"))
