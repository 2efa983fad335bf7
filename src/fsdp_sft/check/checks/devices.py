"""Whether each rank has a device of its own, with its memory free and without faults."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from fsdp_sft._process.gpus import GIB
from fsdp_sft._ranks.agree import through_rank_0
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.device_memory import memory_of_device
from fsdp_sft.check.mechanism import Check, Level, Outcome, Trouble
from fsdp_sft.check.nvml import health_of

# Shares of the memory that are free before training begins: a context of our own takes a hundredth.
_NOTED, _LEAST = 0.95, 0.8


def _run(cluster: Cluster) -> Outcome:
    if cluster.device.type == "cpu":
        return Outcome(unseen="the CPU has no memory of its own, and no counters of faults")

    def own() -> dict[str, Any]:
        uuid = _uuid(cluster.device)
        health = None if uuid is None else health_of(uuid)
        return {
            "host": cluster.hosts[cluster.rank],
            "uuid": uuid,
            "memory": memory_of_device(cluster.device),
            "health": None if health is None else asdict(health),
        }

    found: Outcome = through_rank_0("looking at the devices", own, _decide)
    count = torch.accelerator.device_count()
    if cluster.context.launcher == "single" and count > 1:
        text = f"one of the {count} devices here is checked: start with torchrun --nproc-per-node {count}"
        found = replace(found, troubles=(*found.troubles, Trouble("warn", (), text)))
    return found


def _decide(everyone: list[dict[str, Any]]) -> Outcome:
    troubles = [*_shared(everyone), *_taken(everyone), *_faults(everyone)]
    known = [one["memory"] for one in everyone if one["memory"] is not None]
    said = f"{min(free for free, _ in known) / GIB:.1f} GiB free of {known[0][1] / GIB:.1f}" if known else ""
    blind = [rank for rank, one in enumerate(everyone) if one["health"] is None]
    unseen = "faults, throttling and link width (no NVML for these devices)" if blind else ""
    if not known:
        unseen = "; ".join(filter(None, ("free memory (torch does not say)", unseen)))
    measured = {"memory_bytes": min(total for _, total in known)} if known else {}
    return Outcome(said, tuple(troubles), measured, unseen)


def _uuid(device: torch.device) -> str | None:
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    uuid = None if properties is None else getattr(properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def _shared(everyone: list[dict[str, Any]]) -> Iterator[Trouble]:
    users: dict[tuple[str, str], list[int]] = {}
    for rank, one in enumerate(everyone):
        if one["uuid"] is not None:
            users.setdefault((one["host"], one["uuid"]), []).append(rank)
    for ranks in users.values():
        if len(ranks) > 1:
            yield Trouble("fail", tuple(ranks), "they share one device: start one process per device")


def _taken(everyone: list[dict[str, Any]]) -> Iterator[Trouble]:
    for rank, one in enumerate(everyone):
        free, total = one["memory"] or (1, 1)
        if free < _NOTED * total:
            level: Level = "fail" if free < _LEAST * total else "warn"
            yield Trouble(
                level,
                (rank,),
                f"{free / GIB:.1f} of {total / GIB:.1f} GiB of its device's memory are free: another process "
                "has the rest; end it",
                leave_out=True,
            )


def _faults(everyone: list[dict[str, Any]]) -> Iterator[Trouble]:
    for rank, one in enumerate(everyone):
        health = one["health"] or {}
        if health.get("uncorrected"):
            errors = health["uncorrected"]
            yield _fault(rank, f"{errors} uncorrected memory errors: reset the GPU, or replace it")
        if health.get("remap_failed"):
            yield _fault(rank, "a row of its memory could not be replaced: replace the GPU")
        elif health.get("remap_pending"):
            yield _fault(rank, "rows of its memory wait to be replaced: reset the GPU")
        if health.get("slowed_by"):
            yield _fault(rank, f"its clocks are lowered by {health['slowed_by']}: look at cooling and power")
        width, most = health.get("pcie_width"), health.get("pcie_most")
        if width and most and width < most:
            text = f"its PCIe link has {width} of {most} lanes: reseat the card"
            yield Trouble("warn", (rank,), text, leave_out=True)


def _fault(rank: int, text: str) -> Trouble:
    return Trouble("fail", (rank,), text, leave_out=True)


CHECK = Check("devices", "has each rank a device of its own, free and without faults?", 30, 1, _run)
