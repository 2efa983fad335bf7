"""What devices compute, what collectives give and how fast, and whether all ranks see the run's folder."""

import math
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from fsdp_sft._process.devices import synchronize
from fsdp_sft._ranks.agree import agreed, all_gather_objects
from fsdp_sft._tensors.disk import sync_file
from fsdp_sft.check.job import CheckedJob, Found, Problem, axes_of

_MIB = 1 << 20

# --- products ---------------------------------------------------------------------------------------------

_SHAPE, _SHAPE_ON_CPU = (4096, 14336, 4096), (128, 1024, 1024)  # rows, outputs, inputs
# Entries are -1, 0 and 1, so few of them not 0 that sums stay below 256, which bfloat16 has exactly: sums of
# a mean square of 900 pass it by eight and a half standard deviations.
_EXACT_TERMS = 900.0
_TRIALS, _TRIAL_SECONDS = 3, 0.25
# Healthy devices keep their rate within 5 %:
# https://github.com/stas00/ml-engineering/tree/master/compute/accelerator.
_RATE_WARNS, _RATE_FAILS = 0.95, 0.85


def products(job: CheckedJob) -> Found:
    """Whether all devices multiply rightly, and as fast as each other."""
    with agreed("multiplying"):
        a, b, weights, expected = exact_product(job)
        result = torch.nn.functional.linear(a, b)
        # The rows that are wrong (Freivalds' algorithm), by the host.
        found = torch.cat([rows.double().cpu() @ weights for rows in result.split(1024)])
    everyone: list[bool] = all_gather_objects(torch.equal(found, expected))
    text = "products are wrong: the device or its memory is damaged; leave the node out and have it tested"
    bad = [rank for rank, is_right in enumerate(everyone) if not is_right]
    problems = [Problem("fail", (rank,), text, exclude=True) for rank in bad]
    rates = _rates(lambda: torch.nn.functional.linear(a, b), 2.0 * a.shape[0] * b.numel())
    job.measured["flops_per_second"] = min(rates)
    said = f"{'not ' if bad else ''}exact in {str(a.dtype).removeprefix('torch.')}, "
    said += f"{min(rates) / 1e12:.3g} to {max(rates) / 1e12:.3g} TFLOP/s a rank"
    if job.is_accelerated:
        return said, [*problems, *_slow_devices(rates)]
    return f"{said}; not seen: slow devices (ranks share processors)", problems


def exact_product(job: CheckedJob) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a, b, weights, ``a @ b.T @ weights``) of whole numbers that are multiplied exactly.

    ``a`` and ``b`` are on the device, in bfloat16, which processors may lack: there they are float32.
    """
    rows, outputs, inputs = _SHAPE if job.is_accelerated else _SHAPE_ON_CPU
    a, b = _signs(rows, inputs, seed=1), _signs(outputs, inputs, seed=2)
    generator = torch.Generator().manual_seed(3)
    weights = (torch.randint(8, (outputs,), generator=generator) * 2 - 7).double()  # odd, so that none is 0
    parts = zip(b.split(1024), weights.split(1024), strict=True)
    inner = torch.stack([part.double().T @ of for part, of in parts]).sum(0)
    expected = torch.cat([part.double() @ inner for part in a.split(1024)])
    dtype = torch.bfloat16 if job.is_accelerated else torch.float32
    return a.to(job.device, dtype), b.to(job.device, dtype), weights, expected


def _signs(rows: int, columns: int, *, seed: int) -> torch.Tensor:
    """-1, 0 and 1, independent, of which so many are not 0 that a sum of ``columns`` products stays small."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(1 << 15, (rows, columns), generator=generator, dtype=torch.int16)
    found = (drawn % 2 * 2 - 1).to(torch.int8)
    found[(drawn >> 1) >= round(min(0.8, math.sqrt(_EXACT_TERMS / columns)) * (1 << 14))] = 0
    return found


