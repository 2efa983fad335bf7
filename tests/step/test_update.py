"""The update against the plain loop: optimizers, scalers, norms over meshes; and steps that fail."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, ReduceLROnPlateau, SequentialLR
from transformers.optimization import Adafactor

import fsdp_sft as fs
from fsdp_sft._compat.fsdp import is_broken_off
from fsdp_sft.step.update import clip_gradients
from tests import plain
from tests.harness.models import (
    FLOAT32,
    full,
    largest_error,
    oracle_gradients,
    oracle_loss,
    ragged_batches,
    tiny_model,
)
from tests.harness.ranks import device_here, device_type, mesh_here, on_ranks, run_distributed
from tests.simulated.ranks import run_simulated


def _two(model: Any) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "layers" in name]
    rest = [p for name, p in named if not (p.ndim == 2 and "layers" in name)]
    return [torch.optim.SGD(matrices, lr=0.5, momentum=0.9), torch.optim.AdamW(rest, lr=1e-2)]


def _schedulers(optimizers: list[Any]) -> list[Any]:
    """A chain of one that falls, and one of two parts."""
    first, second = optimizers
    parts = [LambdaLR(second, lambda step, rate=rate: rate / (1 + step)) for rate in (1.0, 0.2)]
    falls = ChainedScheduler([LambdaLR(first, lambda step: 1 / (1 + step))])
    return [falls, SequentialLR(second, parts, milestones=[1])]


def _plain(model: Any, windows: list[list[Any]]) -> list[tuple[float, float]]:
    optimizers = _two(model)
    schedulers = _schedulers(optimizers)
    results = []
    for window in windows:
        results.append(plain.step(model, [plain.mean_loss(model, window)], optimizers, max_norm=0.5))
        for one in schedulers:
            one.step()
    return results


@pytest.mark.parametrize(
    ("ranks", "mesh_shape", "grad_sync"), [(2, {}, "last"), (4, {"dp_replicate": 2}, "each")]
)
@on_ranks()
def test_several_optimizers_step_as_in_the_plain_loop(ranks: int, mesh_shape: Any, grad_sync: str) -> None:
    windows = [ragged_batches(2 * ranks, seed=seed) for seed in range(3)]
    beside = tiny_model("llama")
    model = copy.deepcopy(beside)
    expected = _plain(beside, windows)
    fs.shard_model(model, mesh=mesh_here(**mesh_shape), mp_policy=FLOAT32)
    optimizers = _two(model)
    schedulers = _schedulers(optimizers)
    for window, (loss, norm) in zip(windows, expected, strict=True):
        result = fs.train_step(
            model,
            window[dist.get_rank() :: ranks],
            optimizers,
            scheduler=schedulers,
            max_grad_norm=0.5,
            grad_sync=grad_sync,
        )
        assert (result.loss, result.grad_norm) == (
            pytest.approx(loss, rel=1e-5),
            pytest.approx(norm, rel=1e-4),
        )
    actual = {name: full(p.detach()) for name, p in model.named_parameters()}
    # Adam divides by the size of gradients that float32 knows to seven digits
    assert largest_error(actual, {name: p.detach() for name, p in beside.named_parameters()}) <= 1e-4


def test_an_inf_in_one_of_them_skips_all() -> None:
    model, window = tiny_model("llama"), ragged_batches(2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = _two(model)
    schedulers = _schedulers(optimizers)
    scaler = torch.amp.GradScaler(device_type(), init_scale=8.0)
    handle = model.model.layers[0].self_attn.q_proj.weight.register_hook(
        lambda gradient: gradient * torch.inf
    )
    result = fs.train_step(model, window, optimizers, scheduler=schedulers, scaler=scaler)
    assert (result.skipped, result.skip_reason, scaler.get_scale()) == (True, "inf gradients", 4.0)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters()), "AdamW had no inf"
    assert schedulers[0].state_dict()["_schedulers"][0]["last_epoch"] == schedulers[1].last_epoch == 0
    handle.remove()
    assert not fs.train_step(model, window, optimizers, scheduler=schedulers, scaler=scaler).skipped
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_gradients_that_overflow_only_in_their_norm_are_no_silent_step() -> None:
    """Finite ones whose squares are not: clipping would multiply them by zero."""
    model, window = tiny_model("llama"), ragged_batches(2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.lm_head.weight.register_hook(lambda gradient: torch.full_like(gradient, 1e36))
    scaler = torch.amp.GradScaler(device_type(), init_scale=1.0)
    with pytest.raises(fs.NonFiniteGradientError, match="the gradient norm is inf"):
        fs.train_step(model, window, torch.optim.SGD(model.parameters(), lr=1.0), scaler=scaler)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_what_could_not_be_stepped_is_refused_before_anything_changes() -> None:
    model, window = tiny_model("llama"), ragged_batches(2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for message, kind, options in (
        ("empty list", ValueError, {"optimizer": []}),
        ("must be an optimizer", TypeError, {"optimizer": [sgd, "adamw"]}),
        ("takes a metric", TypeError, {"optimizer": sgd, "scheduler": ReduceLROnPlateau(sgd)}),
        ("function has none", TypeError, {"optimizer": sgd, "scheduler": lambda step: 1.0}),
        (
            "an optimizer that train_step was not given",
            fs.OptimizerError,
            {
                "optimizer": sgd,
                "scheduler": [LambdaLR(torch.optim.SGD(model.parameters(), lr=1.0), lambda _: 1.0)],
            },
        ),
    ):
        with pytest.raises(kind, match=message):
            fs.train_step(model, window, **options)
        assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters()), message


@on_ranks(2)
def test_an_optimizer_made_before_sharding_or_over_gathered_parameters_is_refused() -> None:
    model = tiny_model("qwen2-tied")
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    fs.shard_model(model, mesh=mesh_here())
    before = {name: full(p).clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model(input_ids=torch.tensor([[3, 4]]))  # the root's parameters stay gathered
    stale = torch.optim.SGD(model.parameters(), lr=0.1)
    for optimizer in (early, stale):
        with pytest.raises(
            fs.OptimizerError, match=r"none of the model's parameters.*model\.embed_tokens\.weight"
        ):
            fs.train_step(model, ragged_batches(2), optimizer)
    assert all(torch.equal(full(p), before[name]) for name, p in model.named_parameters())
    beside = torch.nn.Linear(2, 2)  # the caller's own, which the model does not have
    whole = torch.optim.SGD([*model.parameters(), *beside.parameters()], lr=0.1)
    assert not fs.train_step(model, ragged_batches(2), whole).skipped


@on_ranks(2)
def test_updates_that_bfloat16_loses_are_warned_of_once() -> None:
    batch = ragged_batches(2)[0]
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here(), master_dtype=torch.bfloat16)
    wide = fs.shard_model(tiny_model("llama"), mesh=mesh_here())
    for trained, make, expected in (
        (model, torch.optim.AdamW, 1),
        (model, torch.optim.SGD, 1),
        (model, fs.StochasticAdamW, 0),
        (wide, torch.optim.AdamW, 0),
    ):
        optimizer = make(trained.parameters(), lr=1e-3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                fs.train_step(trained, [batch], optimizer)
        told = [str(w.message) for w in caught if "rounds them to the nearest" in str(w.message)]
        assert len(told) == (expected if dist.get_rank() == 0 else 0), make


# By options; of the latter torch 2.13 lacks operations for shards, and later versions may have them.
PLAIN = ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam")
LACKING: dict[str, Any] = {"Adafactor": {}, "Rprop": {}, "SGD": {"fused": True}, "Adagrad": {"fused": True}}


@pytest.mark.parametrize(
    ("kinds", "match"),
    [
        ([Adafactor], "Adafactor cannot step sharded parameters"),
        ([torch.optim.SGD, torch.optim.AdamW], "parameters are held more than once"),
    ],
)
@on_ranks(2)
def test_what_would_step_otherwise_is_refused(kinds: list[Any], match: str) -> None:
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here())
    with pytest.raises(fs.OptimizerError, match=match):
        fs.train_step(model, ragged_batches(1), [kind(model.parameters()) for kind in kinds])


@on_ranks(2)
def test_optimizers_of_torch_step_as_in_the_plain_loop_or_are_refused() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    window, beside = ragged_batches(2 * ranks), tiny_model("llama")
    _, gradients = oracle_gradients(beside, window)
    for name, options in [*((name, {}) for name in PLAIN), *LACKING.items()]:
        expected = copy.deepcopy(beside)
        for key, parameter in expected.named_parameters():
            parameter.grad = gradients[key]
        model = fs.shard_model(copy.deepcopy(beside), mesh=mesh_here(), mp_policy=FLOAT32)
        make: Any = getattr(torch.optim, name)
        refused = ""
        try:
            fs.train_step(
                model, window[rank::ranks], make(model.parameters(), lr=1e-3, **options), max_grad_norm=None
            )
            make(expected.parameters(), lr=1e-3).step()
        except fs.OptimizerError as error:
            refused = str(error)
        assert not refused or (LACKING.get(name) == options and f"{name} cannot step" in refused)
        assert all(p.grad is None for p in model.parameters()), name
        actual = {key: full(p.detach()) for key, p in model.named_parameters()}
        assert largest_error(actual, {key: p.detach() for key, p in expected.named_parameters()}) < 1e-3, name


# --- a GradScaler with parameters that are kept on the host, on devices whose copies are slow ---------------


def _trained(device: str, scaled_before: bool) -> tuple[list[float], list[float], dict[str, Any]]:
    """(losses, norms, parameters) of two steps in float16, the scaler made by whichever way."""
    model = fs.shard_model(
        tiny_model("llama"),
        mesh=fs.build_mesh(device_type=device),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=device != "cpu"),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    if scaled_before:
        scaler.scale(torch.ones((), device=device))
    rank = torch.distributed.get_rank()
    windows = [ragged_batches(2, seed=2 * step + rank) for step in range(2)]
    results = [fs.train_step(model, window, optimizer, scaler=scaler) for window in windows]
    assert not any(result.skipped for result in results)
    assert scaler.get_scale() == 1024.0
    shards = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}
    return [r.loss for r in results], [r.grad_norm for r in results], shards


def _both_ways(device: str) -> list[Any]:
    return [_trained(device, scaled_before) for scaled_before in (False, True)]


def test_gradients_on_the_host_are_divided_by_the_scale() -> None:
    on_devices = run_simulated(_both_ways, 2, "sim", copy_delay=0.003)
    on_cpus = run_distributed(_both_ways, 2, "cpu")
    # Devices multiply float16 into float32, CPUs do not.
    for of_rank, expected_of_rank in zip(on_devices, on_cpus, strict=True):
        for found, expected in zip(of_rank, expected_of_rank, strict=True):
            assert found[:2] == (pytest.approx(expected[0], rel=1e-3), pytest.approx(expected[1], rel=1e-2))
            torch.testing.assert_close(found[2], expected[2], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("what", ["an optimizer that fails", "an optimizer of frozen parameters"])
def test_the_scaler_goes_on_after(what: str) -> None:
    model, plain = tiny_model("llama"), tiny_model("llama")
    batches, scaler = ragged_batches(2), torch.amp.GradScaler("cpu", init_scale=256.0)
    first = list(model.model.layers[0].parameters())
    rest = [p for p in model.parameters() if not any(p is other for other in first)]
    optimizers = [torch.optim.SGD(first, lr=0.0), torch.optim.SGD(rest, lr=0.0)]
    if what == "an optimizer that fails":
        failing = mock.patch.object(optimizers[0], "step", side_effect=torch.OutOfMemoryError)
        with failing, pytest.raises(torch.OutOfMemoryError):
            fs.train_step(model, batches, optimizers, scaler=scaler)
    else:
        for each in (model, plain):
            each.model.layers[0].requires_grad_(False)
    expected = fs.train_step(plain, batches, torch.optim.SGD(plain.parameters(), lr=0.0)).grad_norm
    for _ in range(2):
        result = fs.train_step(model, batches, optimizers, scaler=scaler)
        assert (result.skipped, result.grad_norm) == (False, pytest.approx(expected, rel=1e-5))


# --- gradients on several meshes, or on none, as models that transformers shards have them -----------------


@on_ranks(4)
def test_the_norm_over_several_meshes_is_that_of_the_whole() -> None:
    rows = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("a", "b"))
    layouts = [
        (rows, [Shard(0), Shard(1)]),
        (rows["a"], [Shard(0)]),
        (rows["b"], [Replicate()]),
        (init_device_mesh(device_type(), (4,)), [Shard(0)]),
    ]
    for max_norm in (None, 0.5, 1e9):
        torch.manual_seed(0)
        whole = torch.nn.ParameterList(torch.randn(6, 5) for _ in range(6))
        sharded = torch.nn.ParameterList()
        for index, parameter in enumerate(whole):
            parameter.grad = torch.randn(6, 5)
            value, gradient = (x.detach().clone().to(device_here()) for x in (parameter, parameter.grad))
            if index < len(layouts):
                value, gradient = (distribute_tensor(x, *layouts[index]) for x in (value, gradient))
            sharded.append(torch.nn.Parameter(value))
            sharded[-1].grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e12 if max_norm is None else max_norm)
        assert float(clip_gradients(sharded, max_norm)) == pytest.approx(float(norm), rel=1e-6)
        torch.testing.assert_close([full(p.grad) for p in sharded], [p.grad for p in whole])


def test_the_norm_of_many_elements_on_the_host_is_exact() -> None:
    parameter = torch.nn.Parameter(torch.empty(3_000_000))  # on the host, where torch's own is 3e-5 off
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    exact = float(parameter.grad.double().norm())
    assert float(clip_gradients(torch.nn.ParameterList([parameter]), None)) == pytest.approx(exact, rel=1e-6)


# --- a step that fails leaves nothing for the next one: no gradient, nothing gathered, no count ----------


@contextmanager
def _failing(model: Any, kind: str, call: int) -> Iterator[None]:
    """The middle block raises in that forward, or that backward of its output, within the block."""
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise torch.OutOfMemoryError

    def hook(_: Any, __: Any, output: torch.Tensor) -> None:
        fail() if kind == "forward" else output.register_hook(fail)

    with model.model.layers[1].mlp.register_forward_hook(hook):
        yield


FAILURES = ("forward", "backward")
MODES = ("each", "last", "reduce_scatter")


def _check_after_a_failure(mesh: Any, grad_sync: Any, policy: MixedPrecisionPolicy = FLOAT32) -> None:
    for name in FAILURES:
        for call in (1, 2):
            model = tiny_model("llama").to(device_here())
            beside = copy.deepcopy(model).cpu()
            if mesh is not None:
                fs.shard_model(model, mesh=mesh, mp_policy=policy)
            rank, ranks = (mesh.get_rank(), mesh.size()) if mesh is not None else (0, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            batches, lost = (ragged_batches(3 * ranks, seed=seed) for seed in (1, 9))
            fs.train_step(model, batches[rank::ranks], torch.optim.SGD(model.parameters(), lr=0.0))
            with _failing(model, name, call), pytest.raises(torch.OutOfMemoryError):
                fs.train_step(model, lost[rank::ranks], optimizer, grad_sync=grad_sync)
            assert all(parameter.grad is None for parameter in model.parameters())
            assert not is_broken_off(model), "for a loop of the caller's own that goes on"
            before = {key: full(p).clone() for key, p in model.named_parameters()}
            result = fs.train_step(
                model, batches[rank::ranks], optimizer, grad_sync=grad_sync, max_grad_norm=None
            )
            moved = {key: before[key] - full(p) for key, p in model.named_parameters()}
            loss, expected = oracle_gradients(beside, batches)
            assert (result.loss, result.skipped) == (pytest.approx(loss, rel=1e-5), False)
            assert largest_error(moved, expected) < 1e-5, (name, call)


@pytest.mark.parametrize("grad_sync", MODES)
def test_the_step_after_one_that_failed_is_like_any_other(grad_sync: str) -> None:
    _check_after_a_failure(None, grad_sync)


# With another dtype to reduce in, FSDP2 keeps gradients that wait in another place.
WIDER = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    ("ranks", "replicas", "modes"),
    [
        (2, 1, [("each", FLOAT32), ("last", WIDER)]),
        (2, 1, [("last", FLOAT32)]),
        (4, 2, [("reduce_scatter", FLOAT32)]),
    ],
)
@on_ranks()
def test_the_same_on_several_ranks(ranks: int, replicas: int, modes: list[Any]) -> None:
    for grad_sync, policy in modes:
        _check_after_a_failure(mesh_here(dp_replicate=replicas), grad_sync, policy)


@pytest.mark.parametrize("how", ["by an exception", "without one"])
@on_ranks(2)
def test_a_window_that_was_given_up_leaves_nothing(how: str) -> None:
    """A loop of the caller's own gives a window up; the next step is like the first of all."""
    model, beside = tiny_model("llama"), tiny_model("llama").to(device_here())
    fs.shard_model(model, mesh=mesh_here(), mp_policy=FLOAT32)
    batches = ragged_batches(4)
    window, targets = batches[dist.get_rank() :: 2], fs.count_targets(batches[dist.get_rank() :: 2])
    raised = pytest.raises(KeyError) if how == "by an exception" else nullcontext()
    with raised, fs.gradient_sync(model, "none"):
        fs.causal_lm_loss(model, window[0], num_targets=targets).backward()
        if how == "by an exception":
            raise KeyError("the caller's")
    model.zero_grad()
    result = fs.train_step(model, window, torch.optim.SGD(model.parameters(), lr=0.0), max_grad_norm=None)
    oracle = oracle_loss(beside, [{k: v.to(device_here()) for k, v in b.items()} for b in batches])
    assert result.grad_norm == pytest.approx(plain.step(beside, [oracle], [])[1], rel=1e-5)


@on_ranks(2)
def test_a_model_can_be_saved_and_trained_after_a_failed_evaluation(tmp_path: Path) -> None:
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here(), mp_policy=FLOAT32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    window = ragged_batches(4)[dist.get_rank() :: 2]
    before = fs.train_step(model, window, optimizer).grad_norm
    ids = window[0]["input_ids"].to(device_here())
    for step, call in enumerate((lambda: fs.evaluate(model, window), lambda: model(input_ids=ids))):
        with _failing(model, "forward", 1), pytest.raises(torch.OutOfMemoryError):
            call()
        fs.save_checkpoint(tmp_path, step, model=model, optimizer=optimizer)
        assert fs.train_step(model, window, optimizer).grad_norm == pytest.approx(before, rel=1e-6)
