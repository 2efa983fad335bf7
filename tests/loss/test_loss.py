"""The loss without logits against logits and cross entropy, alone and inside sharded models."""

import copy
import itertools
import logging
import math
import sys
import types
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_sft as fs
from fsdp_sft.loss import liger
from fsdp_sft.loss.counting import counted_tokens, num_tokens
from tests.harness.architectures import class_names, tiny_architecture
from tests.harness.device import device_type, mesh_here
from tests.harness.models import (
    VOCAB,
    full,
    largest_error,
    oracle_gradients,
    oracle_loss,
    ragged_batches,
    tiny_model,
)
from tests.harness.ranks import run_distributed

FLOAT32 = MixedPrecisionPolicy()
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}

# --- linear_cross_entropy_sum -----------------------------------------------------------------------------


def _reference(hidden, weight, labels, bias=None, softcap=None, scale=None) -> torch.Tensor:
    logits = hidden @ weight.T
    logits = logits if bias is None else logits + bias
    logits = logits if scale is None else logits * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def _draw(
    dtype: torch.dtype, *, rows: int = 131, width: int = 32, vocab: int = 301, ignored: float = 0.4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(vocab, width, generator=generator).to(dtype)
    bias = torch.randn(vocab, generator=generator).to(dtype)
    labels = torch.randint(vocab, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < ignored] = -100
    return hidden, weight, labels, bias


def _leaves(*tensors: torch.Tensor | None, dtype: torch.dtype | None = None) -> list[Any]:
    return [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.parametrize(
    ("dtype", "loss_tolerance", "tolerance"),
    [
        (torch.float64, 1e-14, 1e-13),
        (torch.float32, 1e-6, 5e-6),
        (torch.bfloat16, 1e-4, 2e-2),
        (torch.float16, 1e-5, 2e-3),
    ],
)
def test_loss_and_gradients_equal_float64_logits(
    dtype: torch.dtype, loss_tolerance: float, tolerance: float
) -> None:
    for with_bias, softcap, scale, ignored, chunk_size in itertools.product(
        (False, True), (None, 5.0), (None, 0.25, -2.0), (0.0, 0.5), (None, 1, 50)
    ):
        case = (with_bias, softcap, scale, ignored, chunk_size)
        hidden, weight, labels, bias = _draw(dtype, ignored=ignored)
        mine = _leaves(hidden, weight, bias if with_bias else None)
        theirs = _leaves(*mine, dtype=torch.float64)
        loss = fs.linear_cross_entropy_sum(
            *mine[:2], labels, bias=mine[2], softcap=softcap, scale=scale, chunk_size=chunk_size
        )
        expected = _reference(*theirs[:2], labels, theirs[2], softcap, scale)
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert _relative(loss.detach(), expected.detach()) <= loss_tolerance, case
        (loss * 0.5).backward()
        (expected * 0.5).backward()
        for ours, reference in zip(mine, theirs, strict=True):
            if ours is not None:
                assert ours.grad.dtype == dtype
                assert _relative(ours.grad, reference.grad) <= tolerance, case


@pytest.mark.parametrize("size", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("rows", [32, 1024])
def test_a_bfloat16_loss_is_right_to_four_digits(rows: int, size: float) -> None:
    hidden, weight, labels, _ = _draw(torch.float32, rows=rows, width=128, vocab=4000)
    hidden, weight = (hidden * size / 128**0.5).bfloat16(), weight.bfloat16()
    expected = _reference(hidden.double(), weight.double(), labels)
    assert _relative(fs.linear_cross_entropy_sum(hidden, weight, labels), expected) < 1e-4


def test_certain_and_hopeless_targets_have_finite_losses() -> None:
    hidden = torch.tensor([[200.0], [-200.0], [1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]])
    labels = torch.tensor([0, 0, 1])
    loss = fs.linear_cross_entropy_sum(hidden, weight, labels)
    assert float(loss.detach()) == pytest.approx(0 + 400 + 2e4)
    loss.backward()
    assert torch.isfinite(hidden.grad).all()
    precise = fs.linear_cross_entropy_sum(torch.tensor([[12.0]]), weight[:2], torch.tensor([0]))
    assert float(precise) == pytest.approx(math.log1p(math.exp(-24)), rel=1e-3, abs=6e-8)


def test_without_targets_gradients_are_zero_and_connected() -> None:
    hidden, weight, labels, bias = _draw(torch.float32)
    for rows in (131, 0):
        mine = _leaves(hidden[:rows], weight, bias)
        loss = fs.linear_cross_entropy_sum(*mine[:2], torch.full_like(labels, -100)[:rows], bias=mine[2])
        loss.backward()
        assert float(loss.detach()) == 0
        assert all(tensor.grad is not None and not tensor.grad.any() for tensor in mine)


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    hidden, weight, labels, bias = _draw(torch.float32)
    vocab_sized: list[tuple[int, ...]] = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if (
                isinstance(out, torch.Tensor)
                and out.shape == weight.shape
                and func.overloadpacket is not (torch.ops.aten.detach)
            ):
                vocab_sized.append(tuple(out.shape))
            return out

    for needs in itertools.product((False, True), repeat=2):
        inputs = [
            tensor.clone().requires_grad_(need) for tensor, need in zip((hidden, weight), needs, strict=True)
        ]
        vocab_sized.clear()
        with Shapes():
            loss = fs.linear_cross_entropy_sum(*inputs, labels, bias=bias)
        assert bool(vocab_sized) == needs[1], "the gradient of a frozen head"
        assert loss.requires_grad == any(needs)
        if any(needs):
            loss.backward()
        assert [tensor.grad is not None for tensor in inputs] == list(needs)
    inputs = _leaves(hidden, weight)
    vocab_sized.clear()
    with torch.no_grad(), Shapes():
        assert not fs.linear_cross_entropy_sum(*inputs, labels).requires_grad
    assert not vocab_sized, "evaluation makes no gradients"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_tensor_is_as_large_as_the_logits(dtype: torch.dtype) -> None:
    rows, vocab = 4096, 2000
    hidden, weight, labels, _ = _draw(dtype, rows=rows, width=16, vocab=vocab, ignored=0)
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    mine = _leaves(hidden, weight)
    with Largest():
        fs.linear_cross_entropy_sum(*mine, labels).backward()
    assert 0 < largest <= 128 * vocab


def test_a_scaler_prevents_underflow_in_float16() -> None:
    """Divided by many targets the gradients lie below float16's range; scaled up they lie within."""
    hidden, weight, labels, _ = _draw(torch.float16, rows=64, vocab=2000, ignored=0)
    hidden = hidden / 8
    num_targets, scale = 3e6, 2.0**20
    theirs = _leaves(hidden, weight, dtype=torch.float64)
    (_reference(*theirs, labels) / num_targets).backward()
    lost = _leaves(hidden, weight)
    (_reference(*lost, labels).float() / num_targets).backward()
    assert (lost[1].grad == 0).float().mean() > 0.9, "the case is one where plain float16 fails"
    mine = _leaves(hidden, weight)
    scaler = torch.amp.GradScaler(device_type(), init_scale=scale)
    scaler.scale(fs.linear_cross_entropy_sum(*mine, labels) / num_targets).backward()
    for ours, reference in zip(mine, theirs, strict=True):
        assert _relative(ours.grad.double() / scale, reference.grad) <= 2e-3
        assert ((ours.grad == 0) & (reference.grad.abs() > 1e-13)).sum() == 0


def test_the_gradient_of_the_sum_may_exceed_float16() -> None:
    """The sum over many rows of one target does; its mean does not."""
    hidden, weight, labels, _ = _draw(torch.float16, rows=4096, vocab=50, ignored=0)
    hidden, labels = torch.full_like(hidden, 40.0), torch.zeros_like(labels)
    weight = weight / 100
    theirs = _leaves(hidden, weight, dtype=torch.float64)
    total = _reference(*theirs, labels)
    total.backward()
    assert float(theirs[1].grad.abs().max()) > torch.finfo(torch.float16).max
    mine = _leaves(hidden, weight)
    (fs.linear_cross_entropy_sum(*mine, labels) / 4096).backward()
    assert _relative(mine[1].grad, theirs[1].grad / 4096) <= 2e-3


def test_shapes_strides_and_autocast() -> None:
    hidden, weight, labels, _ = _draw(torch.float32, rows=130)
    expected = fs.linear_cross_entropy_sum(hidden, weight, labels)
    shaped = fs.linear_cross_entropy_sum(hidden.view(2, 65, -1), weight, labels.view(2, 65))
    assert torch.equal(shaped, expected)
    strided = fs.linear_cross_entropy_sum(hidden.T.contiguous().T, weight.T.contiguous().T, labels)
    assert _relative(strided, expected) <= 1e-6
    mine = _leaves(hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss = fs.linear_cross_entropy_sum(*mine, labels)
    narrow = _leaves(hidden, weight, dtype=torch.bfloat16)
    same = fs.linear_cross_entropy_sum(*narrow, labels)
    assert torch.equal(loss, same)
    loss.backward()
    same.backward()
    assert mine[1].grad.dtype == torch.float32
    assert torch.equal(mine[1].grad, narrow[1].grad.float())


def test_what_cannot_be_done_is_refused() -> None:
    hidden, weight, labels, bias = _draw(torch.float32)
    call = fs.linear_cross_entropy_sum
    for message, arguments, options in (
        (r"hidden must be \(\.\.\., H\) and weight \(V, H\)", (hidden[:, :-1], weight, labels), {}),
        (r"hidden must be \(\.\.\., H\) and weight \(V, H\)", (hidden, weight[0], labels), {}),
        ("one for each row of hidden", (hidden, weight, labels[1:]), {}),
        ("labels must be int64", (hidden, weight, labels.int()), {}),
        (r"in \[0, 301\), got 301", (hidden, weight, labels.clamp_min(0) + 301 - labels.max()), {}),
        (r"in \[0, 301\), got -1", (hidden, weight, labels.clamp_min(-1)), {}),
        ("must have one dtype", (hidden, weight.double(), labels), {}),
        ("must be floating point", (hidden.long(), weight, labels), {}),
        ("bias must be", (hidden, weight, labels), {"bias": bias[1:]}),
        ("must have one dtype", (hidden, weight, labels), {"bias": bias.double()}),
        ("chunk_size must be", (hidden, weight, labels), {"chunk_size": 0}),
        ("chunk_size must be", (hidden, weight, labels), {"chunk_size": True}),
        ("softcap must be", (hidden, weight, labels), {"softcap": 0.0}),
        ("scale must be", (hidden, weight, labels), {"scale": math.nan}),
        ("use one device", (hidden, weight.to("meta"), labels), {}),
    ):
        with pytest.raises(ValueError, match=message):
            call(*arguments, **options)
    mine = _leaves(hidden, weight)
    loss = call(*mine, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward through the same loss"):
        loss.backward()
    with pytest.raises(RuntimeError, match="no derivative of its gradient"):
        torch.autograd.grad(call(*mine, labels), mine[0], create_graph=True)


def test_under_torch_compile_the_graph_breaks_cleanly() -> None:
    hidden, weight, labels, _ = _draw(torch.float32)

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fs.linear_cross_entropy_sum(hidden * 2, weight, labels) / 3

    plain, compiled = _leaves(hidden, weight), _leaves(hidden, weight)
    loss(*plain).backward()
    torch.compile(loss, backend="aot_eager")(*compiled).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain, compiled, strict=True))


def test_a_compiled_step_breaks_its_graph_at_the_loss() -> None:
    batch = ragged_batches(1)[0]
    plain, compiled = tiny_model("llama"), tiny_model("llama")
    expected, _ = fs.loss_sum(plain, batch)
    actual = torch.compile(lambda batch: fs.loss_sum(compiled, batch)[0] * 2, backend="aot_eager")(batch)
    expected.mul(2).backward()
    actual.backward()
    assert _relative(actual.detach(), 2 * expected.detach()) <= 1e-6
    gradients = [{n: p.grad for n, p in model.named_parameters()} for model in (plain, compiled)]
    assert largest_error(gradients[1], gradients[0]) <= 1e-6


# --- in models --------------------------------------------------------------------------------------------

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"final_logit_softcapping": 3.0, "tie_word_embeddings": False}),
    "granite": ("Granite", {"logits_scaling": 4.0}),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
}


