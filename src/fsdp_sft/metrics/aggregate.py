"""Metrics that differ between ranks, reduced to values that are the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from fsdp_sft._ranks.agree import all_gather_objects

Reduction = Literal["mean", "sum", "min", "max", "spread"]
_REDUCED: dict[str, Callable[[Collection[float | int]], float | int]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "min": min,
    "max": max,
}


def aggregate_metrics(
    metrics: Mapping[str, float | int | None], *, reduce: Reduction = "mean"
) -> dict[str, float | int | None]:
    """Reduce each metric over all ranks, in one exchange; every rank gets the same result.

    What `train_step` returns is the same on all ranks already. Memory, allocator retries and the time spent
    waiting for data are not, and one slow rank slows all of them down.

    Args:
        metrics: Numbers of this rank; the same names on every rank. None means that this rank has no value.
        reduce: `"mean"`, `"sum"`, `"min"` or `"max"` over the ranks that have a value. `"spread"` gives four
            metrics for each: `<name>_min`, `<name>_mean`, `<name>_max` and `<name>_max_rank`, the lowest rank
            that has the maximum.

    Returns:
        Metrics ready for `MetricLogger.log`. None where no rank has a value; NaN where any rank has NaN.

    Raises:
        ValueError: For ranks with different names; raised on all ranks.

    Collective: all ranks, over the control group.

    Example:
        >>> spread = fs.aggregate_metrics({"data_wait_share": 0.25}, reduce="spread")
        >>> spread["data_wait_share_max_rank"]
        0
    """
    by_rank = all_gather_objects(dict(metrics))
    for rank, row in enumerate(by_rank):
        if list(row) != list(by_rank[0]):
            raise ValueError(f"rank {rank} has metrics {sorted(row)}, rank 0 has {sorted(by_rank[0])}")
    result: dict[str, float | int | None] = {}
    for name in by_rank[0]:
        known = {rank: row[name] for rank, row in enumerate(by_rank) if row[name] is not None}
        if reduce != "spread":
            result[name] = _reduced(known.values(), reduce)
            continue
        result |= {f"{name}_{one}": _reduced(known.values(), one) for one in ("min", "mean", "max")}
        of_it = (rank for rank, value in known.items() if value == result[f"{name}_max"] or math.isnan(value))
        result[f"{name}_max_rank"] = next(of_it, None)
    return result


def _reduced(values: Collection[float | int], reduce: str) -> float | int | None:
    """The values reduced to one; None without values."""
    if not values:
        return None
    if any(math.isnan(value) for value in values):
        return math.nan
    return _REDUCED[reduce](values)
