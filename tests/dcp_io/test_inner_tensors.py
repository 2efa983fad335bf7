"""Optimizer state in tensor subclasses: bit by bit at the same shards, at others where the blocks allow."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fsdp_sft as fs
from tests.harness.models import full
from tests.harness.ranks import device_here, mesh_here, run_distributed
from tests.harness.trained import assert_same

optim = pytest.importorskip("torchao.optim")

# What torchao keeps in 8 bits: shards of 4096 numbers or more, in whole blocks of 256.
FITTING = [(64, 256), (32, 512), (1, 5)]  # the last has fewer rows than ranks, and no whole block
MIXED = [(7, 1088)]  # of two shards one is made of whole blocks


class Closed(torch.Tensor):
    """A tensor that does not say what is inside it."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


class Weights(nn.Module):
    def __init__(self, shapes: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])


def _make(shapes: Any, mesh: Any, kind: str = "AdamW8bit") -> tuple[Any, Any]:
    """A model and an optimizer of torchao by its name."""
    model = Weights(shapes).to(device_here())
    if mesh is not None:
        fully_shard(model, mesh=mesh_here(**mesh))
    return model, getattr(optim, kind)(model.parameters(), lr=1e-2)


def _own_of(tensor: torch.Tensor) -> Any:
    """What this rank has of a tensor: the very object."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _inner_state(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """This rank's state as plain tensors, what is inside subclasses in their place."""
    found: dict[int, dict[str, Any]] = {}
    for number, state in enumerate(optimizer.state.values()):
        plain = found.setdefault(number, {})
        for name, value in state.items():
            local = _own_of(value)
            if hasattr(local, "dequantize") and type(local) is not torch.Tensor:
                names, context = local.__tensor_flatten__()
                plain |= {f"{name}/{inner}": getattr(local, inner).clone() for inner in names}
                plain[f"{name}/context"] = type(local).__name__, context, local.shape, local.dtype
            else:
                plain[name] = local.detach().clone()
    return found


def _train(model: Any, optimizer: Any, first: int, count: int) -> None:
    with torch.compiler.set_stance("force_eager"):  # torchao's would take a minute to be compiled
        for step in range(first, first + count):
            for weight in model.parameters():
                weight.grad = (weight.detach() * (1 + step / 7)).sin()
            optimizer.step()
            optimizer.zero_grad()


def _floats(optimizer: Any) -> list[torch.Tensor]:
    """The first moments, whole, as plain numbers."""
    found = []
    for parameter, state in optimizer.state.items():
        own = _own_of(state["exp_avg"])
        own = own if type(own) is torch.Tensor else own.dequantize()
        if isinstance(parameter, DTensor):
            own = DTensor.from_local(
                own,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        found.append(full(own).clone())
    return found


def _save(root: str, shapes: Any, mesh: Any, kind: str = "AdamW8bit") -> list[torch.Tensor]:
    """Steps 1 and 2, and whether a run goes on from them as it would have; the moments that they have."""
    model, optimizer = _make(shapes, mesh, kind)
    _train(model, optimizer, 0, 3)
    expected, floats = _inner_state(optimizer), _floats(optimizer)
    fs.save_checkpoint(root, 1, model=model, optimizer=optimizer)
    saved = fs.save_checkpoint(root, 2, model=model, optimizer=optimizer, async_=True)
    _train(model, optimizer, 3, 2)
    saved.wait()
    for step, trained in ((1, 0), (2, 0), (2, 1)):
        assert fs.verify_checkpoint(f"{root}/step-{step}") == []
        again, fresh = _make(shapes, mesh, kind)
        _train(again, fresh, 0, trained)
        fs.load_checkpoint(f"{root}/step-{step}", model=again, optimizer=fresh)
        assert_same(_inner_state(fresh), expected)
        _train(again, fresh, 3, 2)
        assert_same(_inner_state(fresh), _inner_state(optimizer))
        for a, b in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(_own_of(a), _own_of(b))
    return floats


def _load_elsewhere(root: str, shapes: Any, mesh: Any, expected: list[torch.Tensor]) -> None:
    model, optimizer = _make(shapes, mesh)
    fs.load_checkpoint(f"{root}/step-2", model=model, optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(_floats(optimizer), expected, strict=True))
    _train(model, optimizer, 3, 1)


def _refused(root: str, shapes: Any, mesh: Any, words: str) -> None:
    model, optimizer = _make(shapes, mesh)
    before = [_own_of(p).clone() for p in model.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        if "imported" in words:
            patch.setattr("fsdp_sft.dcp_io.optimizers._imported", dict)
        with pytest.raises(fs.CheckpointMismatchError, match=words):
            fs.load_checkpoint(f"{root}/step-2", model=model, optimizer=optimizer)
    assert not optimizer.state
    assert all(torch.equal(a, _own_of(b)) for a, b in zip(before, model.parameters(), strict=True))


def test_eight_bit_state_on_the_same_shards_and_no_others(tmp_path: Path) -> None:
    root, mixed, another = str(tmp_path), str(tmp_path / "mixed"), "this rank has another shard: load it on"
    (floats, _) = run_distributed(_save, 2, root, FITTING, {})
    assert len(floats) == len(FITTING)
    run_distributed(_load_elsewhere, 4, root, FITTING, {"dp_replicate": 2}, floats)
    run_distributed(_refused, 1, root, FITTING, None, another)
    run_distributed(_refused, 2, root, FITTING, {}, r"its class \S+OptimState8bit is not imported")
    run_distributed(_save, 2, mixed, MIXED, {})
    run_distributed(_refused, 4, mixed, MIXED, {}, another)


@pytest.mark.parametrize(
    ("ranks", "mesh", "others"),
    [(1, None, {"dp_replicate": 2, "dp_shard": 1}), (4, {"dp_replicate": 2}, {})],
    ids=["one rank", "replicas"],
)
def test_from_one_rank_and_from_replicas(ranks: int, mesh: Any, others: Any, tmp_path: Path) -> None:
    floats = run_distributed(_save, ranks, str(tmp_path), FITTING, mesh)[0]
    assert len(floats) == len(FITTING)
    run_distributed(_load_elsewhere, 2, str(tmp_path), FITTING, others, floats)


@pytest.mark.parametrize("name", ["AdamWFp8", "AdamW4bit"])
def test_other_optimizers_of_torchao(name: str, tmp_path: Path) -> None:
    assert all(
        moments.any()
        for moments in run_distributed(_save, 1, str(tmp_path), [(64, 128), (7,)], None, name)[0]
    )


def test_what_says_nothing_of_itself_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    model = Weights([(16, 16)])
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weights[0]] = {"momentum_buffer": Closed(torch.zeros(16, 16))}
    with pytest.raises(fs.UnstorableStateError, match="Closed, which does not say what is inside it"):
        fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)


@pytest.mark.parametrize("several", [False, True])
def test_a_parameter_with_a_slash_in_its_name(several: bool, tmp_path: Path) -> None:
    model = nn.ModuleDict({"a/b": nn.Linear(64, 64, bias=False), "c": nn.Linear(64, 64, bias=False)})
    groups = [[each.weight] for each in model.values()] if several else [[*model.parameters()]]
    optimizers, fresh = ([optim.AdamW8bit(group) for group in groups] for _ in range(2))
    for optimizer in optimizers:
        _train(model, optimizer, 0, 1)
    fs.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizers)
    fs.load_checkpoint(tmp_path, model=model, optimizer=fresh)
    for one, other in zip(fresh, optimizers, strict=True):
        assert_same(_inner_state(one), _inner_state(other))
