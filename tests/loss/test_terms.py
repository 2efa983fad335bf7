"""Weighted targets, smoothed labels and the z-loss: against float64, in every way to compute the loss."""

from typing import Any

import pytest
import torch

import fsdp_sft as fs
from tests.harness.losses import gradients_of, with_loss
from tests.harness.models import FLOAT32, full, ragged_batches, tiny_model
from tests.harness.ranks import run_distributed

ROWS, WIDTH, VOCABULARY = 37, 16, 300
TERMS = [
    {"label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"label_smoothing": 0.3, "z_loss": 1e-3},
]


def oracle(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None,
    label_smoothing: float,
    z_loss: float,
) -> torch.Tensor:
    """The definition, target by target."""
    total = torch.zeros((), dtype=torch.float64)
    for place, label in enumerate(labels.tolist()):
        if label == -100:
            continue
        row = logits[place]
        denominator = torch.log(torch.exp(row).sum())
        loss = (1 - label_smoothing) * (denominator - row[label])
        loss = loss + label_smoothing * (denominator - row).mean() + z_loss * denominator**2
        total = total + (1 if weights is None else weights[place]) * loss
    return total


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    bias = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    labels[::5] = -100
    weights = torch.rand(ROWS, generator=generator) * 3
    weights[1], weights[5] = 0.0, float("nan")  # the second has no label, and is not read
    parts = (part.to(dtype).requires_grad_() for part in (hidden, weight, bias))
    return *parts, labels, weights


@pytest.mark.parametrize("terms", [{}, *TERMS], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"scale": 0.5}, {"chunk_size": 5}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-2)],
)
def test_the_chunked_loss_is_that_of_float64(
    terms: dict[str, float], weighted: bool, options: dict[str, Any], dtype: torch.dtype, most: float
) -> None:
    hidden, weight, bias, labels, weights = drawn(dtype)
    # In 16 bits large weights do no harm.
    given = weights * (1000 if dtype.itemsize == 2 else 1) if weighted else None
    loss = fs.linear_cross_entropy_sum(hidden, weight, labels, bias=bias, weights=given, **terms, **options)
    loss.backward()
    exact = [part.detach().double().requires_grad_() for part in (hidden, weight, bias)]
    logits = (exact[0] @ exact[1].T + exact[2]) * options.get("scale", 1.0)
    if "softcap" in options:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    expected = oracle(logits, labels, given, terms.get("label_smoothing", 0.0), terms.get("z_loss", 0.0))
    expected.backward()
    assert float(abs(loss - expected).detach() / abs(expected).detach()) <= most
    for own, right in zip((hidden, weight, bias), exact, strict=True):
        assert own.grad is not None
        assert right.grad is not None
        assert float((own.grad.double() - right.grad).norm() / right.grad.norm()) <= most


def test_weights_of_other_labels_are_refused() -> None:
    hidden, weight, _, labels, weights = drawn(torch.float32)
    with pytest.raises(ValueError, match="of the shape of labels"):
        fs.linear_cross_entropy_sum(hidden, weight, labels, weights=weights[:3])


@pytest.mark.parametrize(
    ("terms", "error", "message"),
    [
        ({"label_smoothing": 1.0}, ValueError, r"label_smoothing must be in \[0, 1\)"),
        ({"label_smoothing": -0.1}, ValueError, "label_smoothing must be in"),
        ({"z_loss": -1e-4}, ValueError, "z_loss must be in"),
        ({"z_loss": float("nan")}, ValueError, "z_loss must be in"),
        ({"z_loss": "1e-4"}, TypeError, "not supported"),
    ],
)
def test_terms_that_cannot_be(terms: dict[str, Any], error: type[Exception], message: str) -> None:
    hidden, weight, _, labels, _ = drawn(torch.float32)
    with pytest.raises(error, match=message):
        fs.linear_cross_entropy_sum(hidden, weight, labels, **terms)
    with pytest.raises(error, match=message):
        fs.loss_sum(tiny_model("llama"), ragged_batches(1)[0], **terms)


def weighted_batches(number: int) -> list[dict[str, torch.Tensor]]:
    """Ragged batches, of which every third has no weights."""
    batches = ragged_batches(number)
    for index, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(index)
        if index % 3 < 2:
            batch["loss_weights"] = 2 * torch.rand(batch["labels"].shape, generator=generator)
            batch["loss_weights"][0] = 0.0
    return batches


