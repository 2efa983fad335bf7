"""State of any optimizer, and of several at once: exact, or refused where it would not come back."""

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_sft as fs
from fsdp_sft.step.update import checked_optimizers
from tests.harness.ranks import on_ranks, run_distributed
from tests.harness.trained import (
    HSDP,
    assert_same,
    everything,
    make_adamw,
    make_model,
    this_rank,
    train,
)

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "tensor lr": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
}


def _made(kind: str) -> tuple[Any, torch.optim.Optimizer]:
    model = make_model(1, {}, family="llama")
    return model, KINDS[kind]([p for p in model.parameters() if p.requires_grad])


def _round_trip(path: str, kind: str) -> None:
    """Steps are loaded into fresh optimizers and saved from fresh ones."""
    model, optimizer = _made(kind)
    fs.save_checkpoint(path, 0, model=model, optimizer=optimizer)
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    target, stepped = _made(kind)
    train(target, stepped, 0, 1)
    fs.load_checkpoint(path, model=target, optimizer=stepped)  # a fresh state empties it
    assert not stepped.state
    train(model, optimizer, 0, 2)
    if kind == "sgd":
        optimizer.state[next(iter(optimizer.state))].update(momentum_buffer=None, count=3)
    optimizer.param_groups[0]["weight_decay"] = 0.25
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=9)
    state = {"schedule": schedule.state_dict(), "last": collections.deque([1.5, 2.5], maxlen=2)}
    fs.save_checkpoint(path, 1, model=model, optimizer=optimizer, train_state=state)
    target, fresh = _made(kind)
    other = torch.optim.lr_scheduler.LinearLR(fresh, total_iters=7)
    loaded = fs.load_checkpoint(path, model=target, optimizer=fresh).train_state
    other.load_state_dict(loaded["schedule"])
    assert loaded["last"].maxlen == 2
    assert repr(other.state_dict()) == repr(schedule.state_dict())  # rates that are tensors, too
    assert_same(everything(target, fresh), everything(model, optimizer))
    for one in (schedule, other):
        one.step()
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for a, b in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert {k: type(v) for k, v in a.items()} == {k: type(v) for k, v in b.items()}
    torch.manual_seed(5)
    losses = train(model, optimizer, 2, 2)
    torch.manual_seed(5)
    assert train(target, fresh, 2, 2) == losses


@on_ranks(2)
def test_every_kind_of_optimizer_goes_on_as_it_was(tmp_path: Path) -> None:
    for kind in KINDS:
        _round_trip(f"{tmp_path}/{kind}", kind)
    model, fused = _made("fused")
    fused.param_groups[0]["d"] = next(p for p in fused.param_groups[0]["params"]).detach().square().sum()
    with pytest.raises(TypeError, match=r"\['d'\] is a DTensor"):  # each rank has a part of the sum
        fs.save_checkpoint(f"{tmp_path}/d", 1, model=model, optimizer=fused)
    model, fused = _made("fused")
    fs.load_checkpoint(f"{tmp_path}/adamw", model=model, optimizer=[fused])  # alone and in a list it is one
    assert fused.param_groups[0]["fused"] is True, "how it is computed stays the optimizer's own"


def _refused_loads(step: str, model: Any, cases: list[tuple[Any, str]]) -> None:
    before = everything(model)
    for optimizer, message in cases:
        with pytest.raises(fs.CheckpointMismatchError, match=message):
            fs.load_checkpoint(step, model=model, optimizer=optimizer)
    assert_same(everything(model), before)


