"""What three steps of a few planned layers take: seconds, and the peak of memory beside the planner's."""

import gc
import statistics
import time
from typing import Any

import torch

from fsdp_sft._process.devices import device_name, synchronize
from fsdp_sft._process.gpus import GIB, known_device
from fsdp_sft._process.host_memory import available_host_bytes
from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.device_memory import memory_of_device
from fsdp_sft.check.layers import fitting_layers, layers_in, time_for, written
from fsdp_sft.check.mechanism import Check, Outcome, Trouble
from fsdp_sft.check.training import make_batches, sharded_model
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
    dtype = torch.bfloat16 if cluster.has_own_clock else torch.float32
    config, why_not = fitting_layers(cluster, dtype, parameter_bytes=_A_PARAMETER, room=_room(cluster))
    if why_not:
        return Outcome(unseen=why_not)
    length = cluster.asked.seq_length or _length(config, _LENGTH if cluster.has_own_clock else _ON_CPU)
    rows = cluster.asked.micro_batch_size
    gc.collect()  # models of other checks, whose modules refer to each other
    held = memory_stats(cluster.device).get("allocated_bytes", 0)
    with time_for(cluster, config):
        seconds = _steps(cluster, config, dtype, rows, length)
    peak = memory_stats(cluster.device).get("peak_allocated_bytes")
    every = all_gather_objects((seconds, None if peak is None else peak - held))
    took = max(one for one, _ in every)
    peaks = [peak for _, peak in every if peak is not None]
    measured = {"seconds": took, "seq_length": length, "micro_batch_size": rows, "layers": layers_in(config)}
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
            f"{layers_in(config)} layers take {max(peaks) / GIB:.2f} GiB, and the planner says "
            f"{planned / GIB:.2f}: leave more of the memory free than the plan does"
        )
        troubles.append(Trouble("warn", (), text))
    return Outcome(f"{said} (planned {planned / GIB:.2f})", tuple(troubles), measured)


def _steps(cluster: Cluster, config: Any, dtype: torch.dtype, rows: int, length: int) -> float:
    """Seconds of the median step on this rank."""
    batches, own = make_batches(cluster, config, rows=rows, length=length)
    model = sharded_model(cluster, written(cluster, config), dtype)
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
    return statistics.median(seconds[1:])


def _length(config: Any, usual: int) -> int:
    """Tokens of a row, for which a model with few positions has embeddings."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return usual if not isinstance(positions, int) or usual < positions else positions // 2


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


CHECK = Check("steps", "what do three steps of a few planned layers take?", 140, 10, _run)
