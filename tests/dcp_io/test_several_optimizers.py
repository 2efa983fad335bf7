"""Muon for matrices and AdamW for the rest, in one checkpoint: exact at any number of ranks and mesh."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_sft as fs
from tests.harness.ranks import run_distributed
from tests.harness.trained import BATCHES, HSDP, assert_same, everything, make_model, this_rank


def _optimizers(model: Any) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n and p.requires_grad]
    own = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in own and p.requires_grad]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


def _train(model: Any, optimizers: list[Any], first: int, count: int) -> list[float]:
    losses = []
    for batch in BATCHES[first : first + count]:
        loss = model(**{k: batch[k] for k in ("input_ids", "attention_mask", "labels")}).loss
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _everything(model: Any, optimizers: list[Any]) -> dict[str, Any]:
    return {
        f"{type(optimizer).__name__}/{name}": value
        for optimizer in optimizers
        for name, value in everything(model, optimizer).items()
    }


def _save(root: str, mesh: dict[str, int] | None) -> None:
    model = make_model(1, mesh, family="llama", wrap=False)
    optimizers = _optimizers(model)
    fs.save_checkpoint(root, 1, model=model, optimizer=optimizers)  # neither has state
    _train(model, optimizers[1:], 0, 1)  # one has none yet
    fs.save_checkpoint(root, 2, model=model, optimizer=optimizers, async_=True)
    half = _everything(model, optimizers)
    _train(model, optimizers, 1, 1)
    optimizers[0].param_groups[0]["momentum"] = 0.9
    fs.save_checkpoint(root, 3, model=model, optimizer=tuple(optimizers))
    expected = {"half": half, "all": _everything(model, optimizers)}
    expected["losses"] = _train(model, optimizers, 2, 2)
    expected["after"] = _everything(model, optimizers)
    if this_rank() == 0:
        torch.save(expected, f"{root}/expected")


def _load(root: str, mesh: dict[str, int] | None, exact: bool) -> None:
    expected = torch.load(f"{root}/expected", weights_only=False)
    model = make_model(7, mesh, family="llama", wrap=False)
    optimizers = _optimizers(model)
    fs.load_checkpoint(f"{root}/step-3", model=model, optimizer=optimizers[::-1])
    assert_same(_everything(model, optimizers), expected["all"])
    fs.load_checkpoint(f"{root}/step-2", model=model, optimizer=optimizers)
    assert_same(_everything(model, optimizers), expected["half"])
    fs.load_checkpoint(f"{root}/step-1", model=model, optimizer=optimizers)
    assert not any(optimizer.state for optimizer in optimizers)
    fs.load_checkpoint(f"{root}/step-3", model=model, optimizer=optimizers)
    if exact:
        assert _train(model, optimizers, 2, 2) == expected["losses"]
        assert_same(_everything(model, optimizers), expected["after"])


def _mismatches(root: str, mesh: dict[str, int] | None) -> None:
    model = make_model(7, mesh, family="llama", wrap=False)
    muon, adamw = optimizers = _optimizers(model)
    before, rest = _everything(model, optimizers), adamw.param_groups[0]["params"]
    adam = torch.optim.AdamW([p for o in optimizers for g in o.param_groups for p in g["params"]], lr=1e-2)
    cases: list[tuple[Any, str]] = [
        (adam, "it is of 2 optimizers .Muon, AdamW., and 1 were given .AdamW."),
        ([muon], "of 2 optimizers"),
        (
            [muon, torch.optim.SGD(adamw.param_groups[0]["params"], lr=1.0)],
            "it is of AdamW, the optimizer is SGD",
        ),
        ([muon, torch.optim.AdamW(rest[1:])], "lacks 1 of its parameters"),
    ]
    for optimizer, message in cases:
        with pytest.raises(fs.CheckpointMismatchError, match=message):
            fs.load_checkpoint(f"{root}/step-3", model=model, optimizer=optimizer)
    assert_same(_everything(model, optimizers), before)
    with pytest.raises(ValueError, match="empty list"):
        fs.save_checkpoint(root, 9, model=model, optimizer=[])
    with pytest.raises(TypeError, match="list of them, got dict"):
        fs.save_checkpoint(root, 9, model=model, optimizer=[{}])  # type: ignore[list-item]


def _save_and_load(root: str, mesh: dict[str, int] | None) -> None:
    _save(root, mesh)
    torch.distributed.barrier()
    _load(root, mesh, exact=True)
    _mismatches(root, mesh)


def test_two_optimizers_at_any_number_of_ranks(tmp_path: Path) -> None:
    run_distributed(_save_and_load, 2, str(tmp_path), {})
    run_distributed(_load, 4, str(tmp_path), HSDP, exact=False)
    run_distributed(_load, 1, str(tmp_path), None, exact=False)


def test_one_optimizer_is_stored_as_ever(tmp_path: Path) -> None:
    """Alone or as a list of one: the same names."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for step, given in ((1, optimizer), (2, [optimizer])):
        fs.save_checkpoint(tmp_path, step, model=model, optimizer=given)
        manifest = json.loads((tmp_path / f"step-{step}" / "MANIFEST.json").read_text())
        assert manifest["optimizer_info"].keys() == {"class", "parameters", "groups", "values"}
        assert set(manifest["optimizer"]) == {
            f"{p}/{s}" for p in ("weight", "bias") for s in optimizer.state[model.bias]
        }
        fresh = torch.optim.AdamW(model.parameters())
        fs.load_checkpoint(tmp_path, model=model, optimizer=[fresh] if step == 1 else fresh)
        assert torch.equal(fresh.state[model.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
