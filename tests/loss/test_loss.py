"""The loss without logits, tokens' losses, and further terms: against logits, cross entropy and float64."""

import copy
import itertools
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

import fsdp_sft as fs
from fsdp_sft.loss.blocks import Products
from fsdp_sft.loss.counting import counted_tokens, num_tokens
from fsdp_sft.loss.linear import head_losses
from fsdp_sft.loss.plain import Terms
from tests.harness.long_rows import PACKED, PADDED, batch_of, rows_of, sharing_rows
from tests.harness.losses import (
    HEADS,
    draw_head,
    gradients_of,
    leaves_of,
    own_batches,
    relative_error,
    shard_by_heads,
    signed,
    window_gradients,
    with_loss,
)
from tests.harness.models import (
    FLOAT32,
    VOCAB,
    AllFloat64,
    full,
    largest_error,
    oracle_gradients,
    ragged_batches,
    tiny_model,
)
from tests.harness.ranks import device_here, mesh_here, on_ranks, run_distributed
from tests.plain import plain_token_losses

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks(timeout=240)
def test_gradients_equal_logits_and_cross_entropy(ranks: int, dtype: torch.dtype) -> None:
    for family, own_group in itertools.product(HEADS, (False, True)):
        batches = ragged_batches(ranks)  # with several ranks, the last one has no target
        model = tiny_model(family, dtype=dtype)
        loss, expected = oracle_gradients(model, batches)
        shard_by_heads(model, own_group=own_group)
        assert fs.prepare_loss(model) == "chunked"
        found = window_gradients(model, own_batches(batches))
        assert largest_error(found, expected) <= TOLERANCE[dtype], (family, own_group)
        assert fs.evaluate(model.eval(), own_batches(batches)).loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("frozen", ["the head", "all but the head"])
@on_ranks(2, timeout=240)
def test_gradients_of_a_frozen_part(frozen: str) -> None:
    for own_group, accumulate in itertools.product((False, True), ("all", "none", "reduce_scatter")):
        batches = ragged_batches(2 * dist.get_world_size())
        model = tiny_model("granite", dtype=torch.float64)
        model.requires_grad_(frozen == "the head")
        model.lm_head.requires_grad_(frozen != "the head")
        _, expected = oracle_gradients(model, batches)
        shard_by_heads(model, own_group=own_group)
        # Nothing was prepared: the first loss of the window does it.
        actual = window_gradients(model, own_batches(batches), accumulate=accumulate, impl="chunked")
        assert largest_error(actual, expected) <= 1e-10, (own_group, accumulate)


@on_ranks(2, timeout=240)
def test_mixed_precision_agrees_with_its_own_logits() -> None:
    batches = own_batches(ragged_batches(4))
    for own_group, dtype in itertools.product((False, True), (torch.bfloat16, torch.float16)):
        policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=dtype)
        model = shard_by_heads(tiny_model("gemma2"), own_group=own_group, mp_policy=policy)
        loss, _ = fs.loss_sum(with_loss(model, impl="chunked"), batches[0])
        assert loss.dtype == torch.float32
        assert float(loss.detach()) != float(loss.detach().to(dtype)), "the policy's output_dtype rounds it"
        loss.backward()
        reference, _ = fs.loss_sum(with_loss(model, impl="logits"), batches[0])
        assert relative_error(loss.detach(), reference.detach()) <= 1e-2
        gradients = [window_gradients(model, batches, impl=impl) for impl in ("chunked", "logits")]
        assert largest_error(*gradients) <= (5e-2 if dtype == torch.bfloat16 else 2e-2)


def test_a_first_token_is_no_target() -> None:
    """Nothing stands in front of it, whatever its label says; the counts agree on that with the loss."""
    model, ids = tiny_model("llama"), torch.arange(3, 11).view(1, 8)
    all_of_them = {"input_ids": ids, "labels": ids.clone()}
    without_first = {"input_ids": ids, "labels": torch.where(torch.arange(8) > 0, ids, -100)}
    for impl in ("logits", "chunked"):
        first, count = fs.loss_sum(with_loss(model, impl=impl), all_of_them)
        second, same = fs.loss_sum(with_loss(model, impl=impl), without_first)
        assert count == same == fs.count_targets([all_of_them]) == 7
        assert torch.equal(first, second)


def test_tokens_are_what_a_mask_of_any_numbers_does_not_mark_as_padding() -> None:
    ids = torch.arange(3, 23).view(2, 10)
    mask = torch.tensor([[1] * 4 + [2] * 4 + [0] * 2, [3] * 10])  # numbers of rows in a pack
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    assert num_tokens(batch) == 18 == int(counted_tokens(batch).sum())
    optimizer = torch.optim.SGD((model := tiny_model("llama")).parameters(), lr=0.0)
    assert fs.train_step(model, [{**batch, "attention_mask": (mask != 0).long()}], optimizer).num_tokens == 18


