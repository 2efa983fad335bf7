"""Optimizer state in tensor subclasses: bit by bit at the same shards, at others where the blocks allow."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp_sft as fs
from tests.harness.device import device_here, mesh_here
from tests.harness.eight_bit import ClosedMomentum, EightBitMomentum, Quantised, inner_state, own_of
from tests.harness.models import full
from tests.harness.ranks import run_distributed
from tests.harness.trained import assert_same

FITTING = [(16, 16), (16, 8), (1, 5)]  # the last has fewer rows than ranks, and no whole block
MIXED = [(7, 4)]  # of two shards one is made of whole blocks


class Weights(nn.Module):
    def __init__(self, shapes: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])


def _make(shapes: Any, mesh: Any, kind: str = "") -> tuple[Any, Any]:
    """A model and an optimizer, of torchao by its name or the harness's own."""
    model = Weights(shapes).to(device_here())
    if mesh is not None:
        fully_shard(model, mesh=mesh_here(**mesh))
    if kind:
        import torchao.optim

        return model, getattr(torchao.optim, kind)(model.parameters(), lr=1e-2)
    return model, EightBitMomentum(model.parameters())


def _train(model: Any, optimizer: Any, first: int, count: int) -> None:
    with torch.compiler.set_stance("force_eager"):  # torchao's would take a minute to be compiled
        for step in range(first, first + count):
            for weight in model.parameters():
                weight.grad = (weight.detach() * (1 + step / 7)).sin()
            optimizer.step()
            optimizer.zero_grad()


def _same(actual: Any, expected: Any) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


def _floats(optimizer: Any) -> list[torch.Tensor]:
    """The momentum, whole, as plain numbers."""
    found = []
    for parameter, state in optimizer.state.items():
        own = own_of(state["momentum"])
        own = own.values_as_floats() if isinstance(own, Quantised) else own
        if hasattr(parameter, "device_mesh"):
            mesh, placements = parameter.device_mesh, parameter.placements
            own = torch.distributed.tensor.DTensor.from_local(
                own, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        found.append(full(own).clone())
    return found


def _save(root: str, shapes: Any, mesh: Any, kind: str = "") -> list[torch.Tensor]:
    """Steps 1 and 2, and whether a run goes on from them as it would have; the momentum that they have."""
    model, optimizer = _make(shapes, mesh, kind)
    _train(model, optimizer, 0, 3)
    expected, floats = inner_state(optimizer), [] if kind else _floats(optimizer)
    fs.save_checkpoint(root, 1, model=model, optimizer=optimizer)
    saved = fs.save_checkpoint(root, 2, model=model, optimizer=optimizer, async_=True)
    _train(model, optimizer, 3, 2)
    saved.wait()
    for step, trained in ((1, 0), (2, 0), (2, 1)):
        assert fs.verify_checkpoint(f"{root}/step-{step}") == []
        again, fresh = _make(shapes, mesh, kind)
        _train(again, fresh, 0, trained)
        fs.load_checkpoint(f"{root}/step-{step}", model=again, optimizer=fresh)
        _same(inner_state(fresh), expected)
        _train(again, fresh, 3, 2)
        _same(inner_state(fresh), inner_state(optimizer))
        for a, b in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(own_of(a), own_of(b))
    return floats


def _load_elsewhere(root: str, shapes: Any, mesh: Any, expected: list[torch.Tensor]) -> None:
    model, optimizer = _make(shapes, mesh)
    fs.load_checkpoint(f"{root}/step-2", model=model, optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(_floats(optimizer), expected, strict=True))
    _train(model, optimizer, 3, 1)


def _refused(root: str, shapes: Any, mesh: Any, words: str) -> None:
    model, optimizer = _make(shapes, mesh)
    before = [own_of(p).clone() for p in model.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        if "imported" in words:
            patch.setattr("fsdp_sft.dcp_io.optimizers._imported", dict)
        with pytest.raises(fs.CheckpointMismatchError, match=words):
            fs.load_checkpoint(f"{root}/step-2", model=model, optimizer=optimizer)
    assert not optimizer.state
    assert all(torch.equal(a, own_of(b)) for a, b in zip(before, model.parameters(), strict=True))


def test_eight_bit_state_on_the_same_shards_and_no_others(tmp_path: Path) -> None:
    root, mixed, another = str(tmp_path), str(tmp_path / "mixed"), "this rank has another shard: load it on"
    (floats, _) = run_distributed(_save, 2, root, FITTING, {})
    run_distributed(_load_elsewhere, 4, root, FITTING, {"dp_replicate": 2}, floats)
    run_distributed(_refused, 1, root, FITTING, None, another)
    run_distributed(_refused, 2, root, FITTING, {}, r"its class \S+Quantised is not imported")
    run_distributed(_save, 2, mixed, MIXED, {})
    run_distributed(_refused, 4, mixed, MIXED, {}, another)


def test_from_one_rank_and_from_replicas(tmp_path: Path) -> None:
    one, hsdp = str(tmp_path / "one"), str(tmp_path / "hsdp")
    floats = run_distributed(_save, 1, one, FITTING, None)[0]
    run_distributed(_load_elsewhere, 2, one, FITTING, {"dp_replicate": 2, "dp_shard": 1}, floats)
    floats = run_distributed(_save, 4, hsdp, FITTING, {"dp_replicate": 2})[0]
    run_distributed(_load_elsewhere, 2, hsdp, FITTING, {}, floats)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamWFp8", "AdamW4bit"])
def test_torchao(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao.optim")
    run_distributed(_save, 1, str(tmp_path), [(64, 128), (7,)], None, name)


def test_what_says_nothing_of_itself_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    model = Weights([(16, 16)])
    optimizer = ClosedMomentum(model.parameters())
    _train(model, optimizer, 0, 1)
    with pytest.raises(fs.UnstorableStateError, match="Closed, which does not say what is inside it"):
        fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)


@pytest.mark.parametrize("several", [False, True])
def test_a_parameter_with_a_slash_in_its_name(several: bool, tmp_path: Path) -> None:
    model = nn.ModuleDict({"a/b": nn.Linear(16, 16, bias=False), "c": nn.Linear(16, 16, bias=False)})
    groups = [[each.weight] for each in model.values()] if several else [[*model.parameters()]]
    optimizers = [EightBitMomentum(group) for group in groups]
    sum(each(torch.ones(2, 16)).sum() for each in model.values()).backward()
    for optimizer in optimizers:
        optimizer.step()
    fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizers)
    fresh = [EightBitMomentum(group) for group in groups]
    fs.load_checkpoint(tmp_path, model=model, optimizer=fresh)
    for one, other in zip(fresh, optimizers, strict=True):
        _same(inner_state(one), inner_state(other))
