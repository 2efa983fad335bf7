"""Loss and gradients of rows that ranks share, beside every row by itself in a plain process."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_sft as fs
from benchmarks.checks.long_rows.jobs import (
    AllFloat64,
    Gradients,
    Row,
    each_alone,
    gradients_of,
    largest_error,
    norm_error,
    packed,
    rows_of,
    small_model,
)

PACK, ONE_ROW = [13, 7, 1, 22, 5], [48]
# name -> row lengths, number of targets
BATCHES: dict[str, tuple[list[int], int]] = {
    "5 rows in a pack, 28 targets": (PACK, 28),
    "5 rows in a pack, 27 targets": (PACK, 27),
    "1 row, 28 targets": (ONE_ROW, 28),
    "1 row, 27 targets": (ONE_ROW, 27),
}
Errors = tuple[float, float]  # of the loss, and the largest of a gradient


def ours(model: Any, mesh: Any, batch: dict[str, torch.Tensor]) -> tuple[float, Gradients]:
    """Loss and gradients over all ranks of a model whose ranks share rows."""
    num_targets = fs.count_targets([batch], mesh=mesh)
    own = fs.causal_lm_loss(model, batch, num_targets=num_targets)
    own.backward()
    return mean_over_ranks(own), gradients_of(model)


def mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def our_errors(family: str) -> dict[str, Errors]:
    """By batch, in float64, on all ranks of this job."""
    fs.init_distributed(device_type="cpu")
    model = small_model(family, torch.float64)
    plain, mesh = copy.deepcopy(model), fs.build_mesh(cp=dist.get_world_size(), device_type="cpu")
    fs.shard_model(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(), master_dtype=torch.float64)
    fs.use_context_parallel(model, mesh=mesh)
    with AllFloat64():
        return errors(plain, lambda rows: ours(model, mesh, packed(rows)))


def errors(plain: Any, shared: Any) -> dict[str, Errors]:
    """Of ``shared(rows)``, which returns loss and gradients, in each batch."""
    found = {}
    for name, (lengths, targets) in BATCHES.items():
        rows = rows_of(lengths, targets=targets)
        loss, gradients = each_alone(plain, rows)
        own, of = shared(rows)
        found[name] = abs(own - loss) / loss, largest_error(of, gradients)
    return found


# --- ringmaster -------------------------------------------------------------------------------------------


def ringmaster_errors(family: str, way: str) -> dict[str, Errors]:
    """As ``our_errors``, by one of the ways in which axolotl-ringmaster is called."""
    import ringmaster as rm

    fs.init_distributed(device_type="cpu")
    model = small_model(family, torch.float64)
    plain, mesh = copy.deepcopy(model), fs.build_mesh(device_type="cpu")
    runtime = rm.setup(
        rm.RingmasterConfig(size=dist.get_world_size(), backend=rm.Backend.ULYSSES),
        num_kv_heads=model.config.num_key_value_heads,
        device_type="cpu",
        inner_attn="sdpa",
    )
    model.set_attn_implementation(runtime.attn_implementation)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with AllFloat64():
        return errors(plain, lambda rows: RINGMASTER[way](model, runtime, rows))


def _raw(model: Any, _runtime: Any, rows: Sequence[Row]) -> tuple[float, Gradients]:
    """The loop of its README, where each rank's loss is the mean over its own targets."""
    from ringmaster.adapters.raw import context_parallel_region

    with context_parallel_region(packed(rows)) as shard:
        loss = model(**shard).loss
    loss.backward()
    return mean_over_ranks(loss), gradients_of(model)


def _raw_summed(model: Any, _runtime: Any, rows: Sequence[Row]) -> tuple[float, Gradients]:
    """The same, with the sum over the targets of all ranks written out by the caller."""
    from ringmaster.adapters.raw import context_parallel_region

    targets = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
    with context_parallel_region(packed(rows)) as shard:
        wanted = shard.pop("shift_labels").flatten()
        del shard["labels"]
        logits = model(**shard).logits.flatten(0, 1)
    summed = F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
    loss = summed * dist.get_world_size() / targets
    loss.backward()
    return mean_over_ranks(loss), gradients_of(model)


def _context_manager(model: Any, runtime: Any, rows: Sequence[Row]) -> tuple[float, Gradients]:
    """Its context manager, told the number of targets as transformers' Trainer tells it."""
    from ringmaster import ContextParallelContextManager

    targets = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
    with ContextParallelContextManager([model], runtime.cp_group):
        loss = model(**packed(rows), num_items_in_batch=targets).loss
    loss.backward()
    return mean_over_ranks(loss), gradients_of(model)


RINGMASTER = {
    "`context_parallel_region`, as in its README": _raw,
    "`context_parallel_region`, targets summed by the caller": _raw_summed,
    "`ContextParallelContextManager`, `num_items_in_batch`": _context_manager,
}


# --- 32 and 16 bits ---------------------------------------------------------------------------------------


def roundings(family: str, dtype: torch.dtype, lengths: Sequence[int], seeds: int) -> dict[str, float]:
    """How far rows that ranks share, and a plain process, are from float64, over several packs."""
    fs.init_distributed(device_type="cpu")
    model = small_model(family)
    plain = copy.deepcopy(model).to(dtype)
    truth = copy.deepcopy(plain).double()  # what both compute with are the rounded weights
    mesh = fs.build_mesh(cp=dist.get_world_size(), device_type="cpu")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    fs.shard_model(model, mesh=mesh, mp_policy=policy)
    fs.use_context_parallel(model, mesh=mesh)
    sums: dict[str, float] = {}
    for seed in range(seeds):
        rows = rows_of(lengths, seed=seed)
        with AllFloat64():
            loss, gradients = each_alone(truth, rows)
        whole, whole_gradients = _whole(plain, packed(rows))
        own, own_gradients = ours(model, mesh, packed(rows))
        one = {
            "loss, shared": abs(own - loss) / loss,
            "loss, plain": abs(whole - loss) / loss,
            "gradients, shared": norm_error(own_gradients, gradients),
            "gradients, plain": norm_error(whole_gradients, gradients),
            "largest, shared": largest_error(own_gradients, gradients),
            "largest, plain": largest_error(whole_gradients, gradients),
            "loss, apart": abs(own - whole) / whole,
            "largest, apart": largest_error(own_gradients, whole_gradients),
        }
        for name, value in one.items():
            sums[name] = sums.get(name, 0.0) + value**2 / seeds
    return {name: value**0.5 for name, value in sums.items()}


def _whole(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, Gradients]:
    """The pack through a plain model in a process."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    loss = F.cross_entropy(logits[0, :-1].float(), batch["labels"][0, 1:], ignore_index=-100)
    loss.backward()
    return loss.item(), gradients_of(model)
