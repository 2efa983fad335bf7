"""The dimension along which FSDP2 shards each parameter, and how evenly the shards fall on the ranks.

FSDP2 shards the first dimension by default, and pads every rank's shard to the size of the largest. With
eight experts and 64 ranks, eight ranks get an expert each and 56 get none, but all 64 hold memory for one.
Another dimension can be chosen only if the number of ranks divides its size.
"""

import functools
import math
from collections.abc import Iterable, Sequence

MOST_IMBALANCE = 1.05  # largest shard divided by the mean shard; above it another dimension is tried


@functools.lru_cache(maxsize=65536)
def shard_dim(shape: tuple[int, ...], num_shards: int) -> int:
    """Dimension to shard: the first, unless that is uneven and ``num_shards`` divides a later one."""
    if not shape or not math.prod(shape) or imbalance(shape[0], num_shards) <= MOST_IMBALANCE:
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % num_shards == 0), 0)


def imbalance(size: int, num_shards: int) -> float:
    """The largest shard of a dimension of ``size``, divided by the mean shard."""
    return -(-size // num_shards) * num_shards / size


def shard_numel(shape: tuple[int, ...], num_shards: int, dim: int | None = None) -> int:
    """Elements that each rank has memory for: the largest shard along ``dim`` (None: ``shard_dim``)."""
    if not shape:
        return 1
    dim = shard_dim(shape, num_shards) if dim is None else dim
    return -(-shape[dim] // num_shards) * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


def total_imbalance(shapes: Iterable[tuple[int, ...]], num_shards: int) -> float:
    """Elements of all parameters that each rank has memory for, divided by the mean of what ranks hold."""
    most = total = 0
    for shape in shapes:
        most += shard_numel(shape, num_shards)
        total += math.prod(shape)
    return most * num_shards / total if total else 1.0


def even_shards(shapes: Sequence[tuple[int, ...]], num_shards: int) -> int:
    """The largest divisor of ``num_shards`` at which the parameters lie evenly on that many ranks."""
    divisors = (n for n in range(num_shards, 1, -1) if num_shards % n == 0)
    return next((n for n in divisors if total_imbalance(shapes, n) <= MOST_IMBALANCE), 1)
