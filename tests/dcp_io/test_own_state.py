"""What modules and optimizers keep in ways of their own comes back, or saving it is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_sft as fs
from tests.harness.device import mesh_here
from tests.harness.models import full
from tests.harness.ranks import run_distributed


class Amax(nn.Linear):
    """Extra state that is nothing at first, then numbers and tensors, as fp8 layers have."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.history: Any = None

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state


class Growing(Amax):
    """Extra state that is one tensor, of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.history = torch.zeros(0)


class Packed(nn.Module):
    """A weight that is stored in another form, under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.signs = torch.ones(6)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}packed"] = (self.signs > 0).to(torch.uint8)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.signs = state.pop(f"{prefix}packed").float() * 2 - 1
        super()._load_from_state_dict(state, prefix, *rest)


class Viewed(nn.Linear):
    """A weight whose state dict has a view of its memory."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}transposed"] = self.weight.detach().t()


def _model() -> nn.Sequential:
    return nn.Sequential(Amax(), Growing(), Packed(), nn.Linear(4, 4))


def _trained(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model: Any = _model()
    model[0].history = {"amax": [torch.rand(3), None], "steps": (seed, 0.5), torch.float32.itemsize: "f"}
    model[1].history = torch.rand(seed)
    model[2].signs = torch.tensor([1.0, -1, -1, 1, -1, 1])
    return model


def _state(model: Any) -> list[Any]:
    history = model[0].history
    own = [model[1].history, model[2].signs, history["amax"][0]]
    return [*(t.tolist() for t in own), history["amax"][1], history["steps"], history[4]]


def _save(root: str) -> None:
    model, expected = _trained(5), _state(_trained(5))
    fully_shard(model, mesh=mesh_here())
    saved = fs.save_checkpoint(root, 1, model=model, async_=True)
    model[1].history, model[2].signs = torch.rand(2), torch.ones(6)
    model[0].history["amax"][0].zero_()
    saved.wait()
    assert fs.verify_checkpoint(saved.path) == []
    _load(root)
    assert expected == _state(_trained(5))
    model[1].history = torch.full((2,), float(torch.distributed.get_rank()))
    with pytest.raises(fs.CheckpointError, match=r"differs between ranks: 1\._extra_state"):
        fs.save_checkpoint(root, 2, model=model)


def _load(root: str) -> None:
    model, expected = _model(), _trained(5)
    fully_shard(model, mesh=mesh_here())
    assert fs.load_checkpoint(root, model=model).step == 1
    assert _state(model) == _state(expected)
    weights = [full(p) for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights, expected.parameters(), strict=True))


def test_state_of_modules_comes_back_at_any_number_of_ranks(tmp_path: Path) -> None:
    run_distributed(_save, 2, str(tmp_path))
    run_distributed(_load, 1, str(tmp_path))
    plain = _model()
    fs.load_checkpoint(tmp_path, model=plain)
    assert _state(plain) == _state(_trained(5))


def test_a_view_of_a_weight_is_read_in_place(tmp_path: Path) -> None:
    saved, loaded = Viewed(3, 2, bias=False), Viewed(3, 2, bias=False)
    fs.save_checkpoint(tmp_path, 1, model=saved)
    fs.load_checkpoint(tmp_path, model=loaded)
    assert torch.equal(saved.weight, loaded.weight)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_one_file_holds_what_is_a_tensor(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{suffix}"
    model: Any = _trained(5)
    with pytest.raises(fs.UnstorableStateError, match=r"0\._extra_state is a dict"):
        fs.save_full_state_dict(model, path)
    saved, loaded = model[1:], _model()[1:]
    fs.save_full_state_dict(saved, path)
    fs.load_full_state_dict(loaded, path)
    assert torch.equal(loaded[0].history, saved[0].history)
    assert torch.equal(loaded[1].signs, saved[1].signs)


class Deaf(Amax):
    def set_extra_state(self, state: Any) -> None:
        pass


class Stubborn(Packed):
    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state.pop(f"{prefix}packed")


class Secretive(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}bias"] = self.bias


def test_what_does_not_come_back_is_an_error(tmp_path: Path) -> None:
    deaf, stubborn = Deaf(), Stubborn()
    for name, model in (("deaf", deaf), ("stubborn", stubborn)):
        deaf.history, stubborn.signs = {"steps": 3}, -torch.ones(6)
        fs.save_checkpoint(tmp_path / name, 1, model=model)
        deaf.history, stubborn.signs = {"steps": 4}, torch.ones(6)
        with pytest.raises(fs.CheckpointMismatchError, match=r"1 of 1 values.*did not come back"):
            fs.load_checkpoint(tmp_path / name, model=model)
    fs.save_checkpoint(tmp_path / "amax", 1, model=Amax())
    with pytest.raises(fs.CheckpointMismatchError, match="only in the checkpoint"):
        fs.load_checkpoint(tmp_path / "amax", model=nn.Linear(4, 4, bias=False))


def test_what_cannot_be_stored_is_refused_at_the_save(tmp_path: Path) -> None:
    model = Amax()
    model.history = {"recipe": object()}
    with pytest.raises(fs.UnstorableStateError, match=r"_extra_state\['recipe'\] is a object"):
        fs.save_checkpoint(tmp_path, 1, model=model)
    with pytest.raises(fs.UnstorableStateError, match=r"1 trained parameters of Secretive.*\(weight\)"):
        fs.save_checkpoint(tmp_path, 1, model=Secretive(2, 2))
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


class Around(torch.optim.SGD):
    """One optimizer around another, as sharpness-aware ones are."""

    def __init__(self, parameters: Any, inner: torch.optim.Optimizer) -> None:
        super().__init__(parameters, lr=0.1)
        self.inner = inner


class Proxy(torch.optim.Optimizer):
    """As accelerate wraps one: its state is the other's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]