def _model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    name, overrides = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **overrides,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return model.to(dtype).train()


def _mine(batches: list[Any]) -> list[Any]:
    return batches[dist.get_rank() :: dist.get_world_size()]


def _shard(model: Any, *, own_group: bool = False, mesh_shape: Any = None, **options: Any) -> Any:
    mesh = mesh_here(**(mesh_shape or {}))
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if own_group and head.weight is embedding.weight:  # one group of the two
        for modules in (*fs.find_blocks(model).values(), [embedding, head], model):
            fully_shard(modules, mesh=mesh, mp_policy=options.get("mp_policy", FLOAT32))
        return model
    blocks = fs.find_blocks(model)
    blocks = {**blocks, "lm_head": head} if own_group else blocks
    options = {"mp_policy": FLOAT32, "master_dtype": head.weight.dtype, **options}
    return fs.shard_model(model, mesh=mesh, blocks=blocks, **options)


def _gradients(
    model: Any, mine: list[Any], *, impl: str = "auto", accumulate: str = "all"
) -> dict[str, torch.Tensor]:
    model.reshard()  # after a forward without a backward, zero_grad would miss the root's shards
    model.zero_grad()
    targets = fs.count_targets(mine)
    for index, batch in enumerate(mine):
        with fs.gradient_sync(model, "all" if index == len(mine) - 1 else accumulate):
            fs.causal_lm_loss(model, batch, num_targets=targets, impl=impl).backward()
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _check_families(dtype: torch.dtype) -> dict[str, float]:
    ranks = dist.get_world_size()
    errors = {}
    for family, own_group in itertools.product(FAMILIES, (False, True)):
        batches = ragged_batches(ranks)  # with several ranks, the last one has no target
        model = _model(family, dtype)
        loss, expected = oracle_gradients(model, batches)
        _shard(model, own_group=own_group)
        assert fs.prepare_loss(model) == "chunked"
        case = f"{family}{', own group' if own_group else ''}"
        errors[case] = largest_error(_gradients(model, _mine(batches)), expected)
        assert errors[case] <= TOLERANCE[dtype], (case, errors[case])
        assert fs.evaluate(model.eval(), _mine(batches)).loss == pytest.approx(loss, rel=1e-6)
    return errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_equal_logits_and_cross_entropy(ranks: int, dtype: torch.dtype) -> None:
    errors = run_distributed(_check_families, ranks, dtype, timeout=240)[0]
    assert len(errors) == 2 * len(FAMILIES)
    print(f"{ranks} ranks, {dtype}: largest error {max(errors.values()):.1e} of {len(errors)} cases")


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "hsdp": (4, {"mesh_shape": {"dp_replicate": 2}}),
    "ddp": (2, {"mesh_shape": {"dp_replicate": 2, "dp_shard": 1}}),
    "offload": (2, {"offload_policy": CPUOffloadPolicy()}),
    "zero2": (2, {"reshard_after_forward": False}),
    "sac": (2, {"prepare": "sac"}),
    "compile": (2, {"prepare": "compile"}),
    "frozen head": (2, {"prepare": "frozen head"}),
    "only the head": (2, {"prepare": "only the head"}),
}


