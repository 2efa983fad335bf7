"""Optimizer state: read without a step, exact for every kind of optimizer, refused where it does not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_sft as fs
from tests.harness.ranks import run_distributed
from tests.harness.trained import assert_same, everything, make_adamw, make_model, train


def _optimizer_kinds(folder: str) -> None:
    """Steps of many optimizers are loaded into fresh ones and saved from fresh ones."""

    def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        kinds: dict[str, Any] = {
            "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
            "foreach": lambda: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
            "fused": lambda: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
            "sgd": lambda: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
            "plain sgd": lambda: torch.optim.SGD(parameters, lr=1e-2),
            "tensor lr": lambda: torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), foreach=False),
            "nadam": lambda: torch.optim.NAdam(parameters, lr=1e-2),
        }
        return kinds[kind]()

    for kind in ("adamw", "foreach", "fused", "sgd", "plain sgd", "tensor lr", "nadam"):
        path = f"{folder}/{kind}"
        model = make_model(1, {}, family="llama")
        optimizer = make(kind, model)
        fs.save_checkpoint(path, 0, model=model, optimizer=optimizer)
        assert not optimizer.state
        assert all(p.grad is None for p in model.parameters())
        target = make_model(1, {}, family="llama")
        stepped = make(kind, target)
        train(target, stepped, 0, 1)
        fs.load_checkpoint(path, model=target, optimizer=stepped)  # a fresh state empties it
        assert not stepped.state
        train(model, optimizer, 0, 2)
        if kind == "sgd":
            optimizer.state[next(iter(optimizer.state))]["momentum_buffer"] = None
            optimizer.state[next(iter(optimizer.state))]["count"] = 3
        optimizer.param_groups[0]["weight_decay"] = 0.25
        fs.save_checkpoint(path, 1, model=model, optimizer=optimizer)
        fresh = make(kind, target)
        fs.load_checkpoint(path, model=target, optimizer=fresh)
        loaded, saved = everything(target, fresh), everything(model, optimizer)
        assert_same(
            {name: v for name, v in loaded.items() if not name.startswith("model/")},
            {name: v for name, v in saved.items() if not name.startswith("model/")},
        )
        for a, b in zip(optimizer.state.values(), fresh.state.values(), strict=True):
            assert {k: type(v) for k, v in a.items()} == {k: type(v) for k, v in b.items()}
        for a, b in zip(model.parameters(), target.parameters(), strict=True):
            b.data.to_local().copy_(a.data.to_local())
        torch.manual_seed(5)
        losses = train(model, optimizer, 2, 2)
        torch.manual_seed(5)
        assert train(target, fresh, 2, 2) == losses, kind
    other = make("fused", target)
    fs.load_checkpoint(f"{folder}/adamw", model=target, optimizer=other)
    assert other.param_groups[0]["fused"] is True, "how it is computed stays the optimizer's own"


def _optimizer_mismatches(folder: str) -> None:
    model = make_model(1, {}, family="llama")
    optimizer = make_adamw(model)
    train(model, optimizer, 0, 1)
    fs.save_checkpoint(f"{folder}/state", 0, model=model, optimizer=optimizer)
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = everything(model, optimizer)
    cases = [
        (torch.optim.AdamW(parameters), "groups of"),
        (torch.optim.AdamW(parameters[:-1]), "lacks 1 of its parameters"),
        (torch.optim.SGD(parameters, momentum=0.9), "it is of AdamW, the optimizer is SGD"),
    ]
    for other, message in cases:
        with pytest.raises(fs.CheckpointMismatchError, match=message):
            fs.load_checkpoint(f"{folder}/state", model=model, optimizer=other)
        assert not other.state
    with pytest.raises(ValueError, match="not the model's"):
        fs.save_checkpoint(f"{folder}/other", 0, model=make_model(3, {}), optimizer=optimizer)
    optimizer.state[parameters[0]]["row"] = torch.zeros(3)
    with pytest.raises(ValueError, match="sharded again"):
        fs.save_checkpoint(f"{folder}/other", 0, model=model, optimizer=optimizer)
    del optimizer.state[parameters[0]]["row"]
    assert_same(everything(model, optimizer), before)


def _optimizers(folder: str) -> None:
    _optimizer_kinds(folder)
    _optimizer_mismatches(folder)


def test_optimizers(tmp_path: Path) -> None:
    run_distributed(_optimizers, 2, str(tmp_path))