class Counting(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "calls": 3}


class Copying(dict[Any, Any]):
    """A state that keeps copies of what it is given."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, {name: entry for name, entry in value.items() if name == "step"})


def _stepped(optimizer: Any, model: nn.Module) -> Any:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for one in getattr(optimizer, "optimizers", [getattr(optimizer, "inner", optimizer)]):
        one.step()
    return optimizer


def test_an_optimizer_whose_state_is_elsewhere_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    adam = torch.optim.AdamW
    merged = _stepped(Merged(adam([model.weight]), adam([model.bias])), model)
    around = _stepped(Around(model.parameters(), adam(model.parameters())), model)
    orphan = _stepped(adam(model.parameters()), model)
    orphan.state["lookahead"] = {"steps": 3}
    cases = [
        (merged, "made anew"),
        (around, r"another optimizer inside \(inner\)"),
        (orphan, "'lookahead'"),
        (Counting(model.parameters(), lr=0.1), r"more than state and param_groups \(calls\)"),
    ]
    for optimizer, message in cases:
        for save in (fs.save_optimizer_state, lambda m, o, p: fs.save_checkpoint(p, 1, model=m, optimizer=o)):
            with pytest.raises(fs.UnstorableStateError, match=message):
                save(model, optimizer, tmp_path / "out")
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    fs.save_optimizer_state(model, merged.optimizers, tmp_path / "list")
    fresh = [adam([model.bias]), adam([model.weight])]  # in any order
    fs.load_optimizer_state(model, fresh, tmp_path / "list")
    for parameter, state in merged.state.items():
        (own,) = (one.state[parameter] for one in fresh if parameter in one.state)
        assert all(torch.equal(own[name], value) for name, value in state.items())


def test_a_proxy_is_as_good_as_what_it_stands_for(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    inner = _stepped(torch.optim.AdamW(model.parameters()), model)
    fs.save_checkpoint(tmp_path, 1, model=model, optimizer=Proxy(inner))
    fresh = torch.optim.AdamW(model.parameters())
    fs.load_checkpoint(tmp_path, model=model, optimizer=Proxy(fresh))
    for parameter, state in inner.state.items():
        assert all(torch.equal(fresh.state[parameter][name], value) for name, value in state.items())


def test_entries_that_are_not_taken_are_counted(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    fs.save_optimizer_state(model, _stepped(torch.optim.AdamW(model.parameters()), model), tmp_path / "o")
    fresh = torch.optim.AdamW(model.parameters())
    fresh.state = Copying()  # type: ignore[assignment]
    with pytest.raises(fs.CheckpointMismatchError, match=r"6 entries.* it has taken 2 of them"):
        fs.load_optimizer_state(model, fresh, tmp_path / "o")
