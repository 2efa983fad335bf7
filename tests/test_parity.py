"""Gradients, losses and steps of the sharded model against the unsharded single process."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fsdp_sft as fs
from tests.harness.losses import own_batches
from tests.harness.models import FLOAT32, full, largest_error, oracle_gradients, ragged_batches, tiny_model
from tests.harness.ranks import RankFailedError, device_type, mesh_here, on_ranks, run_distributed

FAMILIES = ["llama", "qwen2", "qwen2-tied", "gemma3", "mixtral", "gpt2"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}


def _sharded_gradients(
    model: Any,
    mine: list[Any],
    *,
    mesh_shape: dict[str, int] | None = None,
    accumulate: str = "all",
    of_tokens: bool = False,
    **shard_options: Any,
) -> tuple[float, dict[str, torch.Tensor]]:
    mesh = mesh_here(**(mesh_shape or {}))
    fs.shard_model(model, mesh=mesh, **shard_options)
    targets = fs.count_targets(mine)
    losses = []
    for index, batch in enumerate(mine):
        with fs.gradient_sync(model, "all" if index == len(mine) - 1 else accumulate):
            if of_tokens:
                loss = fs.scale_for_backward(fs.token_losses(model, batch).sum(), num_targets=targets)
            else:
                loss = fs.causal_lm_loss(model, batch, num_targets=targets)
            loss.backward()
        losses.append(loss.item())
    total = torch.tensor(sum(losses) / mesh.size(), dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return float(total), {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _check_families(
    families: list[str],
    dtype: torch.dtype,
    accumulation: int,
    *,
    prepare: str = "",
    **options: Any,
) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for family in families:
        batches, model = ragged_batches(ranks * accumulation), tiny_model(family, dtype=dtype)
        if prepare == "freeze":
            model.get_input_embeddings().requires_grad_(False)
        expected_loss, expected = oracle_gradients(model, batches)
        if prepare in ("sac", "compile"):
            assert fs.apply_sac(model, "1/3")
        if prepare == "compile":
            fs.compile_blocks(model, backend="aot_eager")
        options = {"mp_policy": FLOAT32, "master_dtype": dtype, **options}
        loss, actual = _sharded_gradients(model, batches[rank::ranks], **options)
        error = largest_error(actual, expected)
        assert error <= TOLERANCE[dtype], f"{family}: gradient error {error:.2e}"
        assert abs(loss - expected_loss) <= TOLERANCE[dtype] * max(1, abs(expected_loss)), family


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_equal_the_single_process(world_size: int, dtype: torch.dtype) -> None:
    run_distributed(_check_families, world_size, FAMILIES, dtype, 1)


CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "accumulate, sync each": (2, 3, {}),
    "accumulate, sync last": (2, 3, {"accumulate": "none"}),
    "hsdp": (4, 2, {"mesh_shape": {"dp_replicate": 2}}),
    "hsdp, all-reduce deferred": (4, 3, {"mesh_shape": {"dp_replicate": 2}, "accumulate": "reduce_scatter"}),
    "ddp": (2, 3, {"mesh_shape": {"dp_replicate": 2, "dp_shard": 1}}),
    "reshard False": (2, 2, {"reshard_after_forward": False}),
    "reshard 2": (4, 2, {"reshard_after_forward": 2}),
    "offload": (2, 2, {"offload_policy": CPUOffloadPolicy()}),
    "frozen embedding": (2, 2, {"prepare": "freeze"}),
    "losses of tokens": (2, 3, {"of_tokens": True, "accumulate": "none"}),
    "losses of tokens, offload": (2, 2, {"of_tokens": True, "offload_policy": CPUOffloadPolicy()}),
    "sac": (2, 2, {"prepare": "sac"}),
    "compile": (2, 2, {"prepare": "compile"}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case == "compile" else case for case in CASES]
)
def test_gradients_equal_the_single_process_with(case: str) -> None:
    world_size, accumulation, options = CASES[case]
    run_distributed(
        _check_families,
        world_size,
        ["llama", "qwen2-tied"] if case != "compile" else ["qwen2-tied"],
        torch.float64,
        accumulation,
        **options,
    )


# --- train_step --------------------------------------------------------------------------------------------


def _values(model: Any) -> dict[str, torch.Tensor]:
    return {name: full(p).clone() for name, p in model.named_parameters()}


def _is_as(model: Any, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(full(p), before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks()
def test_loss_and_norm_of_unequal_micro_batches_equal_the_whole_batch(ranks: int, accumulation: int) -> None:
    batches = ragged_batches(ranks * accumulation)
    meshes: list[dict[str, int]] = [{}, {"dp_replicate": ranks, "dp_shard": 1}, {"dp_replicate": 2}]
    for mesh_shape in meshes[: {1: 1, 2: 2, 4: 3}[ranks]]:
        for grad_sync in ("each", "last", "reduce_scatter"):
            model = tiny_model("qwen2-tied")
            loss, gradients = oracle_gradients(model, batches)
            fs.shard_model(model, mesh=mesh_here(**mesh_shape), mp_policy=FLOAT32)
            result = fs.train_step(
                model, own_batches(batches), torch.optim.SGD(model.parameters(), lr=0.0), grad_sync=grad_sync
            )
            assert (result.loss, result.grad_norm) == pytest.approx(
                (loss, float(torch.nn.utils.get_total_norm(gradients.values()))), rel=1e-6
            ), (mesh_shape, grad_sync)
            assert result.num_targets == sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
            assert result.num_tokens == sum(int(b["attention_mask"].sum()) for b in batches)
            assert all(p.grad is None for p in model.parameters())


def test_gradients_that_no_optimizer_takes_do_not_pile_up() -> None:
    batches, model = ragged_batches(2), tiny_model("gpt2")
    optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=0.0)
    norms = [fs.train_step(model, batches, optimizer, max_grad_norm=None).grad_norm for _ in range(3)]
    assert norms == norms[:1] * 3
    assert all(p.grad is None for p in model.parameters())


@on_ranks(2)
def test_window_without_targets_is_skipped_by_all() -> None:
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here(), mp_policy=FLOAT32)
    before, optimizer = _values(model), torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    result = fs.train_step(model, ragged_batches(4)[-1:], optimizer, scheduler=scheduler)
    assert (result.skip_reason, scheduler.last_epoch) == ("no targets", 0)
    assert math.isnan(result.loss)
    assert _is_as(model, before)
    # One rank without targets is no reason to skip.
    result = fs.train_step(model, ragged_batches(2)[dist.get_rank() :][:1], optimizer, scheduler=scheduler)
    assert (result.skipped, scheduler.last_epoch) == (False, 1)
    assert not _is_as(model, before)


@on_ranks(2)
def test_an_inf_on_one_rank_skips_the_step_on_all() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here(), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scaler = torch.amp.GradScaler(device_type(), init_scale=256.0)
    window, before = own_batches(ragged_batches(4)), _values(model)
    result = fs.train_step(model, window, optimizer, scaler=scaler, scheduler=scheduler)
    assert result.skipped is False
    expected_norm = result.grad_norm
    assert not _is_as(model, before)
    changed = _values(model)
    # An inf in one rank's shard of one gradient: every rank skips, the scale falls, the schedule waits.
    bad = math.inf if dist.get_rank() == 1 else 1.0
    handle = model.model.norm.weight.register_post_accumulate_grad_hook(lambda p: p.grad.to_local().mul_(bad))
    result = fs.train_step(model, window, optimizer, scaler=scaler, scheduler=scheduler)
    assert (result.skip_reason, scaler.get_scale(), scheduler.last_epoch) == ("inf gradients", 128.0, 1)
    assert _is_as(model, changed)
    handle.remove()
    result = fs.train_step(model, window, optimizer, scaler=scaler)
    assert result.skipped is False
    assert 0 < result.grad_norm < 10 * expected_norm, "the norm is measured after unscaling"


@on_ranks(2)
def test_nonfinite_gradients_raise_and_change_nothing() -> None:
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here(), mp_policy=FLOAT32)
    before, optimizer = _values(model), torch.optim.AdamW(model.parameters(), lr=0.1)
    if dist.get_rank() == 1:
        model.model.norm.weight.register_post_accumulate_grad_hook(
            lambda p: p.grad.to_local().fill_(math.nan)
        )
    for scaler in (None, torch.amp.GradScaler(device_type(), enabled=False)):
        with pytest.raises(FloatingPointError, match="gradient norm is nan"):
            fs.train_step(model, own_batches(ragged_batches(4)), optimizer, scaler=scaler)
    assert not optimizer.state
    assert _is_as(model, before)


@on_ranks(2, timeout=30)
def test_bad_windows_raise_on_all_ranks() -> None:
    rank = dist.get_rank()
    model = fs.shard_model(tiny_model("llama"), mesh=mesh_here(), mp_policy=FLOAT32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    good = ragged_batches(2)[0]
    for window, message in (
        ([good] * (1 + rank), "micro_batches=1 and 2, on ranks 0 and 1"),
        ([{**good, "labels": good["labels"][:, :-1]}] if rank else [good], "aligned with input_ids"),
        ([{"input_ids": good["input_ids"]}] if rank else [good], "needs 'labels'"),
        ([{"labels": [[1, 2]]} if rank else good], "labels of list"),
        ([] if rank else [good], "micro_batches=1 and 0"),
        (good if rank else [good], "got str"),
    ):
        with pytest.raises(ValueError, match=message):
            fs.train_step(model, window, optimizer)
    with pytest.raises(ValueError, match="grad_sync must be"):
        fs.train_step(model, [good], optimizer, grad_sync="never")
    assert fs.train_step(model, [good], optimizer).skipped is False, "nothing was lost"


def _hang_if_uneven() -> None:
    if dist.get_rank() == 0:
        raise RuntimeError("rank 0 gave up")
    dist.barrier()


def test_the_harness_names_the_rank_that_failed_first() -> None:
    with pytest.raises(RankFailedError, match=r"rank 0 failed first[\s\S]*rank 0 gave up"):
        run_distributed(_hang_if_uneven, 2, timeout=60)
