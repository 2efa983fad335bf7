"""The loss of hidden states, chunk by chunk, against logits and cross entropy."""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_sft as fs
from fsdp_sft.loss.linear import head_losses
from tests.harness.device import device_type
from tests.harness.losses import (
    Largest,
    draw_head,
    leaves_of,
    loss_of_logits,
    relative_error,
)


@pytest.fixture(autouse=True)
def _fast_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of bfloat16, whatever CPU this is; a slow one has those of float16. Slices are many."""
    monkeypatch.setattr("fsdp_sft.loss.blocks.CACHED_BYTES", 1 << 10)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


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
        hidden, weight, labels, bias = draw_head(dtype, ignored=ignored)
        mine = leaves_of(hidden, weight, bias if with_bias else None)
        theirs = leaves_of(*mine, dtype=torch.float64)
        loss = fs.linear_cross_entropy_sum(
            *mine[:2], labels, bias=mine[2], softcap=softcap, scale=scale, chunk_size=chunk_size
        )
        expected = loss_of_logits(*theirs[:2], labels, theirs[2], softcap, scale)
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert relative_error(loss.detach(), expected.detach()) <= loss_tolerance, case
        (loss * 0.5).backward()
        (expected * 0.5).backward()
        for ours, reference in zip(mine, theirs, strict=True):
            if ours is not None:
                assert ours.grad.dtype == dtype
                assert relative_error(ours.grad, reference.grad) <= tolerance, case


@pytest.mark.parametrize("size", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("rows", [32, 1024])
def test_a_bfloat16_loss_is_right_to_four_digits(rows: int, size: float) -> None:
    hidden, weight, labels, _ = draw_head(torch.float32, rows=rows, width=128, vocab=4096)
    hidden, weight = (hidden * size / 128**0.5).bfloat16(), weight.bfloat16()
    assert (
        relative_error(
            fs.linear_cross_entropy_sum(hidden, weight, labels),
            loss_of_logits(hidden.double(), weight.double(), labels),
        )
        < 1e-4
    )


def test_what_bfloat16_logits_predict_counts_as_right() -> None:
    hidden, weight, *_ = draw_head(torch.bfloat16, rows=1024)
    assert int(head_losses(hidden, weight, (hidden @ weight.T).argmax(-1), chunk_size=1024)[1]) == 1024


def test_certain_and_hopeless_targets_have_finite_losses() -> None:
    hidden = torch.tensor([[200.0], [-200.0], [1e4]], requires_grad=True)
    weight, labels = torch.tensor([[1.0], [-1.0], [0.0]]), torch.tensor([0, 0, 1])
    loss = fs.linear_cross_entropy_sum(hidden, weight, labels)
    assert float(loss.detach()) == pytest.approx(0 + 400 + 2e4)
    loss.backward()
    assert torch.isfinite(hidden.grad).all()
    assert float(
        fs.linear_cross_entropy_sum(torch.tensor([[12.0]]), weight[:2], labels[:1])
    ) == pytest.approx(math.log1p(math.exp(-24)), rel=1e-3, abs=6e-8)


def test_without_targets_gradients_are_zero_and_connected() -> None:
    hidden, weight, labels, bias = draw_head(torch.float32)
    for rows in (131, 0):
        mine = leaves_of(hidden[:rows], weight, bias)
        loss = fs.linear_cross_entropy_sum(*mine[:2], torch.full_like(labels, -100)[:rows], bias=mine[2])
        loss.backward()
        assert float(loss.detach()) == 0
        assert all(tensor.grad is not None and not tensor.grad.any() for tensor in mine)


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    hidden, weight, labels, bias = draw_head(torch.float32)
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
    inputs = leaves_of(hidden, weight)
    vocab_sized.clear()
    with torch.no_grad(), Shapes():
        assert not fs.linear_cross_entropy_sum(*inputs, labels).requires_grad
    assert not vocab_sized, "evaluation makes no gradients"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_tensor_is_as_large_as_the_logits(dtype: torch.dtype) -> None:
    rows, vocab = 4096, 2000
    hidden, weight, labels, _ = draw_head(dtype, rows=rows, width=16, vocab=vocab, ignored=0)
    with Largest() as largest:
        fs.linear_cross_entropy_sum(*leaves_of(hidden, weight), labels).backward()
    assert 0 < largest.numel <= 128 * vocab


def test_a_scaler_prevents_underflow_in_float16() -> None:
    """Divided by many targets the gradients lie below float16's range; scaled up they lie within."""
    hidden, weight, labels, _ = draw_head(torch.float16, rows=64, vocab=2000, ignored=0)
    hidden = hidden / 8
    num_targets, scale = 3e6, 2.0**20
    theirs = leaves_of(hidden, weight, dtype=torch.float64)
    (loss_of_logits(*theirs, labels) / num_targets).backward()
    lost = leaves_of(hidden, weight)
    (loss_of_logits(*lost, labels).float() / num_targets).backward()
    assert (lost[1].grad == 0).float().mean() > 0.9, "the case is one where plain float16 fails"
    mine = leaves_of(hidden, weight)
    scaler = torch.amp.GradScaler(device_type(), init_scale=scale)
    scaler.scale(fs.linear_cross_entropy_sum(*mine, labels) / num_targets).backward()
    for ours, reference in zip(mine, theirs, strict=True):
        assert relative_error(ours.grad.double() / scale, reference.grad) <= 2e-3
        assert ((ours.grad == 0) & (reference.grad.abs() > 1e-13)).sum() == 0