def expected_step(
    batches: list[dict[str, torch.Tensor]], label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """(loss, sum of the weights, gradients) of plain torch in float64."""
    model = tiny_model("llama", dtype=torch.float64)
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for batch in batches:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
        logits = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        own = batch.get("loss_weights", torch.ones(batch["labels"].shape))[:, 1:].flatten().double()
        total = total + oracle(logits, labels, own, label_smoothing, z_loss)
        weight += float(own[labels != -100].sum())
    (total / weight).backward()
    return float(total.detach()) / weight, weight, gradients_of(model)


def _weight(batch: dict[str, torch.Tensor]) -> float:
    weights = batch.get("loss_weights", torch.ones(batch["labels"].shape))[:, 1:].double()
    return float(weights[batch["labels"][:, 1:] != -100].sum())


def _step(loss_impl: str, terms: dict[str, float]) -> dict[str, Any]:
    """What ``train_step``, ``evaluate`` and a loop of one's own make of weighted batches on each rank."""
    context = fs.init_distributed()
    batches = weighted_batches(6)[context.rank :: context.world_size]
    kept: dict[str, torch.Tensor] = {}
    model = tiny_model("llama", dtype=torch.float64).to(context.device)
    fs.shard_model(model, mesh=fs.build_mesh(), master_dtype=torch.float64, mp_policy=FLOAT32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def keep(*_: Any) -> None:
        kept.update({name: full(p.grad).cpu() for name, p in model.named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(keep)
    fs.prepare_loss(model, impl=loss_impl)  # type: ignore[arg-type]
    own: Any = {"loss_fn": lambda m, b: fs.loss_sum(m, b, **terms)[0], "count_fn": _weight} if terms else {}
    result = fs.train_step(model, batches, optimizer, max_grad_norm=None, **own)
    evaluated = fs.evaluate(model, batches, **own)
    targets = fs.count_targets(batches)
    for index, batch in enumerate(batches):
        moved = {name: value.to(context.device) for name, value in batch.items()}
        with fs.gradient_sync(model, "all" if index == len(batches) - 1 else "none"):
            summed, _ = fs.loss_sum(with_loss(model, impl=loss_impl), moved, **terms)  # type: ignore[arg-type]
            fs.scale_for_backward(summed, num_targets=targets.weight).backward()
    return {
        "loss": result.loss,
        "weight": result.target_weight,
        "targets": (result.num_targets, int(targets)) if not terms else (0, 0),
        "evaluated": evaluated.loss,
        "summed": targets.weight,
        "gradients": kept,
        "own": gradients_of(model),
    }


@pytest.mark.parametrize("loss_impl", ["chunked", "logits"])
@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window_weighs_each_target_as_asked(loss_impl: str, terms: dict[str, float], ranks: int) -> None:
    loss, weight, gradients = expected_step(weighted_batches(6), **terms)
    found = run_distributed(_step, ranks, loss_impl, terms)[0]
    numbers = found["loss"], found["evaluated"], found["weight"]
    assert numbers == pytest.approx((loss, loss, weight), rel=1e-12)
    assert found["summed"] == pytest.approx(found["weight"], rel=1e-15)
    assert len(set(found["targets"])) == 1
    for name, right in gradients.items():
        for kind in ("gradients", "own"):
            assert float((found[kind][name] - right).norm()) <= 1e-10 * float(right.norm()), (kind, name)


def test_a_window_that_weighs_nothing_is_skipped() -> None:
    model = tiny_model("llama")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batches = [{**b, "loss_weights": torch.zeros(b["labels"].shape)} for b in ragged_batches(2)]
    result = fs.train_step(model, batches, torch.optim.SGD(model.parameters(), lr=1.0))
    assert (result.skip_reason, result.num_targets) == ("no weight", fs.count_targets(batches))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with pytest.raises(ValueError, match="targets are 0"):
        fs.evaluate(model, batches)


@pytest.mark.parametrize("wrong", ["negative", "nan", "shape", "dtype"])
def test_weights_of_a_batch_that_cannot_be(wrong: str) -> None:
    model = tiny_model("llama")
    (batch,) = ragged_batches(1)
    weights = torch.ones(batch["labels"].shape)
    weights[batch["labels"] != -100] = {"negative": -0.5, "nan": float("nan")}.get(wrong, 1.0)
    batch["loss_weights"] = {"shape": weights[:, 1:], "dtype": weights.long()}.get(wrong, weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for call in (lambda: fs.train_step(model, [batch], optimizer), lambda: fs.evaluate(model, [batch])):
        with pytest.raises(ValueError, match="loss_weights must be"):
            call()


def test_a_loss_of_ones_own_with_weights_needs_their_sum() -> None:
    with pytest.raises(ValueError, match="take num_targets from count_targets"):
        fs.causal_lm_loss(tiny_model("llama"), weighted_batches(1)[0], num_targets=7)


def test_shifted_labels_bring_shifted_weights() -> None:
    model, batch = tiny_model("llama"), weighted_batches(1)[0]
    shifted = {
        **{name: value for name, value in batch.items() if name != "labels"},
        "shift_labels": torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100),
        "loss_weights": torch.nn.functional.pad(batch["loss_weights"][:, 1:], (0, 1), value=7.0),
    }
    for impl in ("chunked", "logits"):
        assert fs.loss_sum(with_loss(model, impl=impl), shifted)[0].item() == pytest.approx(  # type: ignore[arg-type]
            fs.loss_sum(with_loss(model, impl=impl), batch)[0].item(),  # type: ignore[arg-type]
            rel=1e-6,
        )
