"""token_losses beside plain logits: values, gradients of weights of either sign, all heads, no logits."""

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_sft as fs
from fsdp_sft.loss.linear import linear_token_losses
from fsdp_sft.loss.products import Products
from tests.harness.device import device_here, mesh_here
from tests.harness.float64 import AllFloat64
from tests.harness.long_rows import PACKED, PADDED, batch_of, rows_of
from tests.harness.losses import (
    ADAPTERS,
    FAMILIES,
    adapted_model,
    draw_head,
    family_model,
    leaves_of,
    relative_error,
    shard_by_heads,
    with_loss,
)
from tests.harness.models import VOCAB, largest_error, ragged_batches, tiny_model
from tests.harness.ranks import run_distributed
from tests.harness.token_values import gradients_of, plain_token_losses, signed

BATCHES = {kind: batch_of(rows_of([6, 15, 1, 9], seed=2), kind) for kind in (PACKED, PADDED)}


def _of_plain(model: Any, batch: Any, entropy: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    twin = copy.deepcopy(model)
    values = list(plain_token_losses(twin, batch)[: 1 + entropy])
    sum((value * signed(batch, seed)).sum() for seed, value in enumerate(values)).backward()
    return [value.detach() for value in values], gradients_of(twin)


def _of_ours(model: Any, batch: Any, entropy: bool, impl: str = "auto") -> tuple[list[torch.Tensor], dict]:
    got = fs.token_losses(with_loss(model, impl=impl), batch, entropy=entropy)
    values = list(got) if entropy else [got]
    weights = [signed(batch, seed).to(values[0]) for seed in range(2)]
    sum((value * weight).sum() for value, weight in zip(values, weights, strict=False)).backward()
    return [value.detach().cpu() for value in values], gradients_of(model)


def _compare(model: Any, batch: Any, oracle: Any, close: float, entropy: bool, impl: str = "auto") -> None:
    expected, gradients = oracle
    values, own = _of_ours(model, batch, entropy, impl)
    for value, other in zip(values, expected, strict=True):
        assert value.shape == batch["labels"].shape
        assert torch.equal(value == 0, other == 0)
        assert float((value.double() - other).abs().max() / other.abs().max()) <= close
    assert largest_error(own, gradients) <= close


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_logits(family: str, dtype: torch.dtype) -> None:
    model = family_model(family, dtype)
    close = 1e-12 if dtype == torch.float64 else 2e-6
    with AllFloat64() if dtype == torch.float64 else nullcontext():
        for kind, batch in BATCHES.items():
            for entropy in (False, True):
                oracle = _of_plain(model, batch, entropy)
                for impl in ("auto", "logits"):
                    _compare(model, batch, oracle, close, entropy, impl=impl)
                assert fs.token_losses(model, batch).dtype == dtype, kind
        assert fs.prepare_loss(model) == "chunked"
        for parameter in model.get_output_embeddings().parameters():
            parameter.requires_grad_(False)
        for entropy in (False, True):
            _compare(model, BATCHES[PADDED], _of_plain(model, BATCHES[PADDED], entropy), close, entropy)


class _Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            _Largest.numel = max(_Largest.numel, out.numel())
        return out


@pytest.mark.parametrize("kind", ADAPTERS)
def test_heads_with_adapters(kind: str) -> None:
    pytest.importorskip("peft")
    model, batch = adapted_model(kind, torch.float64), BATCHES[PADDED]
    for entropy in (False, True):
        _compare(model, batch, _of_plain(model, batch, entropy), 1e-12, entropy, impl="chunked")
    with model.disable_adapter(), torch.no_grad():  # a reference model
        expected = plain_token_losses(model, batch)[0]
        assert torch.allclose(fs.token_losses(model, batch), expected, rtol=0, atol=1e-12)
    rows = torch.randint(3, VOCAB, (10, 100), generator=torch.Generator().manual_seed(0))
    _Largest.numel = 0
    with _Largest():
        sum(
            v.sum() for v in fs.token_losses(model, {"input_ids": rows, "labels": rows}, entropy=True)
        ).backward()
    assert _Largest.numel < rows.numel() * VOCAB, "as large as the logits"


def test_a_reference_model_keeps_nothing() -> None:
    model, batch = tiny_model("llama", dtype=torch.float64), ragged_batches(1)[0]
    expected = plain_token_losses(model, batch)[0]
    with torch.no_grad():
        losses = fs.token_losses(model, batch)
    assert not losses.requires_grad
    assert torch.allclose(losses, expected, rtol=0, atol=1e-12)


def test_shift_labels_and_batches_without_targets() -> None:
    model, batch = tiny_model("llama"), ragged_batches(1)[0]
    losses = fs.token_losses(model, batch)
    shifted = {**batch, "shift_labels": F.pad(batch["labels"][:, 1:], (0, 1), value=-100)}
    assert torch.equal(fs.token_losses(model, shifted)[:, :-1], losses[:, 1:])
    weighted = {**batch, "loss_weights": torch.rand(batch["labels"].shape)}
    assert torch.equal(fs.token_losses(model, weighted), losses), "weights are the caller's to apply"
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    for entropy in (False, True):
        got = fs.token_losses(model, empty, entropy=entropy)
        total = sum(v.sum() for v in got) if entropy else got.sum()
        total.backward()
        assert float(total) == 0
        assert all(float(p.grad.abs().max()) == 0 for p in model.parameters() if p.grad is not None)
        assert model.get_output_embeddings().weight.grad is not None


def test_what_cannot_be_given_is_refused() -> None:
    model, batch = tiny_model("llama"), ragged_batches(1)[0]
    with pytest.raises(fs.BatchError, match="needs 'labels'"):
        fs.token_losses(model, {"input_ids": batch["input_ids"]})
    with pytest.raises(fs.BatchError, match="must be aligned"):
        fs.token_losses(model, {**batch, "labels": batch["labels"][:, 1:]})
    with pytest.raises(fs.ModelLossError, match="encoder-decoder"):
        fs.token_losses(tiny_model("t5"), batch)
    with pytest.raises(ValueError, match=r"labels must be -100 or in \[0, 101\)"):
        fs.token_losses(model, {**batch, "labels": batch["labels"] + 2 * VOCAB})
    packed = {**BATCHES[PACKED], "attention_mask": torch.ones_like(BATCHES[PACKED]["input_ids"])}
    with pytest.raises(fs.PackingError):
        fs.token_losses(model, packed)
    losses = fs.token_losses(model, batch)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(losses.sum(), [*model.parameters()], create_graph=True)
    with pytest.raises(ValueError, match="the loss of tokens needs logits"):
        fs.token_losses(tiny_model("bert"), {**batch, "labels": batch["labels"]})


def test_a_second_backward_works_where_the_graph_is_kept() -> None:
    model, batch = tiny_model("llama", dtype=torch.float64), ragged_batches(1)[0]
    losses = fs.token_losses(model, batch)
    losses.sum().backward(retain_graph=True)
    once = gradients_of(model)
    losses.sum().backward()
    assert largest_error(gradients_of(model), once) == 0


def test_a_hook_on_the_head_sees_logits() -> None:
    model, batch = tiny_model("llama", dtype=torch.float64), BATCHES[PADDED]
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    _compare(model, batch, _of_plain(model, batch, True), 1e-12, True)
    with pytest.raises(fs.ModelLossError, match="neither a scale nor a soft cap"):
        fs.token_losses(with_loss(model, impl="chunked"), batch)


def test_half_precision_is_as_close_as_logits_are() -> None:
    batch = BATCHES[PADDED]
    exact = tiny_model("llama", dtype=torch.float64)
    expected = plain_token_losses(exact, batch)[0]
    model = tiny_model("llama").bfloat16()
    losses = fs.token_losses(model, batch)
    assert losses.dtype == torch.float32
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none")
    plain_error = float((F.pad(plain.view(len(logits), -1), (1, 0)) - expected).abs().max())
    assert float((losses - expected).abs().max()) <= 1.5 * plain_error


class _Gained(Products):
    """Products as those of float16, whose slopes have to lie between its smallest and its largest number."""

    gain = 2.0**15

    def hidden_gradient(self, slopes: torch.Tensor) -> torch.Tensor:
        assert 1e-3 < float(slopes.abs().max()) <= 65504
        return super().hidden_gradient(slopes)


@pytest.mark.parametrize("size", [1e-7, 1.0, 65536.0])
@pytest.mark.parametrize("trained", [True, False])
def test_weights_of_any_size_fit_float16(monkeypatch: Any, trained: bool, size: float) -> None:
    monkeypatch.setattr("fsdp_sft.loss.linear.products_for", _Gained)
    hidden, weight, labels, bias = draw_head(torch.float64)
    own = leaves_of(hidden, weight, bias) if trained else [*leaves_of(hidden), weight, bias]
    logits = own[0] @ own[1].T + own[2]
    counts, logs = labels != -100, logits.log_softmax(-1)
    losses = -logs.gather(1, labels.clamp_min(0)[:, None])[:, 0] * counts
    expected = [losses, -(logs.exp() * logs).sum(-1) * counts]
    weights = size * torch.randn(
        2, len(labels), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    leaves = [leaf for leaf in own if leaf.requires_grad]
    for number in (1, 2):
        found = linear_token_losses(own[0], own[1], labels, bias=own[2], entropy=number == 2)
        total, other = (
            (found * weights[:number]).sum(),
            (torch.stack(expected)[:number] * weights[:number]).sum(),
        )
        pairs = zip(
            torch.autograd.grad(total, leaves),
            torch.autograd.grad(other, leaves, retain_graph=True),
            strict=True,
        )
        assert max(relative_error(mine, theirs) for mine, theirs in pairs) <= 1e-12


def _check_sharded() -> None:
    kind = list(BATCHES)[dist.get_rank()]
    batch = {name: value.to(device_here()) for name, value in BATCHES[kind].items()}
    for family in FAMILIES:
        plain = family_model(family, torch.float64)
        with AllFloat64():
            oracles = {one: _of_plain(plain, own, True) for one, own in BATCHES.items()}
            gradients = [found for _, found in oracles.values()]
            mean = {name: sum(one[name] for one in gradients) / 2 for name in gradients[0]}
            for own_group in (False, True):
                model = shard_by_heads(copy.deepcopy(plain).to(device_here()), own_group=own_group)
                with warnings.catch_warnings():  # of FSDP2, about an output that is a view
                    warnings.filterwarnings("error", message=".*returned a view tensor")
                    values, own = _of_ours(model, batch, True)
                for value, other in zip(values, oracles[kind][0], strict=True):
                    assert float((value - other).abs().max() / other.abs().max()) <= 1e-12, family
                assert largest_error(own, mean) <= 1e-12, (family, own_group)


def test_a_sharded_head_is_gathered_for_both_passes() -> None:
    run_distributed(_check_sharded, 2)


def _check_shared_rows() -> None:
    fs.init_distributed(device_type=device_here().type)
    mesh = mesh_here(cp=2)
    for name in ("qwen3", "mixtral"):
        plain = tiny_model(name, dtype=torch.float64)
        model = copy.deepcopy(plain).to(device_here())
        fs.shard_model(model, mesh=mesh, master_dtype=torch.float64, mp_policy=MixedPrecisionPolicy())
        fs.use_context_parallel(model, mesh=mesh)
        with AllFloat64():
            for kind, batch in BATCHES.items():
                here = {key: value.to(device_here()) for key, value in batch.items()}
                for impl in ("auto", "logits"):
                    expected, gradients = _of_plain(plain, batch, True)
                    values, own = _of_ours(model, here, True, impl=impl)
                    for value, other in zip(values, expected, strict=True):
                        assert value.shape == other.shape
                        assert float((value - other).abs().max() / other.abs().max()) <= 1e-12, (name, kind)
                    # Each of the two ranks has computed the loss: it counts twice, and FSDP2 averages.
                    assert largest_error(own, gradients) <= 1e-12, (name, kind, impl)
                with torch.no_grad():
                    assert torch.allclose(fs.token_losses(model, here).cpu(), expected[0], rtol=0, atol=1e-12)


def test_ranks_that_share_rows_get_the_values_of_whole_rows() -> None:
    run_distributed(_check_shared_rows, 2)


def test_compiled_blocks_and_a_compiled_loss() -> None:
    model, batch = tiny_model("llama", dtype=torch.float64), BATCHES[PADDED]
    oracle = _of_plain(model, batch, True)
    fs.prepare_loss(model)
    compiled = torch.compile(
        lambda model, batch: fs.token_losses(model, batch, entropy=True), backend="aot_eager"
    )
    values = compiled(model, batch)
    assert torch.allclose(values[0], oracle[0][0], rtol=0, atol=1e-12)
    fs.compile_blocks(model, backend="aot_eager")
    _compare(model, batch, oracle, 1e-12, True)