def _rates(work: Callable[[], object], amount: float) -> list[float]:
    """What each rank does per second; all measure again while one is in doubt, and the median counts."""
    own, rates = [], []
    for _ in range(_TRIALS):
        with agreed("timing"):
            own.append(amount / _seconds_of(work))
        rates = all_gather_objects(statistics.median(own))
        if min(rates) >= _RATE_WARNS * statistics.median_high(rates):
            break
    return rates


def _seconds_of(work: Callable[[], object]) -> float:
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=_TRIAL_SECONDS).median)


def _slow_devices(rates: list[float]) -> Iterator[Problem]:
    usual = statistics.median_high(rates)  # of two ranks the slower is held against the faster
    for rank, rate in enumerate(rates):
        if rate < _RATE_WARNS * usual:
            text = f"products run at {rate / usual:.2f} of the others' rate: look at clocks, heat, power and "
            text += "what else runs there, or leave the node out"
            yield Problem("fail" if rate < _RATE_FAILS * usual else "warn", (rank,), text, exclude=True)


# --- reductions -------------------------------------------------------------------------------------------

_LARGEST = {torch.float32: 32, torch.bfloat16: 2}  # sums below 256 are exact in bfloat16
_COLLECTIVES = {
    "all_gather": ("all_gather", None),
    "reduce_scatter (sum)": ("reduce_scatter", dist.ReduceOp.SUM),
    "reduce_scatter (mean)": ("reduce_scatter", dist.ReduceOp.AVG),
    "all_reduce (sum)": ("all_reduce", dist.ReduceOp.SUM),
    "all_reduce (mean)": ("all_reduce", dist.ReduceOp.AVG),
}
_UNSUPPORTED = re.compile("not support|unsupported|only available|cannot use", re.IGNORECASE)


def reductions(job: CheckedJob) -> Found:
    """Whether gathers, sums and means of known numbers are right, in the dtypes and along the axes used.

    A reduction that returns zeros or leaves a rank out trains on without a word:
    https://github.com/pytorch/pytorch/issues/190745.
    """
    if job.context.world_size == 1:
        return "not seen: one rank reduces nothing", []
    wrong: dict[tuple[int, ...], list[str]] = {}
    unsupported: set[str] = set()
    for (axis, group), dtype, (name, how) in product(axes_of(job).items(), _LARGEST, _COLLECTIVES.items()):
        try:
            is_right = _is_right(group, dtype, job.device, *how)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            if not _UNSUPPORTED.search(str(error)):
                raise
            is_right = None
        found = all_gather_objects(is_right)
        bad = tuple(rank for rank, own in enumerate(found) if not own)
        if None in found:
            unsupported.add(name)
        elif bad:
            wrong.setdefault(bad, []).append(f"{name} of {str(dtype).removeprefix('torch.')} along {axis}")
    advice = "gradients would be wrong too; try another version of torch or of NCCL, or NCCL_ALGO=Ring"
    problems = [
        Problem("fail", ranks, f"wrong results: {', '.join(names)}: {advice}")
        for ranks, names in wrong.items()
    ]
    missing = f"; not seen: {', '.join(sorted(unsupported))} (the backend has none)" if unsupported else ""
    return f"{'not all' if wrong else 'all'} gathers, sums and means are exact{missing}", problems