def _prepared(model: Any, what: str | None) -> Any:
    if what == "sac":
        fs.apply_sac(model, "1/2")
    elif what == "compile":
        fs.apply_sac(model, "1/2")
        fs.compile_blocks(model, backend="aot_eager")
    elif what == "frozen head":
        model.lm_head.requires_grad_(False)
    elif what == "only the head":
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
    return model


def _check_case(options: dict[str, Any]) -> None:
    options = dict(options)
    what = options.pop("prepare", None)
    for own_group, accumulate in itertools.product((False, True), ("all", "none", "reduce_scatter")):
        batches = ragged_batches(2 * dist.get_world_size())
        model = _model("granite", torch.float64)
        if what in ("frozen head", "only the head"):
            _prepared(model, what)
        _, expected = oracle_gradients(model, batches)
        model = _shard(_prepared(model, what), own_group=own_group, **options)
        # Nothing was prepared: the first loss of the window does it.
        actual = _gradients(model, _mine(batches), accumulate=accumulate, impl="chunked")
        error = largest_error(actual, expected)
        assert error <= 1e-10, (own_group, accumulate, error)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case == "compile" else case for case in CASES]
)
def test_gradients_equal_logits_and_cross_entropy_with(case: str) -> None:
    ranks, options = CASES[case]
    run_distributed(_check_case, ranks, options, timeout=240)


