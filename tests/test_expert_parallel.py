"""Ranks that have experts of their own: models that transformers shards, beside one process."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import fsdp_sft as fs
from tests.harness.models import full, largest_error, oracle_gradients, ragged_batches
from tests.harness.native import load_native, needs_native_sharding, rows_of_rank, save_mixture
from tests.harness.ranks import run_distributed

# Each with 8 experts, so that 2 and 4 ranks have whole ones.
EIGHT = {
    "MixtralForCausalLM": {"num_local_experts": 8},
    "Qwen3MoeForCausalLM": {"num_experts": 8},
    "GptOssForCausalLM": {"num_local_experts": 8},
    "DeepseekV3ForCausalLM": {
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
}
EP2 = {"fsdp_size": 4, "ep_size": 2}
EP4 = {"fsdp_size": 4, "ep_size": 4}
FSDP = {"fsdp_size": 4}
HYBRID = {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2}


@pytest.fixture(scope="module", params=list(EIGHT))
def folder(request: Any, tmp_path_factory: Any) -> str:
    needs_native_sharding()
    return save_mixture(tmp_path_factory.mktemp("mixture"), request.param, **EIGHT[request.param])


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: Any) -> str:
    needs_native_sharding()
    name = "MixtralForCausalLM"
    return save_mixture(tmp_path_factory.mktemp("mixture"), name, **EIGHT[name])


def _expected(model: Any, batches: list[Any], max_norm: float) -> tuple[float, float, dict[str, Any]]:
    loss, gradients = oracle_gradients(model, batches)
    plain = copy.deepcopy(model)
    for name, parameter in plain.named_parameters():
        parameter.grad = gradients.get(name)
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm))
    return loss, norm, {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}


def _check_step(folder: str, options: dict[str, int], dtype: torch.dtype, prepare: str) -> None:
    """One step of SGD with rate 1, whose move is the clipped gradient."""
    batches = ragged_batches(9)[:8]
    model = load_native(folder, options, dtype=dtype)
    if "sac" in prepare:
        fs.apply_sac(model, 1)
    if "compile" in prepare:
        fs.compile_blocks(model, backend="aot_eager")
    before = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = fs.train_step(
        model,
        rows_of_rank(batches, options),
        optimizer,
        max_grad_norm=0.05,
        loss_impl="chunked" if "chunked" in prepare else "logits",
        grad_sync="last" if "last" in prepare else "each",
        router_loss="off",
    )
    exact = dtype == torch.float64
    loss, norm, gradients = _expected(load_native(folder, None, dtype=dtype), batches, 0.05)
    assert result.loss == pytest.approx(loss, rel=1e-12 if exact else 1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-12 if exact else 1e-5)
    assert norm > 0.05, "it is clipped"
    moved = {name: before[name] - full(p.detach()) for name, p in model.named_parameters()}
    unused = moved.keys() - gradients.keys()
    assert not any(moved.pop(name).any() for name in unused)
    assert largest_error(moved, gradients) <= (1e-12 if exact else 5e-5)


@pytest.mark.parametrize("options", [EP2, EP4], ids=["ep2", "ep4"])
def test_a_step_is_that_of_one_process(folder: str, options: dict[str, int]) -> None:
    run_distributed(_check_step, 4, folder, options, torch.float32, "sac chunked")


def test_in_float64_to_the_last_digits(mixtral: str) -> None:
    run_distributed(_check_step, 4, mixtral, EP2, torch.float64, "logits")


def test_with_replicas(mixtral: str) -> None:
    run_distributed(_check_step, 4, mixtral, HYBRID, torch.float32, "logits")


def _check_divided_twice(folder: str) -> None:
    model = load_native(folder, EP4, dtype=torch.float64)
    batches = rows_of_rank(ragged_batches(8), EP4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for attempt in (
        lambda: fs.train_step(model, batches, optimizer, router_loss="off"),
        lambda: fs.causal_lm_loss(model, batches[0], num_targets=4, router_loss="off"),
    ):
        with pytest.raises(fs.UnsupportedModelError, match="divided by the ranks twice"):
            attempt()
    # What it is about: the day this gradient is right, the refusal can go.
    loss = fs.scale_for_backward(fs.loss_sum(model, batches[0], router_loss="off")[0], num_targets=4)
    loss.backward()
    found = full(model.model.layers[0].mlp.experts.down_proj.grad)
    plain = load_native(folder, None, dtype=torch.float64)
    every = ragged_batches(8)[:4]
    sum(fs.loss_sum(plain, batch, router_loss="off")[0] / 4 for batch in every).backward()
    torch.testing.assert_close(found * 4, plain.model.layers[0].mlp.experts.down_proj.grad)


def test_gradients_that_torch_divides_twice_are_refused(mixtral: str) -> None:
    run_distributed(_check_divided_twice, 4, mixtral)


@pytest.mark.parametrize("prepare", ["sac last", pytest.param("compile sac", marks=pytest.mark.slow)])
def test_prepared_in_other_ways(mixtral: str, prepare: str) -> None:
    run_distributed(_check_step, 4, mixtral, EP2, torch.float32, prepare)


def _optimizer(model: Any) -> torch.optim.Optimizer:
    # Adam divides by how large a gradient is: rounding would count like a gradient where there is none.
    return torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-3)


def _window(step: int, options: dict[str, int] | None) -> list[Any]:
    batches = ragged_batches(9, seed=step)[:8]
    return batches if options is None else rows_of_rank(batches, options)


def _train(model: Any, optimizer: Any, steps: range, options: dict[str, int] | None) -> list[float]:
    losses = []
    for step in steps:
        window = _window(step, options)
        result = fs.train_step(model, window, optimizer, router_loss="micro_batch")
        losses.append(result.loss)
    return losses


def _tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint brings back, whole and on the host."""
    found = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = full(value).clone()
    return found


