"""What devices compute, what collectives give and how fast, and whether all ranks see the run's folder."""

import math
import os
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_sft._process.devices import synchronize
from fsdp_sft._ranks.agree import agreed, all_gather_objects
from fsdp_sft._tensors.disk import sync_file
from fsdp_sft._tensors.safetensors import bytes_of
from fsdp_sft.check.job import Found, Job, Problem, axes_of

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


def products(job: Job) -> Found:
    """Whether all devices multiply rightly, and as fast as each other."""
    with agreed("multiplying"):
        a, b, weights, expected = exact_product(job)
        result = torch.nn.functional.linear(a, b)
        # The rows that are wrong (Freivalds' algorithm), by the host.
        found = torch.cat([rows.double().cpu() @ weights for rows in result.split(1024)])
        wrong, total = int((found != expected).sum()), checksum(result)
    everyone: list[tuple[int, int]] = all_gather_objects((wrong, total))
    right = next((total for wrong, total in everyone if not wrong), everyone[0][1])
    text = "products are wrong: the device or its memory is damaged; leave the node out and have it tested"
    bad = [rank for rank, own in enumerate(everyone) if own != (0, right)]
    problems = [Problem("fail", (rank,), text, exclude=True) for rank in bad]
    said = f"{'exact' if not bad else 'not exact'} in {str(a.dtype).removeprefix('torch.')}"
    if not job.is_accelerated:
        return f"{said}; not seen: rates (ranks share processors)", problems
    rates = _rates(job, lambda: torch.nn.functional.linear(a, b), 2.0 * math.prod(_SHAPE))
    job.measured["flops_per_second"] = min(rates)
    return f"{said}, {min(rates) / 1e12:.3g} to {max(rates) / 1e12:.3g} TFLOP/s a rank", [
        *problems,
        *_slow_devices(rates),
    ]


def exact_product(job: Job) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
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


def checksum(result: torch.Tensor) -> int:
    """A checksum of a tensor's bytes."""
    return zlib.crc32(bytes_of(result.detach().cpu().contiguous()))


def _rates(job: Job, work: Callable[[], object], amount: float) -> list[float]:
    """What each rank does per second; all measure again while one is in doubt, and the median counts."""
    own, rates = [], []
    for _ in range(_TRIALS):
        with agreed("timing"):
            own.append(amount / _seconds_of(work, job.device))
        rates = all_gather_objects(statistics.median(own))
        if min(rates) >= _RATE_WARNS * statistics.median_high(rates):
            break
    return rates


