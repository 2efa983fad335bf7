"""How much a gather slows the products beside it: for the planner."""

import time
from typing import Any

import torch

from fsdp_sft._process.devices import synchronize
from fsdp_sft._ranks.agree import all_gather_objects, all_reduce_max, share
from fsdp_sft.check.cluster import Cluster, axes_of
from fsdp_sft.check.collectives import gather
from fsdp_sft.check.mechanism import Check, Outcome
from fsdp_sft.check.pace import seconds_of
from fsdp_sft.check.work import block_shapes, make_product

_BYTES, _ON_CPU = 256 << 20, 2 << 20
_GATHERS = 4
_TRIALS = 3


def _run(cluster: Cluster) -> Outcome:
    axes = axes_of(cluster)
    if not axes:
        return Outcome(unseen="one rank exchanges nothing")
    group = next(reversed(axes.values()))  # the axis along which parameters are gathered comes last
    size = _BYTES if cluster.has_own_clock else _ON_CPU
    each = max(1, size // 2 // group.size())
    part = torch.zeros(each, dtype=torch.bfloat16, device=cluster.device)
    whole = torch.zeros(each * group.size(), dtype=torch.bfloat16, device=cluster.device)
    dtype = torch.bfloat16 if cluster.has_own_clock else torch.float32
    product = make_product(block_shapes(cluster.asked.config)[-1], cluster.device, dtype)
    once = seconds_of(product.run, cluster.device, at_least=0.02)

    def begin() -> list[Any]:
        return [gather(whole, part, group, async_op=True) for _ in range(_GATHERS)]

    def gathers() -> float:
        all_reduce_max(0)
        synchronize(cluster.device)
        start = time.perf_counter()
        for work in begin():
            work.wait()
        synchronize(cluster.device)
        return time.perf_counter() - start

    def timed(products: int, *, gathering: bool) -> float:
        all_reduce_max(0)
        synchronize(cluster.device)
        start = time.perf_counter()
        works = begin() if gathering else []
        for _ in range(products):
            product.run()
        spent = _until_computed(cluster.device, start)
        for work in works:
            work.wait()
        synchronize(cluster.device)
        return spent

    gathers()
    alone = min(gathers() for _ in range(_TRIALS))
    # As many products as take about as long as the gathers.
    products = int(share(max(1, round(alone / max(once, 1e-9)))))
    without = min(timed(products, gathering=False) for _ in range(_TRIALS))
    beside = min(timed(products, gathering=True) for _ in range(_TRIALS))
    slowed = max(0.0, beside - without) / max(min(without, alone), 1e-9)
    shares = sorted(all_gather_objects(slowed))
    usual = shares[len(shares) // 2]
    return Outcome(
        f"a second of gathers slows the products beside it by {usual:.2f} s", measured={"share": usual}
    )


def _until_computed(device: torch.device, start: float) -> float:
    """Seconds until the current stream has done its work; gathers run on another, and may go on."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
    return time.perf_counter() - start


CHECK = Check("contention", "how much do gathers slow the products beside them?", 110, 5, _run)
