"""What a job's devices compute, what collectives give and how fast, and the job's folder."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

from fsdp_sft._process.devices import synchronize
from fsdp_sft._ranks.agree import agreed, all_gather_objects
from fsdp_sft._ranks.mesh import exchange_groups
from fsdp_sft._tensors.disk import sync_file
from fsdp_sft.check import CheckedJob, Found, Problem

_MIB = 1 << 20


# --- products ---------------------------------------------------------------------------------------------

# Rows, outputs, inputs. Entries are -1, 0 and 1, so sums stay below 256, which bfloat16 has exactly: with
# 2,048 terms of a mean square of 4/9 that is eight and a half standard deviations.
_SHAPE, _SHAPE_ON_CPU = (4096, 14336, 2048), (128, 1024, 1024)
_TRIALS, _PRODUCTS, _PRODUCTS_ON_CPU = 3, 200, 1  # products of a run: some tenths of a second
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
    everyone = all_gather_objects(torch.equal(found, expected))
    text = "products are wrong: the device or its memory is damaged; leave the node out and have it tested"
    bad = [rank for rank, is_right in enumerate(everyone) if not is_right]
    problems = [Problem("fail", (rank,), text, exclude=True) for rank in bad]
    rates = _rates(job, a, b)
    job.measured["flops_per_second"] = min(rates)
    exact = f"{'not ' if bad else ''}exact in {str(a.dtype).removeprefix('torch.')}"
    said = f"{exact}, {min(rates) / 1e12:.3g} to {max(rates) / 1e12:.3g} TFLOP/s a rank"
    if job.is_accelerated:
        return said, [*problems, *_slow_devices(rates)]
    return f"{said}; not seen: slow devices (ranks share processors)", problems


def exact_product(job: CheckedJob) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a, b, weights, ``a @ b.T @ weights``) of whole numbers that are multiplied exactly.

    ``a`` and ``b`` are on the device, in bfloat16, which processors may lack: there they are float32.
    """
    rows, outputs, inputs = _SHAPE if job.is_accelerated else _SHAPE_ON_CPU
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-1, 2, (rows, inputs), generator=generator, dtype=torch.int8)
    b = torch.randint(-1, 2, (outputs, inputs), generator=generator, dtype=torch.int8)
    weights = (torch.randint(8, (outputs,), generator=generator) * 2 - 7).double()  # odd, so that none is 0
    expected = a.double() @ (b.double().T @ weights)
    dtype = torch.bfloat16 if job.is_accelerated else torch.float32
    return a.to(job.context.device, dtype), b.to(job.context.device, dtype), weights, expected


def _rates(job: CheckedJob, a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """FLOP/s of each rank; all measure again while one is in doubt, and the median counts."""
    repeats = _PRODUCTS if job.is_accelerated else _PRODUCTS_ON_CPU
    amount, own, rates = repeats * 2.0 * a.shape[0] * b.numel(), [], []
    for _ in range(_TRIALS):
        with agreed("timing"):
            own.append(
                amount / _fastest(partial(torch.nn.functional.linear, a, b), job.context.device, repeats)
            )
        rates = all_gather_objects(statistics.median(own))
        if min(rates) >= _RATE_WARNS * statistics.median_high(rates):
            break
    return rates


def _slow_devices(rates: list[float]) -> Iterator[Problem]:
    usual = statistics.median_high(rates)  # of two ranks the slower is held against the faster
    for rank, rate in enumerate(rates):
        if rate < _RATE_WARNS * usual:
            text = (
                f"products run at {rate / usual:.2f} of the others' rate: look at clocks, heat, power and "
                "what else runs there, or leave the node out"
            )
            yield Problem("fail" if rate < _RATE_FAILS * usual else "warn", (rank,), text, exclude=True)


# --- reductions -------------------------------------------------------------------------------------------

_LARGEST = {torch.float32: 32, torch.bfloat16: 2}  # sums below 256 are exact in bfloat16
_ROUNDING = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-6}  # of a mean, and of a larger sum