def _check_mixed_precision() -> None:
    batches = _mine(ragged_batches(4))
    for own_group, dtype in itertools.product((False, True), (torch.bfloat16, torch.float16)):
        policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=dtype)
        model = _shard(_model("gemma2"), own_group=own_group, mp_policy=policy)
        loss, _ = fs.loss_sum(model, batches[0], impl="chunked")
        assert loss.dtype == torch.float32
        assert float(loss.detach()) != float(loss.detach().to(dtype)), "the policy's output_dtype rounds it"
        loss.backward()
        reference, _ = fs.loss_sum(model, batches[0], impl="logits")
        assert _relative(loss.detach(), reference.detach()) <= 1e-2
        fused = _gradients(model, batches, impl="chunked")
        error = largest_error(fused, _gradients(model, batches, impl="logits"))
        assert error <= (5e-2 if dtype == torch.bfloat16 else 2e-2), error


def test_mixed_precision_agrees_with_its_own_logits() -> None:
    run_distributed(_check_mixed_precision, 2, timeout=240)


def _check_no_targets_anywhere() -> None:
    empty = ragged_batches(2)[-1]
    for own_group in (False, True):
        model = _shard(_model("llama"), own_group=own_group)
        total, count = fs.loss_sum(model, empty)
        total.backward()
        assert (float(total.detach()), count) == (0.0, 0)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert not full(parameter.grad).any(), name


