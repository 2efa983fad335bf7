"""Whether clocks agree, and a host's memory, open files and shared memory are enough."""

import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_sft._process.gpus import GIB
from fsdp_sft._process.host_memory import available_host_bytes
from fsdp_sft._process.limits import open_files_limit
from fsdp_sft._ranks.agree import all_reduce_sum, through_rank_0
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.environment import usable_processors
from fsdp_sft.check.mechanism import Check, Outcome, Trouble

_TRIALS = 7  # readings of the clock: the one at which a rank was least late counts
# Seconds. Machines that ask a time server agree within 0.01; locks of folders and logs are read by the clock.
_NOTED, _MOST = 1.0, 2.5
_FEW_FILES = 4096
_LEAST_SHARED = 1 * GIB  # of /dev/shm: loaders and NCCL put what they share there
_LEAST_MEMORY = 2 * GIB  # of a host, for each of its ranks
_SHARED = Path("/dev/shm")


def _run(cluster: Cluster) -> Outcome:
    clocks = []
    for _ in range(_TRIALS):
        all_reduce_sum([0.0])  # all ranks leave it at about the same time
        clocks.append(time.time())

    def own() -> dict[str, Any]:
        shared = shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else None
        return {
            "clocks": clocks,
            "processors": usable_processors(),
            "memory": available_host_bytes(),
            "files": open_files_limit(),
            "shared": shared,
        }

    def decide(everyone: list[dict[str, Any]]) -> Outcome:
        skews = _skews([one["clocks"] for one in everyone])
        troubles = [*_late(skews), *_short(cluster, everyone)]
        widest = max(map(abs, skews))
        memory = min((one["memory"] for one in everyone if one["memory"] is not None), default=None)
        said = f"clocks within {max(widest, 0.01):.2f} s, {everyone[0]['processors']} processors"
        said += "" if memory is None else f", {memory / GIB:.0f} GiB free"
        return Outcome(said, tuple(troubles))

    found: Outcome = through_rank_0("looking at the machines", own, decide)
    return found


def _skews(clocks: list[list[float]]) -> list[float]:
    """Seconds by which each rank's clock is off that of most: at the trial at which it is least off.

    Of two ranks nobody can say which is off: the second is held against the first.
    """
    usual = [one[0] if len(one) < 3 else statistics.median_low(one) for one in zip(*clocks, strict=True)]
    return [min((now - mean for now, mean in zip(own, usual, strict=True)), key=abs) for own in clocks]


def _late(skews: list[float]) -> Iterator[Trouble]:
    for rank, skew in enumerate(skews):
        if abs(skew) > _NOTED:
            than = "that of rank 0" if len(skews) < 3 else "those of most ranks"
            way = "ahead of" if skew > 0 else "behind"
            text = f"its clock is {abs(skew):.1f} s {way} {than}: start a time service (chronyd) on the node"
            yield Trouble("fail" if abs(skew) > _MOST else "warn", (rank,), text)


def _short(cluster: Cluster, everyone: list[dict[str, Any]]) -> Iterator[Trouble]:
    for rank, one in enumerate(everyone):
        sharing = cluster.hosts.count(cluster.hosts[rank])
        if one["memory"] is not None and one["memory"] < _LEAST_MEMORY * sharing:
            text = (
                f"{one['memory'] / GIB:.1f} GiB of host memory are free for {sharing} rank"
                f"{'s' * (sharing > 1)}: ask for more (--mem), or end what has it"
            )
            yield Trouble("warn", (rank,), text)
        if one["files"] < _FEW_FILES:
            text = f"it may have {one['files']} files open: loaders and large jobs need more (ulimit -n)"
            yield Trouble("warn", (rank,), text)
        if one["shared"] is not None and one["shared"] < _LEAST_SHARED:
            text = (
                f"/dev/shm has {one['shared'] / GIB:.2f} GiB free: loaders with workers fail there; give the "
                "container more (--shm-size, --ipc=host)"
            )
            yield Trouble("warn", (rank,), text)
        usual = everyone[0]["processors"]
        if one["processors"] != usual:
            text = f"it may use {one['processors']} processors, and rank 0 {usual}: look at --cpus-per-task"
            yield Trouble("warn", (rank,), text)


CHECK = Check("machine", "do clocks agree, and has each host memory, files and processors?", 40, 2, _run)
