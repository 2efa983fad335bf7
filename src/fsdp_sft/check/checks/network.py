"""How fast ranks exchange data along each axis of the mesh, and whether a rank or a node slows the others."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from fsdp_sft._process.devices import device_name, synchronize
from fsdp_sft._process.gpus import known_device
from fsdp_sft._ranks.agree import all_gather_objects, all_reduce_max
from fsdp_sft.check.cluster import Cluster, axes_of
from fsdp_sft.check.mechanism import Check, Outcome, Trouble
from fsdp_sft.check.work import block_bytes

_MIB = 1 << 20
_MOST_BYTES, _ON_CPU = 2048 * _MIB, 4 * _MIB  # of a gather
_GROUP_BYTES = 16 * _MIB
_PAIR_BYTES, _PAIR_ON_CPU = 64 * _MIB, 1 * _MIB
_RUNS = 4
_TRIALS = 3  # a rank must be slow each time
# Shares: of the data sheet's link, of the other groups of an axis, and of the other pairs of ranks.
_OF_SHEET, _OF_GROUPS, _OF_PAIRS, _OF_PAIRS_ON_CPU = 0.6, 0.8, 0.6, 0.35


def _run(cluster: Cluster) -> Outcome:
    if cluster.world_size == 1:
        return Outcome(unseen="one rank exchanges nothing")
    troubles: list[Trouble] = _slow_links(cluster)
    measured: dict[str, Any] = {}
    for axis, group in axes_of(cluster).items():
        measured[axis] = {
            "ranks": group.size(),
            "spans": _spans(cluster, group),
            "bytes_per_second": _gather_rate(cluster, group),
        }
        troubles += _slow_groups(cluster, axis, group)
    troubles += _below_sheet(cluster, measured)
    said = ", ".join(
        f"{axis} {one['bytes_per_second'] / 1e9:.3g} GB/s a rank over {one['ranks']}"
        for axis, one in measured.items()
    )
    return Outcome(said, tuple(troubles), {"axes": measured})


def _spans(cluster: Cluster, group: dist.ProcessGroup) -> str:
    """Whether a group's ranks are on one node, or on several; the widest of all groups of the axis."""
    hosts = {cluster.hosts[rank] for rank in dist.get_process_group_ranks(group)}
    return "nodes" if all_reduce_max(len(hosts)) > 1 else "node"


def _gather_rate(cluster: Cluster, group: dist.ProcessGroup) -> float:
    """Bytes per second that a rank receives while a block is gathered; of the slowest group of the axis."""
    most = _MOST_BYTES if cluster.has_own_clock else _ON_CPU
    size = min(block_bytes(cluster.asked.config), most)
    slowest = max(all_gather_objects(_seconds(cluster, _gather(group, size, cluster.device))))
    return float(size * (group.size() - 1) / group.size() / slowest)


