"""StochasticAdamW beside torch's AdamW in float32, and its rounding beside exact arithmetic."""

import copy
import math
import struct
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

import fsdp_sft as fs
from fsdp_sft._tensors.boxes import Box, box_at, cuts_of, whole
from fsdp_sft.optimizer import adamw
from fsdp_sft.optimizer.adamw import key_of, numbers_in_whole, random_bits, round_into, sixteen_of
from tests.harness.composed import composed
from tests.harness.hf_folders import save_tiny
from tests.harness.models import full, ragged_batches, tiny_model
from tests.harness.ranks import device_here, device_type, mesh_here, on_ranks, run_distributed
from tests.harness.trained import assert_same

BF16 = torch.bfloat16


def _parameters(shapes: Any, dtypes: Any, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def _gradients(parameters: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def _steps(optimizer: Any, parameters: Any, *steps: int) -> None:
    for step in steps:
        _gradients(parameters, step)
        optimizer.step()


def _neighbours(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of bfloat16 at or below, and at or above: torch rounds to the nearest one."""
    near = exact.to(BF16)
    other = torch.nextafter(near, torch.where(near.float() < exact, math.inf, -math.inf).to(BF16))
    other = torch.where(near.float() == exact, near, other)
    return torch.minimum(near, other), torch.maximum(near, other)


# --- one process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_parameters_are_stepped_as_torch_does(dtype: torch.dtype) -> None:
    shapes = [(40, 30), (7,), (), (0, 4), (adamw.CHUNK + 3,)]
    mine, theirs = (_parameters(shapes, [dtype] * 5) for _ in range(2))
    options: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    groups = [[{"params": own[:2]}, {"params": own[2:], "lr": 1e-3}] for own in (mine, theirs)]
    ours = fs.StochasticAdamW(groups[0], 1e-2, **options)
    torchs = torch.optim.AdamW(groups[1], 1e-2, **options, foreach=False)
    _steps(ours, mine, *range(4))
    _steps(torchs, theirs, *range(4))
    for a, b in zip(mine, theirs, strict=True):
        assert_same({**ours.state[a], "parameter": a}, {**torchs.state[b], "parameter": b})


@pytest.mark.parametrize("state_dtype", [None, torch.float32])
def test_each_step_ends_at_a_neighbour_of_the_exact_result(state_dtype: Any) -> None:
    (parameter,) = _parameters([(300, 40)], [BF16])
    ours = fs.StochasticAdamW([parameter], lr=1e-3, weight_decay=0.1, state_dtype=state_dtype)
    for step in range(4):
        exact = nn.Parameter(parameter.detach().float())
        torchs = torch.optim.AdamW([exact], lr=1e-3, weight_decay=0.1, foreach=False)
        torchs.state[exact] = {n: v.float().clone() for n, v in ours.state[parameter].items()}
        _gradients([parameter], step)
        exact.grad = parameter.grad.float()
        ours.step()
        torchs.step()
        pairs = {"parameter": (parameter, exact)}
        pairs |= {n: (ours.state[parameter][n], torchs.state[exact][n]) for n in ("exp_avg", "exp_avg_sq")}
        for name, (found, wanted) in pairs.items():
            if found.dtype is torch.float32:
                assert torch.equal(found, wanted)
                continue
            low, high = _neighbours(wanted.detach())
            assert bool(((found == low) | (found == high)).all()), name
            farther = (found != wanted.detach().to(BF16))[low != high]
            assert 0.1 < float(farther.float().mean()) < 0.4, "1 in 4 goes to the farther one"
        assert ours.state[parameter]["exp_avg"].dtype == (state_dtype or BF16)


def test_rounding_depends_on_seed_step_and_place_alone() -> None:
    def run(seed: int, extra: bool = False) -> list[torch.Tensor]:
        own = _parameters([(50, 20)] * 2, [BF16] * 2)
        own[1].data.copy_(own[0].data)
        optimizer = fs.StochasticAdamW(own, lr=1e-3, seed=seed)
        for step in range(2):
            torch.manual_seed(step + 10 * extra)  # of no account
            _gradients(own, step)
            own[1].grad = own[0].grad.clone()
            optimizer.step()
        return [p.detach() for p in own]

    first = run(3)
    before = torch.get_rng_state()
    other = _parameters([(9, 9)], [BF16])
    _steps(fs.StochasticAdamW(other), other, 0)
    assert torch.equal(torch.get_rng_state(), before), "no generator moves"
    assert all(map(torch.equal, first, run(3, extra=True)))
    assert not torch.equal(first[0], first[1]), "another place in the optimizer"
    assert not torch.equal(first[0], run(4)[0])


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("how", ["transposed in memory", "in parts"])
def test_a_layout_and_parts_do_not_matter(how: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    results = []
    for is_other in (False, True):
        own = _parameters([(33, 17), (5,)], [dtype] * 2)
        if is_other and how == "in parts":
            monkeypatch.setattr("fsdp_sft.optimizer.adamw.CHUNK", 64)
        elif is_other:
            own[0] = nn.Parameter(own[0].detach().t().contiguous().t())
        optimizer = fs.StochasticAdamW(own, lr=1e-2)
        _steps(optimizer, own, 0, 1, 2)
        results.append([*own, *(optimizer.state[p]["exp_avg_sq"] for p in own)])
    assert all(map(torch.equal, *results))


def test_a_state_dict_goes_on_as_the_original() -> None:
    for state_dtype in (None, torch.float32, BF16):
        own = _parameters([(20, 10), (6,)], [BF16, torch.float32])
        optimizer = fs.StochasticAdamW(own, lr=torch.tensor(1e-2), seed=7, state_dtype=state_dtype)
        _steps(optimizer, own, 0, 1)
        others, state = copy.deepcopy((own, optimizer.state_dict()))
        _steps(optimizer, own, 2)
        loaded = fs.StochasticAdamW(others, lr=1.0)
        loaded.load_state_dict(state)
        _steps(loaded, others, 2)
        for a, b in zip(others, own, strict=True):
            assert_same({**loaded.state[a], "parameter": a}, {**optimizer.state[b], "parameter": b})


def test_the_state_of_torchs_adamw_is_taken() -> None:
    own = _parameters([(20, 10)], [torch.float32])
    theirs = torch.optim.AdamW(own, lr=1e-2)
    _steps(theirs, own, 0)
    ours = fs.StochasticAdamW(own, lr=1.0, seed=3)
    ours.load_state_dict(theirs.state_dict())
    assert [ours.param_groups[0][name] for name in ("lr", "seed")] == [1e-2, 3]
    ours.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "learning rate"),
        ({"lr": math.nan}, "learning rate"),
        ({"lr": torch.ones(2)}, "1-element"),
        ({"eps": -1e-8}, "epsilon"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"betas": (0.9, 1.0)}, "beta parameter"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    parameters = _parameters([(3,)], [BF16])
    for groups, given in ((parameters, options), ([{"params": parameters, **options}], {})):
        with pytest.raises(ValueError, match=message):
            fs.StochasticAdamW(groups, **given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64])
def test_other_dtypes_are_refused_once_they_are_stepped(dtype: torch.dtype) -> None:
    frozen, codes = (
        nn.Parameter(torch.zeros(3, dtype=each), requires_grad=False) for each in (dtype, torch.uint8)
    )
    (trained,) = _parameters([(3,)], [BF16])
    optimizer = fs.StochasticAdamW([frozen, codes, trained])
    _steps(optimizer, [trained], 0)
    assert list(optimizer.state) == [trained]
    frozen.requires_grad_(True)
    frozen.grad = torch.zeros_like(frozen)
    for refused in (optimizer, fs.StochasticAdamW([trained], state_dtype=dtype)):
        with pytest.raises(ValueError, match=f"got .*{dtype}.*: keep them in one of these"):
            refused.step()


# --- shards and replicas ----------------------------------------------------------------------------------

SHAPES = [(16, 6), (7, 10), (1, 5), (3,), (12, 4, 2)]
DTYPES = [BF16, BF16, BF16, BF16, torch.float32]


def _of_parts(mesh_shape: dict[str, int], dim: int) -> list[torch.Tensor]:
    """The same gradients, cut: parameters after three steps, whole."""
    mesh = mesh_here(**mesh_shape)

    def cut(tensor: torch.Tensor) -> DTensor:
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(min(dim, tensor.ndim - 1))]
        return distribute_tensor(tensor.detach().to(device_here()), mesh, placements)

    wholes = _parameters(SHAPES, DTYPES)
    own = [nn.Parameter(cut(parameter)) for parameter in wholes]
    optimizer = fs.StochasticAdamW(own, lr=1e-2, seed=5)
    for step in range(3):
        _gradients(wholes, step)
        for parameter, plain in zip(own, wholes, strict=True):
            parameter.grad = cut(plain.grad)
        optimizer.step()
    states = [optimizer.state[p][name] for p in own for name in ("exp_avg", "exp_avg_sq")]
    assert all(
        isinstance(s, DTensor) and s.placements == p.placements for s, p in zip(states[::2], own, strict=True)
    )
    return [full(t).clone() for t in (*own, *states)]


@pytest.mark.accelerator
def test_the_result_does_not_depend_on_how_a_parameter_is_cut() -> None:
    own = _parameters(SHAPES, DTYPES)
    optimizer = fs.StochasticAdamW(own, lr=1e-2, seed=5)
    _steps(optimizer, own, 0, 1, 2)
    expected = [*own, *(optimizer.state[p][name] for p in own for name in ("exp_avg", "exp_avg_sq"))]
    replicas = {"dp_replicate": 2}
    for ranks, mesh, dim in ((2, {}, 0), (2, {}, 1), (2, replicas, 0), (4, replicas, 0)):
        for found in run_distributed(_of_parts, ranks, mesh, dim):
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b.detach()), (ranks, mesh, dim)


def _model(root: Path, mesh: Any, **options: Any) -> tuple[Any, Any, Any]:
    model = composed(root / "base", mesh=mesh, master_dtype=BF16, **options)
    optimizer = fs.StochasticAdamW(model.parameters(), lr=1e-3, seed=11)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _windows(count: int, first: int = 0) -> list[Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return [ragged_batches(2 * ranks, seed=seed)[rank::ranks] for seed in range(first, first + count)]


def _own(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """What this rank has, in bytes."""
    found = [p.detach() for p in model.parameters()]
    found += [t for p in model.parameters() for _, t in sorted(optimizer.state[p].items())]
    return [(t.to_local() if isinstance(t, DTensor) else t).cpu().clone() for t in found]


def _save_and_go_on(root: Path, mesh_shape: dict[str, int], offload: bool) -> list[torch.Tensor]:
    fs.init_distributed(device_type=device_type())
    mesh = mesh_here(**mesh_shape)
    options = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    model, optimizer, scheduler = _model(root, mesh, **options)
    assert {p.dtype for p in model.parameters()} == {BF16}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for window in _windows(2):
            assert not fs.train_step(model, window, optimizer, scheduler=scheduler).skipped
    fs.save_checkpoint(
        root / "out", 2, model=model, optimizer=optimizer, train_state={"scheduler": scheduler.state_dict()}
    )
    again, fresh, schedule = _model(root, mesh, **options)
    loaded = fs.load_checkpoint(root / "out", model=again, optimizer=fresh)
    schedule.load_state_dict(loaded.train_state["scheduler"])
    assert all(map(torch.equal, _own(again, fresh), _own(model, optimizer)))
    for each, one, rate in ((model, optimizer, scheduler), (again, fresh, schedule)):
        for window in _windows(3, first=2):
            fs.train_step(each, window, one, scheduler=rate)
    assert all(map(torch.equal, _own(again, fresh), _own(model, optimizer)))
    assert all(s["exp_avg"].dtype is BF16 for s in fresh.state.values())
    return _own(again, fresh)


@pytest.mark.accelerator
@pytest.mark.parametrize("offload", [False, True])
def test_train_save_and_go_on_bit_for_bit(tmp_path: Path, offload: bool) -> None:
    save_tiny(tmp_path / "base", "llama")
    run_distributed(_save_and_go_on, 2, tmp_path, {}, offload)


@on_ranks(2)
def test_other_seeds_on_other_ranks_are_refused() -> None:
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here(), master_dtype=BF16)
    optimizer = fs.StochasticAdamW(model.parameters(), seed=dist.get_rank())
    with pytest.raises(fs.BatchError, match=r"seed=0 of group 0 .* and seed=1 of group 0"):
        fs.train_step(model, _windows(1)[0], optimizer)


# --- stochastic rounding beside exact arithmetic on Python's integers and fractions ------------------------

LARGEST = struct.unpack(">f", bytes.fromhex("7f7f0000"))[0]


def _rounded(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    target = torch.empty_like(values, dtype=torch.bfloat16)
    round_into(target, values.clone(), noise.to(torch.int32))
    return target


def _neighbours_of(value: float) -> tuple[float, float]:
    """What bfloat16 has next to a number, towards zero and away from it."""
    number = int.from_bytes(struct.pack(">f", value), "big") & 0xFFFF0000
    near, far = (struct.unpack(">f", n.to_bytes(4, "big"))[0] for n in (number, number + 0x10000))
    return near, (far if value != near else near)


def test_only_the_two_neighbours_and_each_as_often_as_it_is_near() -> None:
    torch.manual_seed(0)
    values = torch.cat(
        [torch.randn(40), torch.randn(20) * 1e-30, torch.randn(20) * 1e30, torch.tensor([1e-41])]
    )
    every = torch.arange(1 << 16)  # each noise that there is, once: the mean is exact
    for value in values.tolist():
        found = _rounded(torch.full((1 << 16,), value), every).double()
        assert set(found.tolist()) <= set(_neighbours_of(value))
        counts = {float(v): int((found == v).sum()) for v in found.unique()}
        assert sum(Fraction(v) * n for v, n in counts.items()) == Fraction(value) * (1 << 16), value


def test_what_bfloat16_has_stays_as_it_is() -> None:
    torch.manual_seed(0)
    codes = (torch.arange(1 << 16).to(torch.int32) << 16).view(torch.float32)  # all numbers of bfloat16
    for noise in (0, 1, 0xFFFF):
        found = _rounded(codes, torch.full((1 << 16,), noise))
        assert torch.equal(found.isnan(), codes.isnan())
        plain = codes[~codes.isnan()]
        assert torch.equal(found.float()[~codes.isnan()].view(torch.int32), plain.view(torch.int32))


@pytest.mark.parametrize("noise", [0, 1, 0x8000, 0xFFFF])
def test_what_is_not_finite_stays_so_and_what_is_finite_too(noise: int) -> None:
    patterns = ["7f800000", "ff800000", "7fc00000", "7fffffff", "ffffffff", "7f800001"]
    patterns += ["7f7fffff", "ff7fffff", "7f7f0001"]
    codes = [int.from_bytes(bytes.fromhex(pattern), "big", signed=True) for pattern in patterns]
    values = torch.tensor(codes, dtype=torch.int32).view(torch.float32)
    found = _rounded(values, torch.full((len(patterns),), noise)).tolist()
    assert found[:2] + found[6:] == [math.inf, -math.inf, LARGEST, -LARGEST, LARGEST]
    assert all(math.isnan(value) for value in found[2:6])


def test_the_bits_are_those_of_the_published_generator() -> None:
    """SplitMix64 on Python's integers."""

    def splitmix(state: int) -> int:
        z = state % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    assert splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the first output for seed 0, as published
    numbers = [0, 1, 2, 77, 2**31, 2**33 + 5, 2**40]
    for key in (0, 1, key_of(3, 4), 2**64 - 1):
        bits = random_bits(key, torch.tensor(numbers))
        expected = [splitmix(key + n * 0x9E3779B97F4A7C15) for n in numbers]
        assert [b % 2**64 for b in bits.tolist()] == expected
        for lane in range(4):
            assert sixteen_of(bits, lane).tolist() == [e >> 16 * lane & 0xFFFF for e in expected]


def test_keys_differ_by_number_and_order() -> None:
    keys = {key_of(a, b, c) for a in range(-2, 9) for b in range(9) for c in range(9)}
    assert len(keys) == 11 * 9 * 9
    assert 0 <= min(keys) <= max(keys) < 1 << 64


@pytest.mark.parametrize("shape", [(7,), (6, 5), (4, 6, 10), (2, 3, 4, 5), ()])
def test_numbers_are_those_of_the_whole_tensor(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    cuts = [[Replicate(), Replicate()]] + [[Replicate(), Shard(d)] for d in range(len(shape))]
    cuts += [[Shard(a), Shard(b)] for a in range(len(shape)) for b in range(len(shape))]
    for placements in cuts:
        for coordinate in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2)):
            box = box_at(shape, cuts_of(placements, (2, 3), len(shape)), (2, 3), coordinate)
            expected = numbers[box.slices].reshape(-1)
            for start, stop in ((0, box.numel), (1, box.numel - 1))[: 1 + (box.numel > 2)]:
                found = numbers_in_whole(box, shape, start, stop, torch.device("cpu"))
                assert torch.equal(found, expected[start:stop]), (placements, coordinate, start)
    assert numbers_in_whole(whole(shape), shape, 0, 1, torch.device("cpu")).tolist() == [0]


def test_numbers_beyond_32_bits() -> None:
    found = numbers_in_whole(Box((1 << 20, 3), (2, 5)), (1 << 21, 1 << 14), 4, 6, torch.device("cpu"))
    assert found.tolist() == [(1 << 34) + 7, (1 << 34) + (1 << 14) + 3]