def _seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``work`` takes, as the mean of so many calls that they take ``_TRIAL_SECONDS``."""
    work()  # the first call compiles, allocates and chooses
    runs, spent = 1, 0.0
    while spent < _TRIAL_SECONDS:
        runs *= 2
        synchronize(device)
        start = time.perf_counter()
        for _ in range(runs):
            work()
        synchronize(device)
        spent = time.perf_counter() - start
    return spent / runs


def _slow_devices(rates: list[float]) -> Iterator[Problem]:
    usual = statistics.median_high(rates)  # of two ranks the slower is held against the faster
    for rank, rate in enumerate(rates):
        if rate < _RATE_WARNS * usual:
            text = f"products run at {rate / usual:.2f} of the others' rate: look at clocks, heat, power and "
            text += "what else runs there, or leave the node out"
            yield Problem("fail" if rate < _RATE_FAILS * usual else "warn", (rank,), text, exclude=True)


# --- reductions -------------------------------------------------------------------------------------------

_EACH = 1024  # elements of a rank's part
_LARGEST = {torch.float32: 32, torch.bfloat16: 2}  # sums below 256 are exact in bfloat16


def reductions(job: Job) -> Found:
    """Whether gathers, sums and means of known numbers are right, in the dtypes and along the axes used.

    A reduction that returns zeros or leaves a rank out trains on without a word:
    https://github.com/pytorch/pytorch/issues/190745.
    """
    if job.context.world_size == 1:
        return "not seen: one rank reduces nothing", []
    wrong: dict[tuple[int, ...], list[str]] = {}
    unsupported: set[str] = set()
    for axis, group in axes_of(job).items():
        for dtype in _LARGEST:
            for name, collective in _COLLECTIVES.items():
                found = all_gather_objects(_try(collective, group, dtype, job.device))
                bad = tuple(rank for rank, is_right in enumerate(found) if not is_right)
                if None in found:
                    unsupported.add(name)
                elif bad:
                    named = f"{name} of {str(dtype).removeprefix('torch.')} along {axis}"
                    wrong.setdefault(bad, []).append(named)
    advice = "gradients would be wrong too; try another version of torch or of NCCL, or NCCL_ALGO=Ring"
    problems = [
        Problem("fail", ranks, f"wrong results: {', '.join(names)}: {advice}")
        for ranks, names in wrong.items()
    ]
    missing = f"; not seen: {', '.join(sorted(unsupported))} (the backend has none)" if unsupported else ""
    return f"{'not all' if wrong else 'all'} gathers, sums and means are exact{missing}", problems


def _numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings: small whole numbers, other ones on each rank and at each place."""
    # None is below 0, so that no sum is 0, which is what a reduction that does nothing may leave.
    place = torch.arange(count)
    return ((place * 7 + rank * 13 + place // 5 * rank) % (_LARGEST[dtype] + 1)).to(dtype)


def _try(
    collective: Callable[..., bool], group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> bool | None:
    """Whether a collective is right on this rank; None if the backend does not have it."""
    words = ("not support", "unsupported", "only available", "cannot use")
    try:
        return collective(group, dtype, device)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if any(word in str(error).lower() for word in words):
            return None
        raise


def _gather(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> bool:
    whole = torch.full((_EACH * group.size(),), -77, dtype=dtype, device=device)
    dist.all_gather_single(whole, _numbers(group.rank(), _EACH, dtype).to(device), group=group)
    expected = torch.cat([_numbers(rank, _EACH, dtype) for rank in range(group.size())])
    return torch.equal(whole.cpu(), expected)


def _scatter(
    op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> bool:
    count = _EACH * group.size()
    part = torch.full((_EACH,), -77, dtype=dtype, device=device)
    dist.reduce_scatter_single(part, _numbers(group.rank(), count, dtype).to(device), op=op, group=group)
    own = slice(group.rank() * _EACH, (group.rank() + 1) * _EACH)
    return _is_reduced(part, op, group, count, own)


def _reduce(
    op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> bool:
    own = _numbers(group.rank(), _EACH, dtype).to(device)
    dist.all_reduce(own, op=op, group=group)
    return _is_reduced(own, op, group, _EACH, slice(None))


def _is_reduced(
    found: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, count: int, part: slice
) -> bool:
    """Whether a reduction is exact; a mean, and a sum over very many ranks, may be rounded."""
    numbers = [_numbers(rank, count, found.dtype).double() for rank in range(group.size())]
    expected, wide = torch.stack(numbers).sum(0)[part], found.cpu().double()
    if op != dist.ReduceOp.AVG and float(expected.max()) <= 256:
        return torch.equal(wide, expected)
    expected = expected / group.size() if op == dist.ReduceOp.AVG else expected
    coarse = 2.0**-6 if found.dtype == torch.bfloat16 else 2.0**-18
    return bool((wide - expected).abs().max() <= coarse * expected.max())


_COLLECTIVES: dict[str, Callable[..., bool]] = {
    "all_gather": _gather,
    "reduce_scatter (sum)": lambda *args: _scatter(dist.ReduceOp.SUM, *args),
    "reduce_scatter (mean)": lambda *args: _scatter(dist.ReduceOp.AVG, *args),
    "all_reduce (sum)": lambda *args: _reduce(dist.ReduceOp.SUM, *args),
    "all_reduce (mean)": lambda *args: _reduce(dist.ReduceOp.AVG, *args),
}

# --- network ----------------------------------------------------------------------------------------------

_GATHERED, _GATHERED_ON_CPU = 256 * _MIB, 4 * _MIB
_SENT, _SENT_ON_CPU = 64 * _MIB, 1 * _MIB
_RUNS = 4
_SLOW, _SLOW_ON_CPU = 0.6, 0.35  # of the other links' rate, in each trial


def network(job: Job) -> Found:
    """How fast ranks gather along each axis, and whether all links of a rank are slow."""
    if job.context.world_size == 1:
        return "not seen: one rank exchanges nothing", []
    rates = {axis: _gather_rate(job, group) for axis, group in axes_of(job).items()}
    job.measured["bytes_per_second"] = rates
    said = [f"{axis} {rate / 1e9:.3g} GB/s a rank" for axis, rate in rates.items()]
    return ", ".join(said), [one for where, rings in _rings(job).items() for one in _slow(job, rings, where)]


def _gather_rate(job: Job, group: dist.ProcessGroup) -> float:
    """Bytes per second that a rank receives in a gather; of the slowest group of the axis."""
    each = (_GATHERED if job.is_accelerated else _GATHERED_ON_CPU) // group.size()
    whole = torch.zeros(each * group.size(), dtype=torch.uint8, device=job.device)
    part, times = whole[:each].clone(), []
    for _ in range(1 + _RUNS):
        synchronize(job.device)
        start = time.perf_counter()
        dist.all_gather_single(whole, part, group=group)
        synchronize(job.device)
        times.append(time.perf_counter() - start)
    return float(each * (group.size() - 1) / max(all_gather_objects(statistics.median(times[1:]))))


def _rings(job: Job) -> dict[str, list[list[int]]]:
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


def _slow(job: Job, rings: list[list[int]], where: str) -> Iterator[Problem]:
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


def _link_rates(job: Job, rings: list[list[int]]) -> dict[int, float]:
    """For each rank the rate of the faster of its links to those beside it in a ring, in bytes per second."""
    size = _SENT if job.is_accelerated else _SENT_ON_CPU
    out = torch.zeros(size, dtype=torch.uint8, device=job.device)
    into, mine = torch.empty_like(out), 0.0
    for pairs in _rounds(rings):
        peer = pairs.get(job.rank)
        for _ in range(_RUNS if peer is not None else 0):
            assert peer is not None
            mine = max(mine, 2 * size / _exchange(out, into, peer, first=job.rank < peer))
        all_gather_objects(None)  # rounds do not overlap
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


# --- folder -----------------------------------------------------------------------------------------------

_WRITTEN = 4 * _MIB
_SEEN_WITHIN, _LOOK = 5.0, 0.1  # seconds after which every rank has to see a rename, and between two looks
_ADVICE = (
    "checkpoints appear by a rename; mount the folder without caching of attributes (noac), or take another"
)


def folder(job: Job) -> Found:
    """Whether all ranks can write to the run's folder, and see what the others have renamed and written."""
    if job.folder is None:
        return "not seen: no folder", [job.folder_problem] if job.folder_problem is not None else []
    why, ranks = "", range(job.context.world_size)
    try:
        _write(job.folder, job.rank)
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
    peer = (job.rank + 1) % len(ranks)
    is_same = peer in unseen or _reads(job.folder, peer)
    everyone: list[tuple[list[int], bool]] = all_gather_objects((sorted(unseen), is_same))
    problems = _unseen([missing for missing, _ in everyone])
    stale = tuple(rank for rank, (_, is_right) in enumerate(everyone) if not is_right)
    if stale:
        text = "what another rank has written is read as something else: do not use this folder"
        problems.append(Problem("fail", stale, text))
    return "written, renamed and read" if not problems else "", problems


def _content(rank: int) -> bytes:
    return rank.to_bytes(8, "little") * (_WRITTEN // 8)


def _write(folder: Path, rank: int) -> None:
    """Write a file to the disk, and rename its folder."""
    before = folder / f"old-{rank}"
    before.mkdir()
    (before / "file").write_bytes(_content(rank))
    sync_file(before / "file")
    os.listdir(folder)  # a client that remembers a listing remembers this one
    os.rename(before, folder / f"new-{rank}")


def _reads(folder: Path, rank: int) -> bool:
    try:
        return (folder / f"new-{rank}" / "file").read_bytes() == _content(rank)
    except OSError:
        return False


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
