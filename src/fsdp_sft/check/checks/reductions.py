"""Whether collectives give what they have to: gathers, sums and means of known numbers, in the dtypes used.

A reduction that returns zeros or leaves a rank out trains on without a word:
https://github.com/pytorch/pytorch/issues/190745.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_sft._ranks.agree import all_gather_objects
from fsdp_sft.check.cluster import Cluster, axes_of
from fsdp_sft.check.mechanism import Check, Outcome, Trouble

_EACH = 1024  # elements of a rank's part
_DTYPES = (torch.float32, torch.bfloat16)
_LARGEST = {torch.float32: 32, torch.bfloat16: 2}  # sums below 256 are exact in bfloat16


def _run(cluster: Cluster) -> Outcome:
    if cluster.world_size == 1:
        return Outcome(unseen="one rank reduces nothing")
    wrong: dict[str, list[int]] = {}
    unsupported: set[str] = set()
    for axis, group in axes_of(cluster).items():
        for dtype in _DTYPES:
            for name, collective in _COLLECTIVES.items():
                named = f"{name} of {str(dtype).removeprefix('torch.')} along {axis}"
                found = all_gather_objects(_try(collective, group, dtype, cluster.device))
                if None in found:
                    unsupported.add(name)
                    continue
                bad = [rank for rank, is_right in enumerate(found) if not is_right]
                if bad:
                    wrong[named] = bad
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for named, ranks in wrong.items():
        by_ranks.setdefault(tuple(ranks), []).append(named)
    troubles = [
        Trouble(
            "fail",
            ranks,
            f"wrong results: {', '.join(names[:4])}{' and others' if len(names) > 4 else ''}: gradients "
            "would be wrong too; try another version of torch or of NCCL, or NCCL_ALGO=Ring",
        )
        for ranks, names in by_ranks.items()
    ]
    unseen = f"{', '.join(sorted(unsupported))} (the backend has none)" if unsupported else ""
    return Outcome("" if wrong else "gathers, sums and means are exact", tuple(troubles), unseen=unseen)


def _numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings: small whole numbers, other ones on each rank and at each place."""
    # None is below 0, so that no sum is 0, which is what a reduction that does nothing may leave.
    place = torch.arange(count)
    return ((place * 7 + rank * 13 + place // 5 * rank) % (_LARGEST[dtype] + 1)).to(dtype)


def _try(
    collective: Callable[..., bool], group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> bool | None:
    """Whether a collective is right on this rank; None if the backend does not have it."""
    try:
        return collective(group, dtype, device)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if any(
            word in str(error).lower()
            for word in ("not support", "unsupported", "only available", "cannot use")
        ):
            return None
        raise


def _is(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(torch.equal(found.cpu().double(), expected.double()))


def _gather(group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> bool:
    whole = torch.full((_EACH * group.size(),), -77, dtype=dtype, device=device)
    dist.all_gather_single(whole, _numbers(group.rank(), _EACH, dtype).to(device), group=group)
    return _is(whole, torch.cat([_numbers(rank, _EACH, dtype) for rank in range(group.size())]))


def _total(group: dist.ProcessGroup, dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.stack([_numbers(rank, count, dtype).double() for rank in range(group.size())]).sum(0)


def _scatter(
    op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> bool:
    count = _EACH * group.size()
    part = torch.full((_EACH,), -77, dtype=dtype, device=device)
    dist.reduce_scatter_single(part, _numbers(group.rank(), count, dtype).to(device), op=op, group=group)
    own = _total(group, dtype, count)[group.rank() * _EACH :][:_EACH]
    return _judged(part, own, op, group)


def _reduce(
    op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> bool:
    own = _numbers(group.rank(), _EACH, dtype).to(device)
    dist.all_reduce(own, op=op, group=group)
    return _judged(own, _total(group, dtype, _EACH), op, group)


def _judged(
    found: torch.Tensor, total: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> bool:
    """Whether a reduction is exact; a mean, and a sum over very many ranks, may be rounded."""
    wide = found.cpu().double()
    if op != dist.ReduceOp.AVG and float(total.max()) <= 256:
        return bool(torch.equal(wide, total))
    expected = total / group.size() if op == dist.ReduceOp.AVG else total
    coarse = 2.0**-6 if found.dtype == torch.bfloat16 else 2.0**-18
    return bool((wide - expected).abs().max() <= coarse * expected.max())


_COLLECTIVES: dict[str, Callable[..., bool]] = {
    "all_gather": _gather,
    "reduce_scatter (sum)": lambda *args: _scatter(dist.ReduceOp.SUM, *args),
    "reduce_scatter (mean)": lambda *args: _scatter(dist.ReduceOp.AVG, *args),
    "all_reduce (sum)": lambda *args: _reduce(dist.ReduceOp.SUM, *args),
    "all_reduce (mean)": lambda *args: _reduce(dist.ReduceOp.AVG, *args),
}
CHECK = Check("reductions", "are gathers, sums and means of known numbers right?", 95, 5, _run)
