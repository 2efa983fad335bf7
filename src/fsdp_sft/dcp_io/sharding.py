"""A sharding as JSON.

A manifest states a sharding once for all tensors that are sharded alike, so its size does not grow with the
number of ranks.
"""

import math
from typing import Any

from fsdp_sft._tensors.sharding import Sharding

_MOST_AXES = 8


def encode_sharding(sharding: Sharding) -> dict[str, Any]:
    """A sharding as JSON."""
    splits = [list(split) for split in sharding.splits]
    encoded: dict[str, Any] = {"mesh": list(sharding.mesh_shape), "splits": splits}
    if sharding.ranks is not None:
        encoded["ranks"] = list(sharding.ranks)
    return encoded


def parse_sharding(raw: Any, world_size: int) -> Sharding:
    """The inverse of ``encode_sharding``.

    Raises:
        ValueError: If it is not valid, or has keys that this release does not know.
    """
    unknown = sorted(raw.keys() - {"mesh", "splits", "ranks"})
    if unknown:
        raise ValueError(f"a sharding has {unknown}, unknown here: load it with the release that wrote it")
    ranks = None if raw.get("ranks") is None else tuple(raw["ranks"])
    sharding = Sharding(tuple(raw["mesh"]), ranks, tuple((axis, dim) for axis, dim in raw["splits"]))
    numbers = [*sharding.mesh_shape, *(ranks or ()), *(n for split in sharding.splits for n in split)]
    if any(type(n) is not int or n < 0 for n in numbers) or not 0 < len(sharding.mesh_shape) <= _MOST_AXES:
        raise ValueError("a sharding is not valid")
    size = math.prod(sharding.mesh_shape)
    axes = [axis for axis, _ in sharding.splits]
    valid = 0 < size <= world_size
    if ranks is not None:
        valid = valid and len(ranks) == size == len(set(ranks)) and max(ranks) < world_size
    if not valid or len(set(axes)) != len(axes) or max(axes, default=0) >= len(sharding.mesh_shape):
        raise ValueError("a sharding is not valid")
    return sharding