def _is_right(
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
    kind: str,
    op: dist.ReduceOp.RedOpType | None,
) -> bool | None:
    """Whether a collective of small whole numbers, others on each rank and at each place, is exact."""
    ranks, rank = group.size(), group.rank()
    each = max(64, (1 << 14) // ranks)
    place, whose = torch.arange(each * ranks), torch.arange(ranks)[:, None]
    # None is below 0, so that no sum is 0, which is what a reduction that does nothing may leave.
    numbers = (place * 7 + whose * 13 + place // 5 * whose) % (_LARGEST[dtype] + 1)
    own = numbers[rank].to(device, dtype)
    total = numbers.sum(0).double()
    coarse = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-18  # a mean, and a large sum, may be rounded
    if op != dist.ReduceOp.AVG and float(total.max()) <= 256:
        coarse = 0.0
    expected = total / ranks if op == dist.ReduceOp.AVG else total
    if kind == "all_gather":
        found, expected = own.new_full((numbers.numel(),), -77), numbers.flatten().double()
        dist.all_gather_single(found, own, group=group)
    elif kind == "reduce_scatter":
        found, expected = own.new_full((each,), -77), expected.view(ranks, each)[rank]
        dist.reduce_scatter_single(found, own, op=op, group=group)
    else:
        found = own
        dist.all_reduce(found, op=op, group=group)
    return bool((found.cpu().double() - expected).abs().max() <= coarse * expected.max())


# --- network ----------------------------------------------------------------------------------------------

_GATHERED, _GATHERED_ON_CPU = 256 * _MIB, 4 * _MIB
_SENT, _SENT_ON_CPU = 64 * _MIB, 1 * _MIB
_RUNS = 4
_SLOW, _SLOW_ON_CPU = 0.6, 0.35  # of the other links' rate, in each trial


def network(job: CheckedJob) -> Found:
    """How fast ranks gather along each axis, and whether all links of a rank are slow."""
    if job.context.world_size == 1:
        return "not seen: one rank exchanges nothing", []
    rates = {axis: _gather_rate(job, group) for axis, group in axes_of(job).items()}
    job.measured["bytes_per_second"] = rates
    said = [f"{axis} {rate / 1e9:.3g} GB/s a rank" for axis, rate in rates.items()]
    return ", ".join(said), [one for where, rings in _rings(job).items() for one in _slow(job, rings, where)]


def _gather_rate(job: CheckedJob, group: dist.ProcessGroup) -> float:
    """Bytes per second that a rank receives in a gather; of the slowest group of the axis."""
    each = (_GATHERED if job.is_accelerated else _GATHERED_ON_CPU) // group.size()
    whole = torch.zeros(each * group.size(), dtype=torch.uint8, device=job.device)
    part = whole[:each].clone()
    seconds = _fastest(lambda: dist.all_gather_single(whole, part, group=group), job.device)
    return float(each * (group.size() - 1) / max(all_gather_objects(seconds)))


def _fastest(exchange: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of some exchanges, after the one that connects ranks."""
    times = []
    for _ in range(1 + _RUNS):
        synchronize(device)
        start = time.perf_counter()
        exchange()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _rings(job: CheckedJob) -> dict[str, list[list[int]]]:
    """Rings of ranks whose links are measured: those of a host, and those of one place on each host.

    The two are compared with their own kind: a node's first device may reach its neighbour, and its adapter
    nobody.
    """
    of_host: dict[str, list[int]] = {}
    of_place: dict[int, list[int]] = {}
    for rank, host in enumerate(job.hosts):
        own = of_host.setdefault(host, [])
        of_place.setdefault(len(own), []).append(rank)
        own.append(rank)
    kinds = {"": of_host.values(), " to other nodes": of_place.values()}
    found = {where: [ring for ring in rings if len(ring) > 1] for where, rings in kinds.items()}
    return {where: rings for where, rings in found.items() if rings}


def _slow(job: CheckedJob, rings: list[list[int]], where: str) -> Iterator[Problem]:
    """Ranks all of whose links are slow: a link has two ends, and a slow rank has two slow links."""
    limit = _SLOW if job.is_accelerated else _SLOW_ON_CPU
    best: dict[int, float] = {}
    slow: set[int] = set()
    usual = 0.0
    for _ in range(_TRIALS):
        rates = _link_rates(job, rings)
        best = {rank: max(rate, best.get(rank, 0.0)) for rank, rate in rates.items()}
        usual = statistics.median(best.values())
        slow = {rank for rank, rate in best.items() if rate < limit * usual}
        if not slow:
            return
    for ring in rings:
        for ranks in [tuple(ring)] if len(ring) == 2 else [(rank,) for rank in ring]:
            if slow.intersection(ranks):
                rate, whose = min(best[rank] for rank in ranks), "the link between them"
                text = f"{whose if len(ranks) == 2 else 'its links'}{where} run at {rate / usual:.2f} of the "
                text += f"others' ({rate / 1e9:.3g} GB/s): look at adapters and cables"
                yield Problem("fail", ranks, text, exclude=len(ranks) == 1)


def _link_rates(job: CheckedJob, rings: list[list[int]]) -> dict[int, float]:
    """For each rank the rate of the faster of its links to those beside it in a ring, in bytes per second."""
    size = _SENT if job.is_accelerated else _SENT_ON_CPU
    out = torch.zeros(size, dtype=torch.uint8, device=job.device)
    into, mine = torch.empty_like(out), 0.0
    own: list[int] = next((ring for ring in rings if job.rank in ring), [])
    for step in range(max(map(len, rings))):  # one link of a ring after the other
        ends = {own[(step + more) % len(own)] for more in (0, 1)} if step < len(own) else set()
        if job.rank in ends:
            (peer,) = ends - {job.rank}
            exchange = partial(_exchange, out, into, peer, first=job.rank < peer)
            mine = max(mine, 2 * size / _fastest(exchange, job.device))
        all_gather_objects(None)
    rates: list[float] = all_gather_objects(mine)
    return {one: rates[one] for ring in rings for one in ring}


def _exchange(out: torch.Tensor, into: torch.Tensor, peer: int, *, first: bool) -> None:
    """Send a tensor to another rank, and receive one from it.

    One after the other, and not as a batch: backends that take operations in order would wait for each other.
    """
    if first:
        dist.send(out, peer)
    dist.recv(into, peer)
    if not first:
        dist.send(out, peer)


# --- folder -----------------------------------------------------------------------------------------------

_SEEN_WITHIN, _LOOK = 5.0, 0.1  # seconds after which every rank has to see a rename, and between two looks
_ADVICE = "checkpoints appear by a rename; mount the folder without caching (noac), or take another"


def folder(job: CheckedJob) -> Found:
    """Whether all ranks can write to the run's folder, and see what the others have renamed."""
    if job.folder is None:
        return "not seen: no folder", [job.folder_problem] if job.folder_problem is not None else []
    why, ranks = "", range(job.context.world_size)
    try:
        before = job.folder / f"old-{job.rank}"
        before.mkdir()
        (before / "file").write_bytes(bytes(1 << 20))
        sync_file(before / "file")
        os.listdir(job.folder)  # a client that remembers a listing remembers this one
        os.rename(before, job.folder / f"new-{job.rank}")
    except OSError as error:
        why = f"{error.strerror or error}"
    told: list[str] = all_gather_objects(why)
    if any(told):
        text = "the folder cannot be written ({}): make room or take another --root"
        failed = {one: tuple(rank for rank in ranks if told[rank] == one) for one in told if one}
        job.folder = None  # nothing after this can use it
        return "", [Problem("fail", some, text.format(one)) for one, some in failed.items()]
    unseen, deadline = set(ranks), time.monotonic() + _SEEN_WITHIN
    while unseen and time.monotonic() < deadline:
        names = set(os.listdir(job.folder))
        unseen = {rank for rank in ranks if f"new-{rank}" not in names or f"old-{rank}" in names}
        time.sleep(_LOOK if unseen else 0.0)
    problems = _unseen(all_gather_objects(sorted(unseen)))
    return "" if problems else "files are written and renamed, and all ranks see it", problems


def _unseen(told: list[list[int]]) -> list[Problem]:
    """Who does not see whose rename: a rank that sees hardly any, or one whose rename hardly any sees."""
    ranks = len(told)
    blind = tuple(rank for rank, missing in enumerate(told) if len(missing) > ranks / 2)
    votes = Counter(whose for rank, missing in enumerate(told) if rank not in blind for whose in missing)
    lost = tuple(sorted(votes)) if len(blind) < ranks else tuple(range(ranks))
    text = f"renames of the other ranks are not seen within {_SEEN_WITHIN:.0f} s: {_ADVICE}"
    found = [Problem("fail", blind, text)] if blind and len(blind) < ranks else []
    text = f"what these ranks rename is not seen under its new name within {_SEEN_WITHIN:.0f} s: {_ADVICE}"
    return [*found, Problem("fail", lost, text)] if lost else found