@on_ranks(2)
def test_an_optimizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = make_model(1, {}, family="llama")
    optimizer = make_adamw(model)
    train(model, optimizer, 0, 1)
    step = fs.save_checkpoint(tmp_path, 0, model=model, optimizer=optimizer).path
    parameters = [p for p in model.parameters() if p.requires_grad]
    _refused_loads(
        str(step),
        model,
        [
            (torch.optim.AdamW(parameters), "groups of"),
            (torch.optim.AdamW(parameters[:-1]), "lacks 1 of its parameters"),
            (torch.optim.SGD(parameters, momentum=0.9), "it is of AdamW, the optimizer is SGD"),
        ],
    )
    with pytest.raises(ValueError, match="not the model's"):
        fs.save_checkpoint(tmp_path, 1, model=make_model(3, {}), optimizer=optimizer)
    optimizer.state[parameters[0]]["row"] = torch.zeros(3)
    with pytest.raises(ValueError, match="sharded again"):
        fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)


# --- Muon for matrices and AdamW for the rest, in one checkpoint --------------------------------------------


def _pair(seed: int, mesh: dict[str, int] | None) -> tuple[Any, list[torch.optim.Optimizer]]:
    model = make_model(seed, mesh, family="llama", wrap=False)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices, rest = (
        [p for n, p in trained if (p.ndim == 2 and "layers" in n) == of] for of in (True, False)
    )
    return model, [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


def _everything(model: Any, optimizers: list[Any]) -> dict[str, Any]:
    return {
        f"{type(optimizer).__name__}/{name}": value
        for optimizer in optimizers
        for name, value in everything(model, optimizer).items()
    }


def _save_several(root: str) -> None:
    model, optimizers = _pair(1, {})
    fs.save_checkpoint(root, 1, model=model, optimizer=optimizers)  # neither has state
    train(model, optimizers[1:], 0, 1)  # one has none yet
    fs.save_checkpoint(root, 2, model=model, optimizer=optimizers, async_=True)
    half = _everything(model, optimizers)
    train(model, optimizers, 1, 1)
    optimizers[0].param_groups[0]["momentum"] = 0.9
    fs.save_checkpoint(root, 3, model=model, optimizer=tuple(optimizers))
    expected = {"half": half, "all": _everything(model, optimizers)}
    if this_rank() == 0:
        torch.save(expected, f"{root}/expected")
    losses = train(model, optimizers, 2, 2)
    torch.distributed.barrier()
    _load_several(root, {})
    again, fresh = _pair(7, {})
    fs.load_checkpoint(f"{root}/step-3", model=again, optimizer=fresh)
    _refuse_several(f"{root}/step-3", again, fresh)
    assert train(again, fresh, 2, 2) == losses
    assert_same(_everything(again, fresh), _everything(model, optimizers))


def _load_several(root: str, mesh: dict[str, int] | None) -> None:
    expected = torch.load(f"{root}/expected", weights_only=False)
    model, optimizers = _pair(7, mesh)
    fs.load_checkpoint(f"{root}/step-3", model=model, optimizer=optimizers[::-1])
    assert_same(_everything(model, optimizers), expected["all"])
    fs.load_checkpoint(f"{root}/step-2", model=model, optimizer=optimizers)
    assert_same(_everything(model, optimizers), expected["half"])
    fs.load_checkpoint(f"{root}/step-1", model=model, optimizer=optimizers)
    assert not any(optimizer.state for optimizer in optimizers)


def _refuse_several(step: str, model: Any, optimizers: list[Any]) -> None:
    matrices, rest = ([p for group in one.param_groups for p in group["params"]] for one in optimizers)
    _refused_loads(
        step,
        model,
        [
            (
                torch.optim.AdamW([*matrices, *rest]),
                "it is of 2 optimizers .Muon, AdamW., and 1 were given .AdamW.",
            ),
            (optimizers[:1], "of 2 optimizers"),
            ([optimizers[0], torch.optim.SGD(rest, lr=1.0)], "it is of AdamW, the optimizer is SGD"),
            ([optimizers[0], torch.optim.AdamW(rest[1:])], "lacks 1 of its parameters"),
        ],
    )
    with pytest.raises(ValueError, match="empty list"):
        fs.save_checkpoint(step, 9, model=model, optimizer=[])
    with pytest.raises(TypeError, match="list of them, got dict"):
        fs.save_checkpoint(step, 9, model=model, optimizer=[{}])  # type: ignore[list-item]


def test_two_optimizers_at_any_number_of_ranks(tmp_path: Path) -> None:
    run_distributed(_save_several, 2, str(tmp_path))
    run_distributed(_load_several, 4, str(tmp_path), HSDP)
    run_distributed(_load_several, 1, str(tmp_path), None)


# --- what would not come back is refused when it is saved: state kept elsewhere, ranks with other tensors --


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
    uneven = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for model, message in (
        (nn.ParameterDict({"rows": uneven}), r"rows of ParameterDict is a .*, and a file holds plain"),
        (nn.Sequential(Amax(2, 2)), r"0\._extra_state of Sequential is a dict, and a file holds plain"),
        (Packed(), r"copies \(packed\)"),
        (Secretive(2, 2), r"left out \(weight\)"),
    ):
        with pytest.raises(fs.UnstorableStateError, match=message):
            fs.save_checkpoint(tmp_path / "steps", 1, model=model)
        with pytest.raises(fs.UnstorableStateError, match=message):
            fs.save_full_state_dict(model, tmp_path / "model.safetensors")
    assert not (tmp_path / "steps").exists()
    fs.save_checkpoint(tmp_path, 1, model=Secretive(2, 2).requires_grad_(False))


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


class AcceleratedOptimizer(torch.optim.Optimizer):
    """As accelerate wraps one: its state is the other's, and its step is left out in some windows."""

    __module__ = "accelerate.optimizer"

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]


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
    for optimizer, message in (
        (Merged(_stepped(model), torch.optim.AdamW([model.bias])), "made anew"),
        (around, r"another optimizer inside \(inner\)"),
        (orphan, "'lookahead'"),
        (Counting(model.parameters(), lr=0.1), r"more than state and param_groups \(calls\)"),
    ):
        with pytest.raises(fs.UnstorableStateError, match=message):
            fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
        assert list(tmp_path.iterdir()) == []


