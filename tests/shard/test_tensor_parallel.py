"""Ranks that compute the same rows together, in models that transformers cuts: right, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_sft as fs
from tests.harness.models import full, largest_error, oracle_gradients, ragged_batches
from tests.harness.native import load_native, needs_native_sharding, rows_of_rank, save_mixture
from tests.harness.ranks import run_distributed

TP = {"tp_size": 2}
WITH_EXPERTS = {"tp_size": 2, "ep_size": 2}
WITH_FSDP = {"tp_size": 2, "fsdp_size": 2}
WITH_BOTH = {"tp_size": 2, "fsdp_size": 2, "ep_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    needs_native_sharding()
    return save_mixture(tmp_path_factory.mktemp("mixture"), num_local_experts=8, vocab_size=104)


def _check_counts(folder: str, options: dict[str, Any]) -> None:
    batches = ragged_batches(4)
    mine = rows_of_rank(batches, options)
    plain = load_native(folder, None)
    loss, expected = oracle_gradients(plain, batches[: len(mine) * options.get("fsdp_size", 1)])
    fs.prepare_loss(plain, router_loss="micro_batch")
    alone = fs.evaluate(plain, batches)
    num_tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    model = load_native(folder, options)
    fs.watch_experts(model)
    before = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fs.prepare_loss(model, router_loss="micro_batch")
    evaluated = fs.evaluate(model, mine)
    fs.prepare_loss(model, router_loss="off")
    result = fs.train_step(model, mine, optimizer, max_grad_norm=None)
    assert (result.num_targets, result.num_tokens) == (alone.num_targets, num_tokens)
    assert evaluated.num_targets == alone.num_targets
    assert result.loss == pytest.approx(loss, rel=1e-5) == evaluated.loss
    assert evaluated.router_loss == pytest.approx(alone.router_loss, rel=1e-4)
    assert result.expert_load is not None
    assert sum(result.expert_load.counts[0]) == 2 * result.num_tokens
    moved = {name: before[name] - full(p.detach()) for name, p in model.named_parameters()}
    assert largest_error({n: moved[n] for n in expected}, expected) <= 5e-5


@pytest.mark.parametrize("options", [TP, WITH_EXPERTS, WITH_FSDP, WITH_BOTH])
def test_each_row_counts_once(folder: str, options: dict[str, Any]) -> None:
    run_distributed(_check_counts, 2 * options.get("fsdp_size", 1), folder, options)


def _check_different(folder: str, options: dict[str, Any]) -> None:
    model = load_native(folder, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    own = ragged_batches(4)[dist.get_rank() : dist.get_rank() + 1]
    with pytest.raises(fs.BatchError, match="of one tp group need the same batches"):
        fs.train_step(model, own, optimizer)


@pytest.mark.parametrize("options", [TP, WITH_BOTH])
def test_other_rows_are_refused(folder: str, options: dict[str, Any]) -> None:
    run_distributed(_check_different, 2 * options.get("fsdp_size", 1), folder, options)


def _check_stored(folder: str, root: str, options: dict[str, Any]) -> None:
    """Saved, and read by FSDP's ranks; exported, and read by one process."""
    model = load_native(folder, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fs.train_step(model, ragged_batches(2), optimizer)
    fs.save_checkpoint(f"{root}/ckpt", 1, model=model, optimizer=optimizer)
    fs.export_hf(model, f"{root}/hf", dtype=None)
    expected = {name: full(p.detach()) for name, p in model.named_parameters()}
    other = load_native(folder, {"fsdp_size": 2})
    fs.load_checkpoint(f"{root}/ckpt", model=other, optimizer=torch.optim.AdamW(other.parameters(), lr=1e-2))
    plain = load_native(f"{root}/hf", None)
    for found in (other, plain):
        assert all(torch.equal(full(p.detach()), expected[name]) for name, p in found.named_parameters())


def test_what_lies_on_all_ranks_is_stored(folder: str, tmp_path: Path) -> None:
    run_distributed(_check_stored, 2, folder, str(tmp_path), WITH_EXPERTS)


def _check_not_stored(folder: str, root: str, options: dict[str, Any]) -> None:
    model = load_native(folder, options)
    with pytest.raises((ValueError, TypeError), match="load the model with tp_size=1"):
        fs.save_checkpoint(f"{root}/ckpt", 1, model=model)
    with pytest.raises((ValueError, TypeError), match="load the model with tp_size=1"):
        fs.export_hf(model, f"{root}/hf")


@pytest.mark.parametrize("options", [TP, WITH_FSDP, WITH_BOTH])
def test_fused_weights_and_what_lies_on_some_ranks_are_not(
    folder: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    run_distributed(_check_not_stored, 2 * options.get("fsdp_size", 1), folder, str(tmp_path), options)