def test_a_batch_without_targets_on_any_rank_gives_zero_gradients() -> None:
    run_distributed(_check_no_targets_anywhere, 2)


def test_a_first_token_is_no_target() -> None:
    """Nothing stands in front of it, whatever its label says; the counts agree on that with the loss."""
    model = tiny_model("llama")
    ids = torch.arange(3, 11).view(1, 8)
    all_of_them = {"input_ids": ids, "labels": ids.clone()}
    without_first = {"input_ids": ids, "labels": torch.where(torch.arange(8) > 0, ids, -100)}
    for impl in ("logits", "chunked"):
        first, count = fs.loss_sum(model, all_of_them, impl=impl)
        second, same = fs.loss_sum(model, without_first, impl=impl)
        assert count == same == fs.count_targets([all_of_them]) == 7
        assert torch.equal(first, second)


def test_packed_batches_pass_their_positions_on() -> None:
    model = _model("llama")
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, [0, 5]] = -100
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = {"input_ids": ids, "labels": labels, "position_ids": positions}
    rows = [{"input_ids": ids[:, a:b], "labels": labels[:, a:b]} for a, b in ((0, 5), (5, 12))]
    assert fs.prepare_loss(model) == "chunked"
    together, count = fs.loss_sum(model, packed)
    apart = sum(fs.loss_sum(model, row, impl="logits")[0] for row in rows)
    assert count == 10
    assert _relative(together.detach(), apart.detach()) <= 1e-6


# --- preparing --------------------------------------------------------------------------------------------