def _save_half_way(
    folder: str, root: str, steps: int, options: dict[str, int]
) -> tuple[list[float], Any, Any]:
    model = load_native(folder, options)
    fs.apply_sac(model, 1)
    optimizer = _optimizer(model)
    losses = _train(model, optimizer, range(steps // 2), options)
    fs.save_checkpoint(f"{root}/ckpt", steps // 2, model=model, optimizer=optimizer)
    half = _tensors(model, optimizer)
    losses += _train(model, optimizer, range(steps // 2, steps), options)
    fs.export_hf(model, f"{root}/hf", dtype=None)
    return losses, half, _tensors(model, optimizer)


def _resume(
    folder: str, root: str, steps: int, options: dict[str, int] | None
) -> tuple[Any, list[float], Any]:
    model = load_native(folder, options)
    optimizer = _optimizer(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fs.load_checkpoint(f"{root}/ckpt", model=model, optimizer=optimizer)
    half = _tensors(model, optimizer)
    losses = _train(model, optimizer, range(steps // 2, steps), options)
    return half, losses, _tensors(model, optimizer)


def _close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    weights = {name for name in expected if "/" not in name}
    return largest_error({n: found[n] for n in weights}, {n: expected[n] for n in weights}) <= 2e-4


@pytest.mark.parametrize(
    ("steps", "others"), [(4, [FSDP]), pytest.param(20, [FSDP, EP4], marks=pytest.mark.slow)]
)
def test_steps_resumed_otherwise_and_exported_are_those_of_one_process(
    mixtral: str, tmp_path: Path, steps: int, others: list[dict[str, int]]
) -> None:
    """From experts over 2 ranks, twice, to FSDP alone, to experts over 4 ranks, and to one process."""
    losses, half, last = run_distributed(_save_half_way, 4, mixtral, str(tmp_path), steps, EP2)[0]
    plain = load_native(mixtral, None)
    optimizer = _optimizer(plain)
    expected = _train(plain, optimizer, range(steps), None)
    assert losses == pytest.approx(expected, rel=2e-5)
    assert losses[-1] < losses[0]
    assert _close(last, _tensors(plain, optimizer))
    continued = [run_distributed(_resume, 4, mixtral, str(tmp_path), steps, other)[0] for other in others]
    continued.append(_resume(mixtral, str(tmp_path), steps, None))
    for loaded, resumed, final in continued:
        assert loaded.keys() == half.keys()
        assert all(torch.equal(loaded[name], half[name]) for name in half)
        assert resumed == pytest.approx(expected[steps // 2 :], rel=2e-5)
        assert _close(final, last)
    _check_export(tmp_path / "hf", Path(mixtral), last)


def _check_export(made: Path, original: Path, expected: dict[str, torch.Tensor]) -> None:
    """The original's names and shapes, and plain transformers reads what was trained."""
    files = [[load_file(file) for file in folder.glob("*.safetensors")] for folder in (made, original)]
    shapes = [{name: t.shape for tensors in loaded for name, t in tensors.items()} for loaded in files]
    assert shapes[0] == shapes[1]
    assert "model.layers.0.block_sparse_moe.experts.7.w1.weight" in shapes[0]
    read = load_native(str(made), None)
    assert all(torch.equal(p.detach(), expected[name]) for name, p in read.named_parameters())
    assert json.loads((made / "config.json").read_text()).get("distributed_config") is None


def _disturb(model: Any, *, moved: bool) -> None:
    """Let every second call of a router, the recomputation, move some experts by a unit in the last place."""
    for block in model.model.layers:
        router, calls = block.mlp.gate, itertools.count(1)

        def forward(hidden: torch.Tensor, router: Any = router, calls: Any = calls) -> Any:
            logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
            up = torch.nextafter(logits, torch.full_like(logits, torch.inf)) - logits
            up[:, ::2] = 0
            if moved and next(calls) % 2 == 0:
                logits = logits + up.detach()
            values, indices = logits.softmax(-1).topk(router.top_k, dim=-1)
            return logits, values / values.sum(-1, keepdim=True), indices

        router.forward = forward


def _check_disturbed(folder: str) -> None:
    batches = [ragged_batches(8)[:4], ragged_batches(8, seed=2)[:4]]
    found: list[dict[str, torch.Tensor]] = []
    sent: list[torch.Tensor] = []
    for options, moved in ((None, False), (EP2, True)):
        model = load_native(folder, options)
        if moved:
            fs.apply_sac(model, 1)
        model.config.output_router_logits = False
        own = [b for window in batches for b in (window if not moved else rows_of_rank(window, EP2))]
        fs.prepare_loss(model, impl="logits")
        _disturb(model, moved=moved)
        experts = model.model.layers[0].mlp.experts
        experts.register_forward_pre_hook(lambda _, args: sent.append(args[1].clone()))
        for batch in own:
            loss, _ = fs.loss_sum(model, batch, router_loss="off", impl="logits")
            (loss / 100).backward()
        named = model.named_parameters()
        # FSDP2 averages over the 4 ranks.
        found.append({n: full(p.grad) * (4 if moved else 1) for n, p in named if p.grad is not None})
        sent = sent[-4:]
    assert largest_error(found[1], found[0]) <= 1e-4
    assert all(torch.equal(sent[index], sent[index + 1]) for index in (0, 2))


def test_a_recomputed_router_sends_tokens_to_the_same_ranks(tmp_path: Path) -> None:
    """Experts 2k and 2k + 1 lie as close as two floats can: a recomputation by itself would swap them."""
    needs_native_sharding()
    folder = save_mixture(tmp_path / "plain", num_local_experts=8, num_experts_per_tok=1)
    model = load_native(folder, None)
    for block in model.model.layers:
        with torch.no_grad():
            block.mlp.gate.weight.mul_(20)
            block.mlp.gate.weight[1::2] = block.mlp.gate.weight[::2]
    model.save_pretrained(tmp_path / "tied")
    run_distributed(_check_disturbed, 4, str(tmp_path / "tied"))
