"""Along which dimension FSDP2 cuts each parameter, and how evenly that falls on the ranks.

FSDP2 cuts the first dimension unless told otherwise, and pads each rank's part to the largest: of eight
experts over 64 ranks eight ranks get one and 56 get none, while all 64 keep room for one. Another dimension
can be chosen only where its size divides evenly.
"""

import functools
import math
from collections.abc import Iterable, Sequence

MOST_IMBALANCE = 1.05  # the largest part over the mean; above it another dimension is looked for


@functools.lru_cache(maxsize=65536)
def shard_dim(shape: tuple[int, ...], num_shards: int) -> int:
    """The first dimension, or if that is uneven the next one that ``num_shards`` divides, if there is one."""
    if not shape or not math.prod(shape) or imbalance(shape[0], num_shards) <= MOST_IMBALANCE:
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % num_shards == 0), 0)


def imbalance(size: int, num_shards: int) -> float:
    """The largest part of a dimension over the mean."""
    return -(-size // num_shards) * num_shards / size


def shard_numel(shape: tuple[int, ...], num_shards: int, dim: int | None = None) -> int:
    """Elements that each rank has memory for: the largest part along ``dim``, else ``shard_dim``."""
    if not shape:
        return 1
    dim = shard_dim(shape, num_shards) if dim is None else dim
    return -(-shape[dim] // num_shards) * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


def total_imbalance(shapes: Iterable[tuple[int, ...]], num_shards: int) -> float:
    """What the rank with the most has over the mean, of all parameters together."""
    most = total = 0
    for shape in shapes:
        most += shard_numel(shape, num_shards)
        total += math.prod(shape)
    return most * num_shards / total if total else 1.0


def even_shards(shapes: Sequence[tuple[int, ...]], num_shards: int) -> int:
    """The most ranks, of the divisors of ``num_shards``, over which the parameters lie evenly."""
    divisors = (n for n in range(num_shards, 1, -1) if num_shards % n == 0)
    return next((n for n in divisors if total_imbalance(shapes, n) <= MOST_IMBALANCE), 1)
