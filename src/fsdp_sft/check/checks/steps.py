"""What three steps of two planned layers take: seconds, and the peak of memory beside the planner's."""

import statistics
import time

import torch

from fsdp_sft._process.devices import device_name, synchronize
from fsdp_sft._process.gpus import GIB, known_device
from fsdp_sft._process.host_memory import available_host_bytes
from fsdp_sft._ranks.agree import agreed, all_gather_objects, share
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.device_memory import memory_of_device
from fsdp_sft.check.mechanism import Check, Outcome, Trouble
from fsdp_sft.check.training import make_batches, parameters_of, sharded_model, two_layers, write_model
from fsdp_sft.metrics import memory_stats, reset_peak_memory
from fsdp_sft.planner.estimate import estimate_memory
from fsdp_sft.planner.run import Run
from fsdp_sft.step import train_step

_LENGTH, _ON_CPU = 4096, 64
_STEPS = 3
_NOTED = 0.10  # of the planner's peak
_A_PARAMETER = 24  # bytes on all ranks together: shards, gradients, two moments, and a gathered layer


def _run(cluster: Cluster) -> Outcome:
    if cluster.folder is None:
        return Outcome(unseen=cluster.no_folder)
    config = two_layers(cluster.asked.config, is_fast=cluster.has_own_clock)
    need = _A_PARAMETER * parameters_of(config)
    if share(_room(cluster) < need):
        return Outcome(unseen=f"two layers take about {need / GIB:.1f} GiB, and less is free")
    dtype = torch.bfloat16 if cluster.has_own_clock else torch.float32
    source = cluster.folder / "two-layers"
    with agreed("writing two layers of the model"):
        if cluster.rank == 0 and not source.exists():
            write_model(config, source)
    length = cluster.asked.seq_length or (_LENGTH if cluster.has_own_clock else _ON_CPU)
    rows = cluster.asked.micro_batch_size
    batches, own = make_batches(cluster, config, rows=rows, length=length)
    model = sharded_model(cluster, source, dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=cluster.has_own_clock)
    seconds = []
    for step in range(_STEPS + 1):
        if step == 1:  # the first step has made the optimizer's states, and has compiled what is compiled
            reset_peak_memory(cluster.device)
        synchronize(cluster.device)
        start = time.perf_counter()
        train_step(model, [batches.of(own)], optimizer, check_labels=False)
        synchronize(cluster.device)
        seconds.append(time.perf_counter() - start)
    stats = memory_stats(cluster.device)
    every = all_gather_objects((statistics.median(seconds[1:]), stats.get("peak_allocated_bytes")))
    took = max(one for one, _ in every)
    peaks = [peak for _, peak in every if peak is not None]
    measured = {"seconds": took, "seq_length": length, "micro_batch_size": rows, "layers": 2}
    said = f"{took:.3g} s a step of {rows} x {length} tokens a rank"
    if not peaks:
        return Outcome(said, measured=measured, unseen="the peak of memory (a CPU's is the process's)")
    measured["peak_bytes"] = max(peaks)
    planned = _planned(cluster, config, length)
    said += f", peak {max(peaks) / GIB:.2f} GiB"
    if planned is None:
        return Outcome(said, measured=measured)
    measured["planned_bytes"] = planned
    troubles = []
    if max(peaks) > (1 + _NOTED) * planned:
        text = (
            f"two layers take {max(peaks) / GIB:.2f} GiB, and the planner says {planned / GIB:.2f}: "
            "leave more of the memory free than the plan does"
        )
        troubles.append(Trouble("warn", (), text))
    return Outcome(f"{said} (planned {planned / GIB:.2f})", tuple(troubles), measured)


def _room(cluster: Cluster) -> int:
    """Bytes that all ranks of a device or host have together."""
    known = memory_of_device(cluster.device)
    if known is not None:
        return known[0] * cluster.world_size
    return (available_host_bytes() or 1 << 62) // 2


def _planned(cluster: Cluster, config: object, length: int) -> int | None:
    """The planner's peak for the same; None for a device that it does not know."""
    asked, gpu = cluster.asked, known_device(device_name(cluster.device) or "")
    if gpu is None or asked.frozen_dtype is not None or asked.compile:
        return None
    run = Run(
        num_gpus=cluster.world_size,
        micro_batch_size=asked.micro_batch_size,
        seq_length=length,
        gpu=gpu.name,
        dp_replicate=asked.replicas,
        cp=asked.cp,
        ep_size=asked.ep_size,
        optimizer="adamw_fused",
        attention_mask=False,
    )
    return estimate_memory(config, run).peak_bytes  # type: ignore[arg-type]


CHECK = Check("steps", "what do three steps of two planned layers take?", 140, 10, _run)
