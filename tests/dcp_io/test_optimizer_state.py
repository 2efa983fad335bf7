"""State of any optimizer, and of several at once: exact, or refused where it does not fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_sft as fs
from tests.harness.ranks import run_distributed
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
    fs.save_checkpoint(path, 1, model=model, optimizer=optimizer)
    target, fresh = _made(kind)
    fs.load_checkpoint(path, model=target, optimizer=fresh)
    assert_same(everything(target, fresh), everything(model, optimizer))
    for a, b in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert {k: type(v) for k, v in a.items()} == {k: type(v) for k, v in b.items()}
    torch.manual_seed(5)
    losses = train(model, optimizer, 2, 2)
    torch.manual_seed(5)
    assert train(target, fresh, 2, 2) == losses


def _kinds(folder: str) -> None:
    for kind in KINDS:
        _round_trip(f"{folder}/{kind}", kind)
    model, fused = _made("fused")
    fs.load_checkpoint(f"{folder}/adamw", model=model, optimizer=[fused])  # alone and in a list it is one
    assert fused.param_groups[0]["fused"] is True, "how it is computed stays the optimizer's own"


def test_every_kind_of_optimizer_goes_on_as_it_was(tmp_path: Path) -> None:
    run_distributed(_kinds, 2, str(tmp_path))


def _refused_loads(step: str, model: Any, cases: list[tuple[Any, str]]) -> None:
    before = everything(model)
    for optimizer, message in cases:
        with pytest.raises(fs.CheckpointMismatchError, match=message):
            fs.load_checkpoint(step, model=model, optimizer=optimizer)
    assert_same(everything(model), before)


def _mismatches(folder: str) -> None:
    model = make_model(1, {}, family="llama")
    optimizer = make_adamw(model)
    train(model, optimizer, 0, 1)
    step = fs.save_checkpoint(folder, 0, model=model, optimizer=optimizer).path
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
        fs.save_checkpoint(folder, 1, model=make_model(3, {}), optimizer=optimizer)
    optimizer.state[parameters[0]]["row"] = torch.zeros(3)
    with pytest.raises(ValueError, match="sharded again"):
        fs.save_checkpoint(folder, 1, model=model, optimizer=optimizer)


def test_an_optimizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    run_distributed(_mismatches, 2, str(tmp_path))


# --- Muon for matrices and AdamW for the rest, in one checkpoint --------------------------------------------


def _pair(seed: int, mesh: dict[str, int] | None) -> tuple[Any, list[torch.optim.Optimizer]]:
    model = make_model(seed, mesh, family="llama", wrap=False)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in trained if p.ndim == 2 and "layers" in n]
    rest = [p for n, p in trained if not (p.ndim == 2 and "layers" in n)]
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
    losses = train(model, optimizers, 2, 2)
    if this_rank() == 0:
        torch.save(expected, f"{root}/expected")
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
