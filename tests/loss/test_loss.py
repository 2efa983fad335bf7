"""The loss of a model without logits against logits and cross entropy, alone and sharded."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_sft as fs
from fsdp_sft.loss.counting import counted_tokens, num_tokens
from tests.harness.losses import (
    FAMILIES,
    family_model,
    own_batches,
    relative_error,
    shard_by_heads,
    window_gradients,
    with_loss,
)
from tests.harness.models import (
    largest_error,
    oracle_gradients,
    ragged_batches,
    tiny_model,
)
from tests.harness.ranks import on_ranks, run_distributed

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}


def _check_families(dtype: torch.dtype) -> dict[str, float]:
    ranks = dist.get_world_size()
    errors = {}
    for family, own_group in itertools.product(FAMILIES, (False, True)):
        batches = ragged_batches(ranks)  # with several ranks, the last one has no target
        model = family_model(family, dtype)
        loss, expected = oracle_gradients(model, batches)
        shard_by_heads(model, own_group=own_group)
        assert fs.prepare_loss(model) == "chunked"
        case = f"{family}{', own group' if own_group else ''}"
        errors[case] = largest_error(window_gradients(model, own_batches(batches)), expected)
        assert errors[case] <= TOLERANCE[dtype], (case, errors[case])
        assert fs.evaluate(model.eval(), own_batches(batches)).loss == pytest.approx(loss, rel=1e-6)
    return errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_equal_logits_and_cross_entropy(ranks: int, dtype: torch.dtype) -> None:
    errors = run_distributed(_check_families, ranks, dtype, timeout=240)[0]
    assert len(errors) == 2 * len(FAMILIES)
    print(f"{ranks} ranks, {dtype}: largest error {max(errors.values()):.1e} of {len(errors)} cases")


@pytest.mark.parametrize("frozen", ["the head", "all but the head"])
@on_ranks(2, timeout=240)
def test_gradients_of_a_frozen_part(frozen: str) -> None:
    for own_group, accumulate in itertools.product((False, True), ("all", "none", "reduce_scatter")):
        batches = ragged_batches(2 * dist.get_world_size())
        model = family_model("granite", torch.float64)
        model.requires_grad_(frozen == "the head")
        model.lm_head.requires_grad_(frozen != "the head")
        _, expected = oracle_gradients(model, batches)
        shard_by_heads(model, own_group=own_group)
        # Nothing was prepared: the first loss of the window does it.
        actual = window_gradients(model, own_batches(batches), accumulate=accumulate, impl="chunked")
        error = largest_error(actual, expected)
        assert error <= 1e-10, (own_group, accumulate, error)


@on_ranks(2, timeout=240)
def test_mixed_precision_agrees_with_its_own_logits() -> None:
    batches = own_batches(ragged_batches(4))
    for own_group, dtype in itertools.product((False, True), (torch.bfloat16, torch.float16)):
        policy = MixedPrecisionPolicy(dtype, torch.float32, output_dtype=dtype)
        model = shard_by_heads(family_model("gemma2"), own_group=own_group, mp_policy=policy)
        loss, _ = fs.loss_sum(with_loss(model, impl="chunked"), batches[0])
        assert loss.dtype == torch.float32
        assert float(loss.detach()) != float(loss.detach().to(dtype)), "the policy's output_dtype rounds it"
        loss.backward()
        reference, _ = fs.loss_sum(with_loss(model, impl="logits"), batches[0])
        assert relative_error(loss.detach(), reference.detach()) <= 1e-2
        fused = window_gradients(model, batches, impl="chunked")
        error = largest_error(fused, window_gradients(model, batches, impl="logits"))
        assert error <= (5e-2 if dtype == torch.bfloat16 else 2e-2), error


def test_a_first_token_is_no_target() -> None:
    """Nothing stands in front of it, whatever its label says; the counts agree on that with the loss."""
    model = tiny_model("llama")
    ids = torch.arange(3, 11).view(1, 8)
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
    result = fs.train_step(model, [{**batch, "attention_mask": (mask != 0).long()}], optimizer)
    assert result.num_tokens == 18