# --- token_losses beside plain logits: values, gradients of weights of either sign, all heads --------------

BATCHES = {kind: batch_of(rows_of([6, 15, 1, 9], seed=2), kind) for kind in (PACKED, PADDED)}
Found = tuple[torch.Tensor, dict[str, torch.Tensor]]


def _found(losses_of: Any, model: Any, batch: Any) -> Found:
    """Losses of tokens, and the gradients of their sum by weights of either sign."""
    values = losses_of(model, batch)
    (values * signed(batch).to(values)).sum().backward()
    return values.detach().cpu(), gradients_of(model)


def _apart(found: Found, expected: Found) -> float:
    """The largest relative error of losses and gradients; infinite if others are 0."""
    (values, own), (others, gradients) = found, expected
    if not torch.equal(values == 0, others == 0):
        return float("inf")
    return max(relative_error(values, others), largest_error(own, gradients))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", HEADS)
def test_values_and_gradients_are_those_of_logits(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype)
    close = 1e-12 if dtype == torch.float64 else 2e-6
    with AllFloat64() if dtype == torch.float64 else nullcontext():
        for trained in (True, False):
            model.get_output_embeddings().requires_grad_(trained)
            for batch in BATCHES.values():
                expected = _found(plain_token_losses, model, batch)
                for impl in ("chunked", "logits"):
                    found = _found(fs.token_losses, with_loss(model, impl=impl), batch)
                    assert found[0].dtype == dtype
                    assert _apart(found, expected) <= close


def test_shift_labels_and_batches_without_targets() -> None:
    model, batch = tiny_model("llama"), ragged_batches(1)[0]
    losses = fs.token_losses(model, batch)
    shifted = {**batch, "shift_labels": F.pad(batch["labels"][:, 1:], (0, 1), value=-100)}
    assert torch.equal(fs.token_losses(model, shifted)[:, :-1], losses[:, 1:])
    # Weights are the caller's to apply.
    assert torch.equal(fs.token_losses(model, {**batch, "loss_weights": torch.rand(losses.shape)}), losses)
    total = fs.token_losses(model, {**batch, "labels": torch.full_like(batch["labels"], -100)}).sum()
    total.backward()
    assert float(total) == 0
    assert not any(gradient.any() for gradient in gradients_of(model).values())
    with torch.no_grad():
        assert not fs.token_losses(model, batch).requires_grad, "a reference model keeps nothing"


def test_what_cannot_be_given_is_refused() -> None:
    model, batch = tiny_model("llama"), ragged_batches(1)[0]
    for error, message, one, given in (
        (fs.BatchError, "needs 'labels'", model, {"input_ids": batch["input_ids"]}),
        (fs.BatchError, "must be aligned", model, {**batch, "labels": batch["labels"][:, 1:]}),
        (fs.ModelLossError, "encoder-decoder", tiny_model("t5"), batch),
        (ValueError, r"-100 or in \[0, 101\)", model, {**batch, "labels": batch["labels"] + 2 * VOCAB}),
        (
            fs.PackingError,
            "position_ids",
            model,
            {**BATCHES[PACKED], "attention_mask": torch.ones_like(BATCHES[PACKED]["input_ids"])},
        ),
        (
            fs.PackingError,
            r"position_ids \(3, B, S\)",
            model,
            {**BATCHES[PACKED], "position_ids": BATCHES[PACKED]["position_ids"].expand(3, -1, -1)},
        ),
    ):
        with pytest.raises(error, match=message):
            fs.token_losses(one, given)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(fs.token_losses(model, batch).sum(), [*model.parameters()], create_graph=True)


def test_a_second_backward_works_where_the_graph_is_kept() -> None:
    model, batch = tiny_model("llama", dtype=torch.float64), ragged_batches(1)[0]
    losses = fs.token_losses(model, batch)
    losses.sum().backward(retain_graph=True)
    once = gradients_of(model)
    losses.sum().backward()
    assert largest_error(gradients_of(model), once) == 0
    model.lm_head.requires_grad_(False)  # then the gradient of the hidden states is given away
    losses = fs.token_losses(model, batch)
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        losses.sum().backward()


class _Gained(Products):
    """Products as those of float16, whose slopes have to lie between its smallest and its largest number."""

    gain = 2.0**15

    def hidden_gradient(self, slopes: torch.Tensor) -> torch.Tensor:
        assert 1e-3 < float(slopes.abs().max()) <= 65504
        return super().hidden_gradient(slopes)