def test_shapes_strides_and_autocast() -> None:
    hidden, weight, labels, _ = draw_head(torch.float32, rows=130)
    expected = fs.linear_cross_entropy_sum(hidden, weight, labels)
    assert torch.equal(
        fs.linear_cross_entropy_sum(hidden.view(2, 65, -1), weight, labels.view(2, 65)), expected
    )
    strided = fs.linear_cross_entropy_sum(hidden.T.contiguous().T, weight.T.contiguous().T, labels)
    assert relative_error(strided, expected) <= 1e-6
    mine = leaves_of(hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss = fs.linear_cross_entropy_sum(*mine, labels)
    narrow = leaves_of(hidden, weight, dtype=torch.bfloat16)
    same = fs.linear_cross_entropy_sum(*narrow, labels)
    assert torch.equal(loss, same)
    loss.backward()
    same.backward()
    assert mine[1].grad.dtype == torch.float32
    assert torch.equal(mine[1].grad, narrow[1].grad.float())


def test_what_cannot_be_done_is_refused() -> None:
    hidden, weight, labels, _ = draw_head(torch.float32)
    call = fs.linear_cross_entropy_sum
    for message, arguments in (
        ("one for each row of hidden", (hidden, weight, labels[1:])),
        ("labels must be int64", (hidden, weight, labels.int())),
        (r"in \[0, 301\), got 301", (hidden, weight, labels.clamp_min(0) + 301 - labels.max())),
        (r"in \[0, 301\), got -1", (hidden, weight, labels.clamp_min(-1))),
    ):
        with pytest.raises(ValueError, match=message):
            call(*arguments)
    mine = leaves_of(hidden, weight)
    loss = call(*mine, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward through the same loss"):
        loss.backward()
    with pytest.raises(RuntimeError, match="no derivative of its gradient"):
        torch.autograd.grad(call(*mine, labels), mine[0], create_graph=True)


def test_under_torch_compile_the_graph_breaks_cleanly() -> None:
    hidden, weight, labels, _ = draw_head(torch.float32)

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fs.linear_cross_entropy_sum(hidden * 2, weight, labels) / 3

    plain, compiled = leaves_of(hidden, weight), leaves_of(hidden, weight)
    loss(*plain).backward()
    torch.compile(loss, backend="aot_eager")(*compiled).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain, compiled, strict=True))