def _gather(group: dist.ProcessGroup, size: int, device: torch.device) -> Callable[[], object]:
    """A gather whose whole tensor has ``size`` bytes, rounded down to equal parts."""
    each = max(1, size // 2 // group.size())
    whole = torch.zeros(each * group.size(), dtype=torch.bfloat16, device=device)
    part = torch.zeros(each, dtype=torch.bfloat16, device=device)
    return lambda: dist.all_gather_single(whole, part, group=group)


def _seconds(cluster: Cluster, collective: Callable[[], object]) -> float:
    """Seconds of a collective on this rank, as the median of the same number of runs on all ranks."""
    collective()
    times = []
    for _ in range(_RUNS):
        synchronize(cluster.device)
        start = time.perf_counter()
        collective()
        synchronize(cluster.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _slow_groups(cluster: Cluster, axis: str, group: dist.ProcessGroup) -> list[Trouble]:
    """Groups of an axis that are slower than the others, each with its nodes."""
    if not cluster.has_own_clock:
        return []
    seconds = _seconds(cluster, _gather(group, _GROUP_BYTES, cluster.device))
    by_group: dict[tuple[int, ...], float] = {}
    for ranks, own in all_gather_objects((tuple(dist.get_process_group_ranks(group)), seconds)):
        by_group[ranks] = max(own, by_group.get(ranks, 0.0))
    usual = statistics.median(by_group.values())
    return [
        Trouble(
            "warn",
            ranks,
            f"gathers along {axis} run at {usual / own:.2f} of the rate of the other groups: look at the "
            "links of these nodes",
            leave_out=True,
        )
        for ranks, own in by_group.items()
        if own * _OF_GROUPS > usual
    ]


def _below_sheet(cluster: Cluster, measured: dict[str, Any]) -> list[Trouble]:
    gpu = known_device(device_name(cluster.device) or "")
    found = []
    for axis, one in measured.items() if gpu is not None and cluster.has_own_clock else ():
        assert gpu is not None
        link = gpu.node_bytes_per_second
        if one["spans"] == "nodes":
            link = min(link, gpu.gpus_per_node * gpu.bytes_per_second)
        rate = one["bytes_per_second"]
        if rate < _OF_SHEET * link:
            text = (
                f"gathers along {axis} reach {rate / 1e9:.3g} GB/s a GPU, and the data sheet's link has "
                f"{link / 1e9:.3g}: see NCCL_DEBUG=INFO for the network that NCCL takes"
            )
            found.append(Trouble("warn", (), text))
    return found


def _slow_links(cluster: Cluster) -> list[Trouble]:
    """Ranks all of whose links are slow: a link has two ends, and a slow rank has two slow links.

    Links inside of nodes and links between nodes are compared with their own kind: a node's first device may
    reach its neighbour, and its adapter nobody.
    """
    limit = _OF_PAIRS if cluster.has_own_clock else _OF_PAIRS_ON_CPU
    found: list[Trouble] = []
    for where, rings in _rings(cluster.hosts).items():
        best: dict[int, float] = {}
        suspects: set[int] | None = None
        for _ in range(_TRIALS):
            rates = _pair_rates(cluster, rings)
            best = {rank: max(rate, best.get(rank, 0.0)) for rank, rate in rates.items()}
            usual = statistics.median(best.values())
            now = {rank for rank, rate in best.items() if rate < limit * usual}
            suspects = now if suspects is None else suspects & now
            if not suspects:
                break
        found += _named(rings, suspects or set(), best, where)
    return found


def _named(
    rings: list[list[int]], suspects: set[int], best: dict[int, float], where: str
) -> Iterator[Trouble]:
    usual = statistics.median(best.values())
    for ring in rings:
        slow = [rank for rank in ring if rank in suspects]
        if slow and len(ring) == 2:
            rate = min(best[rank] for rank in ring)
            text = (
                f"the link between them{where} runs at {rate / usual:.2f} of the others' ({rate / 1e9:.3g} "
                "GB/s): look at the adapters and cables of both"
            )
            yield Trouble("fail", tuple(ring), text)
            continue
        for rank in slow:
            text = (
                f"its links{where} run at {best[rank] / usual:.2f} of the others' ({best[rank] / 1e9:.3g} "
                "GB/s): look at its adapter and cable, or leave the node out"
            )
            yield Trouble("fail", (rank,), text, leave_out=True)


def _rings(hosts: list[str]) -> dict[str, list[list[int]]]:
    """Rings of ranks whose links are measured: those of a host, and those of one place on each host."""
    of_host: dict[str, list[int]] = {}
    of_place: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        own = of_host.setdefault(host, [])
        of_place.setdefault(len(own), []).append(rank)
        own.append(rank)
    kinds = {"": of_host.values(), " to other nodes": of_place.values()}
    found = {where: [ring for ring in rings if len(ring) > 1] for where, rings in kinds.items()}
    return {where: rings for where, rings in found.items() if rings}


def _pair_rates(cluster: Cluster, rings: list[list[int]]) -> dict[int, float]:
    """For each rank the rate of the faster of its links to those beside it in a ring, in bytes per second."""
    rank = cluster.rank
    size = _PAIR_BYTES if cluster.has_own_clock else _PAIR_ON_CPU
    out = torch.zeros(size, dtype=torch.uint8, device=cluster.device)
    into = torch.empty_like(out)
    mine = 0.0
    for pairs in _rounds(rings):
        peer = pairs.get(rank)
        for _ in range(_RUNS):
            if peer is not None:
                mine = max(mine, 2 * size / _exchange(out, into, peer, first=rank < peer))
        all_reduce_max(0)  # rounds do not overlap
    rates: list[float] = all_gather_objects(mine)
    return {one: rates[one] for ring in rings for one in ring}


def _rounds(rings: list[list[int]]) -> list[dict[int, int]]:
    """Three rounds in which each rank meets the next of its ring, and the one before."""
    rounds: list[dict[int, int]] = [{}, {}, {}]
    for ring in rings:
        links = [(one, ring[(place + 1) % len(ring)]) for place, one in enumerate(ring)]
        for place, (a, b) in enumerate(links[: 1 if len(ring) == 2 else None]):
            is_odd_one = place == len(ring) - 1 and len(ring) % 2
            rounds[2 if is_odd_one else place % 2].update({a: b, b: a})
    return rounds


def _exchange(out: torch.Tensor, into: torch.Tensor, peer: int, *, first: bool) -> float:
    """Seconds in which a tensor goes to another rank and one comes from it.

    One after the other, and not as a batch: backends that take operations in order would wait for each other.
    """
    synchronize(out.device)
    start = time.perf_counter()
    if first:
        dist.send(out, peer)
    dist.recv(into, peer)
    if not first:
        dist.send(out, peer)
    synchronize(out.device)
    return time.perf_counter() - start


CHECK = Check(
    "network", "do ranks exchange data as fast as the plan assumes, and as each other?", 100, 30, _run
)