@pytest.mark.parametrize(("size", "z_loss"), [(1e-7, 0.0), (1.0, 0.0), (65536.0, 0.0), (1.0, 0.5)])
@pytest.mark.parametrize("trained", [True, False])
def test_slopes_of_any_size_fit_float16(monkeypatch: Any, trained: bool, size: float, z_loss: float) -> None:
    monkeypatch.setattr("fsdp_sft.loss.blocks.products_for", _Gained)
    hidden, weight, labels, bias = draw_head(torch.float64)
    own = leaves_of(hidden, weight, bias) if trained else [*leaves_of(hidden), weight, bias]
    weights = size * torch.randn(len(labels), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits, leaves = own[0] @ own[1].T + own[2], [leaf for leaf in own if leaf.requires_grad]
    found = head_losses(
        *own[:2],
        labels,
        bias=own[2],
        **({"weights": weights, "terms": Terms(z_loss=z_loss)} if z_loss else {"summed": False}),
    )[0]
    gradients = [
        torch.autograd.grad(one.sum(), leaves)
        for one in (
            found if z_loss else found * weights,
            F.cross_entropy(logits, labels, reduction="none") * weights
            + z_loss * logits.logsumexp(-1) ** 2 * (labels != -100) * weights,
        )
    ]
    assert max(map(relative_error, *gradients)) <= 1e-12


@on_ranks(2)
def test_a_sharded_head_is_gathered_for_both_passes() -> None:
    kind = list(BATCHES)[dist.get_rank()]
    batch = {name: value.to(device_here()) for name, value in BATCHES[kind].items()}
    for family in HEADS:
        plain = tiny_model(family, dtype=torch.float64)
        with AllFloat64():
            oracles = {one: _found(plain_token_losses, plain, own) for one, own in BATCHES.items()}
            gradients = [found for _, found in oracles.values()]
            mean = {name: sum(one[name] for one in gradients) / 2 for name in gradients[0]}
            for own_group in (False, True):
                model = shard_by_heads(copy.deepcopy(plain).to(device_here()), own_group=own_group)
                with warnings.catch_warnings():  # of FSDP2, about an output that is a view
                    warnings.filterwarnings("error", message=".*returned a view tensor")
                    found = _found(fs.token_losses, model, batch)
                assert _apart(found, (oracles[kind][0], mean)) <= 1e-12


@on_ranks(2)
def test_ranks_that_share_rows_get_the_values_of_whole_rows() -> None:
    mesh = mesh_here(cp=2)
    for name in ("qwen3", "mixtral"):
        plain = tiny_model(name, dtype=torch.float64)
        model = sharing_rows(copy.deepcopy(plain), mesh)
        with AllFloat64():
            for batch in BATCHES.values():
                here = {key: value.to(device_here()) for key, value in batch.items()}
                expected = _found(plain_token_losses, plain, batch)
                for impl in ("auto", "logits"):
                    # Each of the two ranks has computed the loss: it counts twice, and FSDP2 averages.
                    assert (
                        _apart(_found(fs.token_losses, with_loss(model, impl=impl), here), expected) <= 1e-12
                    )


def test_a_compiled_loss_and_compiled_blocks() -> None:
    model, batch = tiny_model("llama", dtype=torch.float64), BATCHES[PADDED]
    expected = _found(plain_token_losses, model, batch)
    fs.prepare_loss(model)
    compiled = torch.compile(fs.token_losses, backend="aot_eager")
    assert torch.allclose(compiled(model, batch), expected[0], rtol=0, atol=1e-12)
    fs.compile_blocks(model, backend="aot_eager")
    assert _apart(_found(fs.token_losses, model, batch), expected) <= 1e-12


# --- weighted targets, smoothed labels and the z-loss: against float64, in every way to compute the loss ---


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
    hidden, weight, labels, bias = draw_head(torch.float64, rows=37, width=16)
    weights = torch.rand(len(labels), generator=torch.Generator().manual_seed(0)) * 3
    labels[5], weights[1], weights[5] = -100, 0.0, float("nan")  # that of no label is not read
    return *leaves_of(hidden, weight, bias, dtype=dtype), labels, weights


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
    total, weight = torch.zeros((), dtype=torch.float64), sum(map(_weight, batches))
    for batch in batches:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
        logits = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        own = batch.get("loss_weights", torch.ones(batch["labels"].shape))[:, 1:].flatten().double()
        total = total + oracle(logits, labels, own, label_smoothing, z_loss)
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
    plain = tiny_model("llama", dtype=torch.float64).to(context.device)
    model = fs.shard_model(plain, mesh=fs.build_mesh(), master_dtype=torch.float64, mp_policy=FLOAT32)
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
            own_model: Any = with_loss(model, impl=loss_impl)  # type: ignore[arg-type]
            (
                fs.scale_for_backward(fs.loss_sum(own_model, moved, **terms)[0], num_targets=targets.weight)
                if terms
                else fs.causal_lm_loss(own_model, moved, num_targets=targets)
            ).backward()
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
    assert (found["loss"], found["evaluated"], found["weight"]) == pytest.approx(
        (loss, loss, weight), rel=1e-12
    )
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