def _check_left_as_it_was() -> None:
    model = _shard(tiny_model("gpt2", attn_pdrop=0.1, resid_pdrop=0.1))
    model.transformer.h[0].eval()
    batch = _mine(ragged_batches(2))[0]
    fs.loss_sum(model, batch, impl="logits")[0].backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    buffers = {name: (b, b.clone()) for name, b in model.named_buffers()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    assert fs.prepare_loss(model) == "chunked"
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(
        b is buffers[name][0] and torch.equal(b, buffers[name][1]) for name, b in model.named_buffers()
    )
    assert all(torch.equal(p.grad.to_local(), gradients[n].to_local()) for n, p in model.named_parameters())
    assert "forward" not in vars(model)
    assert "forward" not in vars(model.lm_head)
    assert all(hasattr(p, "placements") for p in model.parameters()), "sharded again"


def test_preparing_leaves_the_model_as_it_was() -> None:
    run_distributed(_check_left_as_it_was, 2)


def _train(prepared: tuple[int, ...], steps: int = 4) -> list[tuple[float, float]]:
    model = _shard(tiny_model("gpt2", attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    results = []
    for step in range(steps):
        if step in prepared:
            fs.prepare_loss(model)
        result = fs.train_step(model, _mine(ragged_batches(4, seed=step)), optimizer, grad_sync="last")
        results.append((result.loss, result.grad_norm))
    return results


def _check_bit_exact() -> None:
    first_use = _train(())
    assert first_use == _train((0,)) == _train((2, 3)), "when it is prepared makes no difference"


def test_training_is_bit_exact_however_it_is_prepared() -> None:
    run_distributed(_check_bit_exact, 2)


class _Head(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).square()


def _odd(kind: str) -> Any:
    model = tiny_model("llama")
    if kind == "square after the head":
        forward = model.forward

        def squared(*args: Any, labels: Any = None, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            output.logits = output.logits.square()
            if labels is not None:
                output.loss = model.loss_function(output.logits, labels, VOCAB)
            return output

        model.forward = squared
    elif kind == "another head":
        head = _Head(32, VOCAB, bias=False)
        head.weight = model.lm_head.weight
        model.lm_head = head
    elif kind == "adapter":
        # A head with a parameter of its own that does nothing yet: its output alone would not show it.
        model.lm_head.lora = nn.Parameter(torch.zeros(VOCAB, 32))
        model.lm_head.forward = lambda hidden: F.linear(hidden, model.lm_head.weight + model.lm_head.lora)
    elif kind == "head used twice":
        forward = model.forward
        model.forward = lambda *args, **kwargs: (
            model.lm_head(torch.ones(1, 1, 32)),
            forward(*args, **kwargs),
        )[1]
    elif kind == "no head":
        model.get_output_embeddings = lambda: None
    elif kind == "compiled":
        model.compile(backend="eager")
    return model


ODD = {
    "square after the head": "neither a scale nor a soft cap",
    "another head": "not a plain nn.Linear",
    "adapter": "not a plain nn.Linear",
    "head used twice": "calls the head 2 times",
    "no head": "names no output embeddings",
    "compiled": "compiled as a whole",
}


@pytest.mark.parametrize("kind", ODD)
def test_falls_back_with_a_reason(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = _odd(kind), ragged_batches(1)[0]
    with caplog.at_level(logging.INFO, "fsdp_sft.loss"):
        assert fs.prepare_loss(model) == "logits"
    (record,) = (one for one in caplog.records if one.name == "fsdp_sft.loss")
    assert record.levelno == logging.WARNING
    assert "loss of LlamaForCausalLM: full logits, because" in record.message
    assert ODD[kind] in record.message
    with pytest.raises(ValueError, match=f"cannot be computed by impl='chunked': .*{ODD[kind]}"):
        fs.loss_sum(model, batch, impl="chunked")
    with pytest.raises(ValueError, match=ODD[kind]):
        fs.prepare_loss(model, impl="chunked")
    expected = oracle_loss(model, [batch])
    total, count = fs.loss_sum(model, batch)
    assert float(total.detach()) / count == pytest.approx(float(expected.detach()), rel=1e-5)


def test_a_soft_cap_shows_even_where_logits_are_small() -> None:
    model = _model("gemma2")
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-3)
    assert fs.prepare_loss(model) == "chunked"
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)
    batch = ragged_batches(1)[0]
    fused, _ = fs.loss_sum(model, batch, impl="chunked")
    assert _relative(fused.detach(), fs.loss_sum(model, batch, impl="logits")[0].detach()) <= 1e-6


def test_a_plan_ends_with_what_it_was_made_for(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = tiny_model("llama"), ragged_batches(1)[0]
    with caplog.at_level(logging.INFO, "fsdp_sft.loss"):
        assert fs.prepare_loss(model) == "chunked"
        fs.loss_sum(model, batch)
        assert len(caplog.records) == 1, "probed once"
        fs.loss_sum(copy.deepcopy(model), batch)
        assert len(caplog.records) == 2, "a copy is another model"
        model.lm_head = nn.Linear(32, VOCAB + 3, bias=True)
        model.config.vocab_size = model.vocab_size = VOCAB + 3
        total, count = fs.loss_sum(model, batch)
        assert len(caplog.records) == 3, "another head"
    assert float(total.detach()) / count == pytest.approx(
        float(oracle_loss(model, [batch]).detach()), rel=1e-5
    )
    assert fs.prepare_loss(model, impl="logits") == "logits"
    reference = weakref.ref(model)
    del model, total
    assert reference() is None, "nothing keeps the model alive"


def test_the_wrong_models_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="impl must be one of"):
        fs.prepare_loss(tiny_model("llama"), impl="fused")
    with pytest.raises(ValueError, match="encoder-decoder"):
        fs.prepare_loss(tiny_model("t5"))
    with pytest.raises(ValueError, match="meta device"):
        fs.prepare_loss(tiny_model("llama").to("meta"))
    with pytest.raises(ValueError, match="Liger's kernels run on CUDA"):
        fs.prepare_loss(tiny_model("llama"), impl="liger")
    classifier = tiny_model("bert")
    with pytest.raises(
        fs.ModelLossError, match=r"cannot be compared.*Give train_step and evaluate a loss_fn"
    ):
        fs.loss_sum(classifier, ragged_batches(1)[0])
    fs.prepare_loss(classifier, impl="logits", compare=False)
    with pytest.raises(ValueError, match="for a classifier give train_step a loss_fn"):
        fs.loss_sum(classifier, ragged_batches(1)[0], impl="logits")


def _check_a_failing_probe() -> None:
    batches = ragged_batches(4)
    for own_group, place in itertools.product((False, True), ("block", "head")):
        model = _model("llama")
        _, expected = oracle_gradients(model, batches)
        _shard(model, own_group=own_group)

        def fail(_module: Any, args: tuple[Any, ...]) -> None:
            if args[0].shape[:2] == (2, 8):
                raise RuntimeError("no such shape")

        module = model.lm_head if place == "head" else model.model.layers[0].mlp
        handle = module.register_forward_pre_hook(fail)
        with pytest.raises(fs.ModelLossError, match="RuntimeError: no such shape"):
            fs.prepare_loss(model)
        assert fs.prepare_loss(model, compare=False) == "logits"
        actual = _gradients(model, _mine(batches))
        assert largest_error(actual, expected) <= 1e-6, (own_group, place)
        handle.remove()
        assert fs.prepare_loss(model) == "chunked"
        assert largest_error(_gradients(model, _mine(batches)), expected) <= 1e-6, (own_group, place)


def test_training_goes_on_after_a_probe_that_failed() -> None:
    run_distributed(_check_a_failing_probe, 2, timeout=240)


def _check_one_rank_cannot() -> None:
    model = _shard(_model("llama"))
    if dist.get_rank() == 1:
        model.lm_head.forward = types.MethodType(nn.Linear.forward, model.lm_head)  # not plain on this one
    assert fs.prepare_loss(model) == "logits"
    with pytest.raises(ValueError, match=r"1 other ranks of the mesh could not|not a plain nn\.Linear"):
        fs.prepare_loss(model, impl="chunked")


def test_ranks_agree_on_a_fall_back() -> None:
    run_distributed(_check_one_rank_cannot, 2)


def test_liger_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in of the kernels' interface, which are CUDA only; absent, they are never imported."""
    calls = []

    class LigerFusedLinearCrossEntropyLoss:
        def __init__(self, *, reduction: str, softcap: float | None, accum_dtype: torch.dtype) -> None:
            calls.append((reduction, softcap, accum_dtype))
            self.softcap = softcap

        def __call__(self, lin_weight, _input, target, bias=None) -> torch.Tensor:
            assert _input.ndim == 2
            assert target.ndim == 1
            return _reference(_input, lin_weight, target, bias, self.softcap)

    module = types.ModuleType("liger_kernel.transformers")
    module.LigerFusedLinearCrossEntropyLoss = LigerFusedLinearCrossEntropyLoss
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    monkeypatch.setattr(liger, "why_not", lambda device: "")
    batch = ragged_batches(1)[0]
    for family in ("gemma2", "granite", "cohere"):
        model = _model(family)
        assert fs.prepare_loss(model, impl="liger") == "liger"
        fused, _ = fs.loss_sum(model, batch)
        assert _relative(fused.detach(), fs.loss_sum(model, batch, impl="logits")[0].detach()) <= 1e-6
    assert ("sum", 3.0, torch.float32) in calls
    with pytest.raises(ValueError, match="no logit scale"):
        liger.linear_cross_entropy_sum(*_draw(torch.float32)[:3], bias=torch.zeros(301), scale=2.0)


# --- every architecture -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_causal_lm_is_fused_exactly_or_falls_back_with_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    fused, refused, reasons, errors = 0, 0, {}, {}
    for name in class_names():
        try:
            model = tiny_architecture(name).eval()
        except Exception as error:
            reasons[name] = f"not built: {error}"
            continue
        caplog.clear()
        try:
            chosen = fs.prepare_loss(model)
        except fs.ModelLossError as error:  # its own loss is another one
            reasons[name], refused = str(error), refused + 1
            continue
        if chosen == "logits":
            reasons[name] = caplog.records[-1].message
            continue
        gradients = []
        for impl in ("logits", "chunked"):
            model.zero_grad()
            fs.loss_sum(model, batch, impl=impl)[0].backward()
            gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        errors[name] = largest_error(gradients[1], gradients[0])
        fused += 1
    print(f"\n{fused} of {len(class_names())} fused, largest gradient error {max(errors.values()):.1e}")
    print("\n".join(f"{name}: {reason[:200]}" for name, reason in reasons.items()))
    assert max(errors.values()) <= 2e-6, max(errors, key=lambda name: errors[name])
    assert fused >= 0.9 * (len(class_names()) - refused) > 120


@pytest.mark.parametrize("columns", [1, 255, 256, 257, 1000, 1024])
def test_the_largest_column_is_that_of_argmax(columns: int) -> None:
    from fsdp_sft.loss.linear_cross_entropy import _largest_column

    generator = torch.Generator().manual_seed(columns)
    drawn = torch.randn(64, columns, generator=generator)
    for logits in (drawn, drawn.round(), drawn - 50, torch.where(drawn > 3, torch.nan, drawn)):
        assert torch.equal(_largest_column(logits), logits.argmax(-1, keepdim=True))


def test_tokens_are_what_a_mask_of_any_numbers_does_not_mark_as_padding() -> None:
    ids = torch.arange(3, 23).view(2, 10)
    mask = torch.tensor([[1] * 4 + [2] * 4 + [0] * 2, [3] * 10])  # numbers of rows in a pack
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    assert num_tokens(batch) == 18 == int(counted_tokens(batch).sum())
    optimizer = torch.optim.SGD((model := tiny_model("llama")).parameters(), lr=0.0)
    result = fs.train_step(model, [{**batch, "attention_mask": (mask != 0).long()}], optimizer)
    assert result.num_tokens == 18


def _prepared_apart() -> None:
    model = _shard(_model("llama"))
    with pytest.raises(ValueError, match="ranks ask for different implementations"):
        fs.prepare_loss(model, impl="logits" if torch.distributed.get_rank() else "auto")
    fs.prepare_loss(model)
    if torch.distributed.get_rank() == 0:
        model.model.layers[0].register_forward_hook(lambda *_: None)  # as what logs is put on one rank
    assert fs.prepare_loss(model) == "chunked"


def test_ranks_that_prepare_a_loss_apart_do_not_wait_for_each_other() -> None:
    run_distributed(_prepared_apart, 2, timeout=60)
