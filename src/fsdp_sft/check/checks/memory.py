"""Whether the memory of all devices is as fast as that of the others."""

import torch

from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft.check.cluster import Cluster
from fsdp_sft.check.mechanism import Check, Outcome, Trouble
from fsdp_sft.check.pace import all_at_once, seconds_of, slow_ranks

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
    troubles = [
        Trouble(
            "warn" if cluster.has_own_clock else "fail",
            (one.rank,),
            f"its memory runs at {one.share:.2f} of the others' rate ({rates[one.rank] / 1e9:.3g} GB/s): "
            "look at clocks and what else runs there",
            leave_out=True,
        )
        for one in slow
    ]
    said = f"{min(rates) / 1e9:.3g} to {max(rates) / 1e9:.3g} GB/s a rank"
    return Outcome(said, tuple(troubles), {"bytes_per_second": together, "alone": max(rates)})


CHECK = Check("memory", "is each device's memory as fast as the others'?", 70, 5, _run)