def test_a_prepared_one_stands_for_what_it_wraps(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    inner = _stepped(model)
    assert checked_optimizers(model, AcceleratedOptimizer(inner))[0] == [inner]
    fs.save_checkpoint(tmp_path, 1, model=model, optimizer=AcceleratedOptimizer(inner))
    fresh = torch.optim.AdamW(model.parameters())
    fs.load_checkpoint(tmp_path, model=model, optimizer=fresh)
    assert_same(
        {str(id(p)): fresh.state[p] for p in inner.state}, {str(id(p)): s for p, s in inner.state.items()}
    )


# --- ranks with other tensors, state that no file holds ---


def _save_apart(root: str, difference: str) -> None:
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
    run_distributed(_save_apart, 3, str(tmp_path), difference)
    assert not list(tmp_path.glob("*step*"))  # nor hidden ones


def test_what_could_not_be_loaded_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight] = {"x/y": torch.zeros(2, 2)}
    with pytest.raises(fs.UnstorableStateError, match="without a slash"):
        fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
    for unreadable in ({"file": "row\udce9.jsonl"}, {2**70: 1}):  # as os.listdir names a file in Latin-1
        with pytest.raises(fs.CheckpointError, match="could not be loaded again"):
            fs.save_checkpoint(tmp_path, 1, model=model, rank_state=unreadable)
    state = {f"a tensor of its own {number}": torch.zeros(1) for number in range(3)}
    fs.save_checkpoint(tmp_path, 1, model=model, rank_state=state)
    monkeypatch.setattr("fsdp_sft._tensors.safetensors.MAX_HEADER_BYTES", 900)
    with pytest.raises(fs.CheckpointError, match="the header would take"):
        fs.save_checkpoint(tmp_path, 2, model=model, rank_state=state)
    assert [info.step for info in fs.find_checkpoints(tmp_path)] == [1]
    assert not list(tmp_path.glob(".tmp*"))