def reductions(job: CheckedJob) -> Found:
    """Whether gathers, sums and means of known numbers are right, in the dtypes and along the axes used.

    A reduction that returns zeros or leaves a rank out trains on without a word:
    https://github.com/pytorch/pytorch/issues/190745.
    """
    if job.context.world_size == 1:
        return "not seen: one rank reduces nothing", []
    wrong = [
        f"{name} of {str(dtype).removeprefix('torch.')} along {axis}"
        for (axis, group), dtype in product(exchange_groups(job.mesh).items(), _LARGEST)
        for name in _wrong(job, group, dtype)
    ]
    advice = "gradients would be wrong too; try another version of torch or of NCCL, or NCCL_ALGO=Ring"
    problems = [
        Problem("fail", (rank,), f"wrong results: {', '.join(names)}: {advice}")
        for rank, names in enumerate(all_gather_objects(wrong))
        if names
    ]
    return f"{'not all' if problems else 'all'} gathers and reductions are exact", problems


def _wrong(job: CheckedJob, group: dist.ProcessGroup, dtype: torch.dtype) -> Iterator[str]:
    """The collectives of small whole numbers, others on each rank and at each place, that are wrong here."""
    ranks, rank = group.size(), group.rank()
    each = max(64, (1 << 14) // ranks)
    place, whose = torch.arange(each * ranks), torch.arange(ranks)[:, None]
    # None is below 0, so that no sum is 0, which is what a reduction that does nothing may leave.
    numbers = (place * 7 + whose * 13 + place // 5 * whose) % (_LARGEST[dtype] + 1)
    own, total = numbers[rank].to(job.context.device, dtype), numbers.sum(0).double()
    gathered = own.new_full((numbers.numel(),), -77)
    dist.all_gather_single(gathered, own, group=group)
    if not torch.equal(gathered.cpu().long(), numbers.flatten()):
        yield "all_gather"
    ways = {"sum": (dist.ReduceOp.SUM, total), "mean": (dist.ReduceOp.AVG, total / ranks)}
    # FSDP2 takes sums where a backend has no means, such as gloo.
    for how in ways if "nccl" in job.context.backend else ("sum",):
        op, expected = ways[how]
        part, reduced = own.new_full((each,), -77), own.clone()
        dist.reduce_scatter_single(part, own, op=op, group=group)
        dist.all_reduce(reduced, op=op, group=group)
        is_exact = how == "sum" and float(total.max()) <= 256
        most = 0.0 if is_exact else _ROUNDING[dtype] * float(expected.max())
        if not (part.cpu().double() - expected.view(ranks, each)[rank]).abs().max() <= most:
            yield f"reduce_scatter ({how})"
        if not (reduced.cpu().double() - expected).abs().max() <= most:
            yield f"all_reduce ({how})"


# --- network ----------------------------------------------------------------------------------------------

_GATHERED, _GATHERED_ON_CPU = 256 * _MIB, 4 * _MIB
_SENT, _SENT_ON_CPU = 64 * _MIB, 1 * _MIB
_RUNS = 4
_SLOW, _SLOW_ON_CPU = 0.6, 0.35  # of the other links' rate, in each trial


def network(job: CheckedJob) -> Found:
    """How fast ranks gather along each axis, and whether all links of a rank are slow."""
    if job.context.world_size == 1:
        return "not seen: one rank exchanges nothing", []
    rates = {axis: _gather_rate(job, group) for axis, group in exchange_groups(job.mesh).items()}
    job.measured["bytes_per_second"] = rates
    said = [f"{axis} {rate / 1e9:.3g} GB/s a rank" for axis, rate in rates.items()]
    # Links are compared with their own kind: a node's first device may reach its neighbour, and its adapter
    # nobody. So the ranks of a host are a ring, and those of one place on each host.
    places = [job.hosts[:rank].count(host) for rank, host in enumerate(job.hosts)]
    kinds = {"": _rings(job.hosts), " to other nodes": _rings(places)}
    return ", ".join(said), [one for where, rings in kinds.items() for one in _slow(job, rings, where)]


def _gather_rate(job: CheckedJob, group: dist.ProcessGroup) -> float:
    """Bytes per second that a rank receives in a gather; of the slowest group of the axis."""
    each = (_GATHERED if job.is_accelerated else _GATHERED_ON_CPU) // group.size()
    with agreed("making room for a gather"):
        whole = torch.zeros(each * group.size(), dtype=torch.uint8, device=job.context.device)
        part = whole[:each].clone()
    seconds = _fastest(lambda: dist.all_gather_single(whole, part, group=group), job.context.device)
    return float(each * (group.size() - 1) / max(all_gather_objects(seconds)))


def _fastest(work: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Seconds of the fastest of some runs, after the one that connects ranks or chooses kernels."""
    times = []
    for _ in range(1 + _RUNS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _rings(places: Sequence[str | int]) -> list[list[int]]:
    """The ranks that are at the same place, where there are several."""
    rings = [[rank for rank, own in enumerate(places) if own == place] for place in dict.fromkeys(places)]
    return [ring for ring in rings if len(ring) > 1]


def _slow(job: CheckedJob, rings: list[list[int]], where: str) -> Iterator[Problem]:
    """Ranks all of whose links are slow: a link has two ends, and a slow rank has two slow links."""
    limit = _SLOW if job.is_accelerated else _SLOW_ON_CPU
    best = {rank: 0.0 for ring in rings for rank in ring}
    slow, usual = sorted(best), 0.0
    for _ in range(_TRIALS):
        if slow:
            rates = _link_rates(job, rings)
            best = {rank: max(rates[rank], known) for rank, known in best.items()}
            usual = statistics.median(best.values())
            slow = [rank for rank in slow if best[rank] < limit * usual]
    for rank in slow:  # of two ranks that have one link both
        rate = f"{best[rank] / usual:.2f} of the others' ({best[rank] / 1e9:.3g} GB/s)"
        text = f"its links{where} run at {rate}: look at adapters and cables"
        yield Problem("fail", (rank,), text, exclude=True)


def _link_rates(job: CheckedJob, rings: list[list[int]]) -> list[float]:
    """For each rank the rate of the faster of its links to those beside it in a ring, in bytes per second."""
    size = _SENT if job.is_accelerated else _SENT_ON_CPU
    with agreed("making room for what is sent"):
        out = torch.zeros(size, dtype=torch.uint8, device=job.context.device)
        into, mine = torch.empty_like(out), 0.0
    own: list[int] = next((ring for ring in rings if job.context.rank in ring), [])
    for step in range(max(map(len, rings))):  # one link of a ring after the other
        ends = {own[(step + more) % len(own)] for more in (0, 1)} if step < len(own) else set()
        if job.context.rank in ends:
            (peer,) = ends - {job.context.rank}
            exchange = partial(_exchange, out, into, peer, first=job.context.rank < peer)
            mine = max(mine, 2 * size / _fastest(exchange, job.context.device))
        all_gather_objects(None)
    return all_gather_objects(mine)


def _exchange(out: torch.Tensor, into: torch.Tensor, peer: int, *, first: bool) -> None:
    """Send a tensor to another rank, and receive one from it.

    One after the other, and not as a batch: backends that take operations in order would wait for each other.
    """
    turns = [(dist.send, out), (dist.recv, into)]
    for turn, tensor in turns if first else reversed(turns):
        turn(tensor, peer)


# --- folder -----------------------------------------------------------------------------------------------

_SEEN_WITHIN, _LOOK = 5.0, 0.1  # seconds after which every rank has to see a rename, and between two looks


def folder(job: CheckedJob) -> Found:
    """Whether all ranks can write to the run's folder, and see it all where rank 0 has renamed it."""
    if job.folder is None:
        return "not seen: no folder", []
    why, old, new = "", job.folder / "old", job.folder / "new"
    try:
        old.mkdir(exist_ok=True)
        (old / f"file {job.context.rank}").write_bytes(bytes(1 << 20))
        sync_file(old / f"file {job.context.rank}")
        os.listdir(job.folder)  # a client that remembers a listing remembers this one
    except OSError as error:
        why = f"{error.strerror or error}"
    told: list[str] = all_gather_objects(why)
    if any(told):
        text = "the folder cannot be written ({}): mount it on every node, make room or take another --root"
        job.folder = None  # nothing after this can use it
        return "", [Problem("fail", (rank,), text.format(one)) for rank, one in enumerate(told) if one]
    with agreed("renaming a folder"):
        if job.context.rank == 0:
            os.rename(old, new)
    files, sees = {f"file {rank}" for rank in range(job.context.world_size)}, False
    deadline = time.monotonic() + _SEEN_WITHIN
    while not sees and time.monotonic() < deadline:
        with suppress(OSError):  # as of a client whose handle is stale
            names = {old.name, new.name} & set(os.listdir(job.folder))
            sees = names == {new.name} and files == set(os.listdir(new))
        time.sleep(0.0 if sees else _LOOK)
    text = (
        f"does not see what rank 0 has renamed, within {_SEEN_WITHIN:.0f} s: checkpoints appear by a rename; "
        "mount the folder without caching (noac), or take another"
    )
    blind = [rank for rank, one in enumerate(all_gather_objects(sees)) if not one]
    return (
        "" if blind else "files are written and renamed, and all ranks see it",
        [Problem("fail", (rank,), text) for rank in blind],
    )
