"""How fast devices and hosts exchange data: one device alone, and all devices of a host at once."""

import torch

from fsdp_sft._process.streams import host_buffer
from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.mechanism import Check, Outcome, Trouble
from fsdp_sft.check.pace import all_at_once, in_turns, seconds_of

_BYTES, _SIMULATED = 256 << 20, 4 << 20
_SHARED = 0.6  # share of the rate alone below which devices of a host share a link
_SLOW = 0.6  # share of the other hosts' rate


def _run(cluster: Cluster) -> Outcome:
    if cluster.device.type == "cpu":
        return Outcome(unseen="the device is the host")
    size = _BYTES if cluster.has_own_clock else _SIMULATED
    on_host = host_buffer((size,), torch.uint8, cluster.device)
    on_device = torch.empty(size, dtype=torch.uint8, device=cluster.device)

    def both_ways() -> float:
        least = 0.05 * cluster.scale
        there = seconds_of(
            lambda: on_device.copy_(on_host, non_blocking=True), cluster.device, at_least=least
        )
        back = seconds_of(lambda: on_host.copy_(on_device, non_blocking=True), cluster.device, at_least=least)
        return size / max(there, back)

    alone = in_turns(cluster, both_ways, "copying between host and device", always=True)
    together = all_gather_objects(all_at_once(both_ways, "copying between host and device"))
    singles: list[float] = all_gather_objects(alone)
    measured = {
        "bytes_per_second": min(together),
        "alone": max(singles),
        "is_pinned": on_host.is_pinned(),
    }
    said = f"{min(singles) / 1e9:.3g} GB/s alone, {min(together) / 1e9:.3g} all at once"
    unseen = "" if on_host.is_pinned() else "pinned memory (this device has none)"
    return Outcome(said, tuple(_troubles(cluster, singles, together)), measured, unseen)


def _troubles(cluster: Cluster, alone: list[float], together: list[float]) -> list[Trouble]:
    if not cluster.has_own_clock:
        return []
    usual = sorted(alone)[len(alone) // 2]
    found = [
        Trouble(
            "warn",
            (rank,),
            f"copies between host and device run at {rate / usual:.2f} of the others' rate: look at the PCIe "
            "link and the memory's node (NUMA)",
            leave_out=True,
        )
        for rank, rate in enumerate(alone)
        if rate < _SLOW * usual
    ]
    shared = tuple(
        rank for rank, (one, all_) in enumerate(zip(alone, together, strict=True)) if all_ < _SHARED * one
    )
    if shared:
        text = (
            "devices of a node share a link to the host: copies of all at once run at less than "
            f"{_SHARED:.0%} of one alone, which the plan's offload has to know (--measured)"
        )
        found.append(Trouble("warn", shared, text))
    return found


CHECK = Check(
    "host link", "how fast do devices and hosts exchange data, alone and all at once?", 80, 10, _run
)
