"""Whether the memory of all devices is as fast as that of the others."""

import torch

from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.mechanism import Check, Outcome
from fsdp_sft.check.pace import all_at_once, seconds_of, slow_ranks, slow_troubles

_WARNS = 0.90
_BYTES, _ON_CPU = 512 << 20, 16 << 20


def _run(cluster: Cluster) -> Outcome:
    size = _BYTES if cluster.has_own_clock else _ON_CPU
    source = torch.ones(size, dtype=torch.uint8, device=cluster.device)
    target = torch.empty_like(source)

    least, moved = 0.05 * cluster.scale, 2 * size  # a copy reads and writes each byte

    def copy() -> None:
        target.copy_(source)

    def rate() -> float:
        return moved / seconds_of(copy, cluster.device, at_least=least)

    rates, slow = slow_ranks(cluster, copy, moved, "copying memory", at_least=least, warns=_WARNS)
    together = min(all_gather_objects(all_at_once(rate, "copying memory on all ranks")))
    troubles = slow_troubles(cluster, slow, "its memory runs", fails=0.0)
    said = f"{min(rates) / 1e9:.3g} to {max(rates) / 1e9:.3g} GB/s a rank"
    return Outcome(said, troubles, {"bytes_per_second": together, "alone": max(rates)})


CHECK = Check("memory", "is each device's memory as fast as the others'?", 70, 5, _run)
