"""How many ranks could share a row of a model, and the memory that each number of them needs."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fsdp_sft.attention.context_parallel import check_shareable
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.planner.estimate import MemoryEstimate, estimate
from fsdp_sft.planner.model import build_skeleton
from fsdp_sft.planner.setup import Setup
from fsdp_sft.planner.trace import trace


def group_sizes(config: Any, setup: Setup, options: dict[str, Any]) -> list[int]:
    """Numbers of ranks that could share a row, ascending; only ``cp`` if it is given."""
    if "cp" in options:
        return [setup.cp]
    divisors = group_divisors(config, setup)
    return [1, *divisors] if divisors and _can_share(config, replace(setup, cp=divisors[0])) else [1]


def group_divisors(config: Any, setup: Setup) -> list[int]:
    """Numbers of ranks, 2 or more, that divide a replica's ranks and the model's query heads.

    Empty with expert parallelism, which rules out context parallelism.
    """
    if setup.ep_size > 1:
        return []
    model, found = build_skeleton(config, setup).model, []
    for ranks in range(2, setup.num_shards + 1):
        if setup.num_shards % ranks == 0:
            with suppress(ValueError):
                check_shareable(model, ranks)
                found.append(ranks)
    return found


def _can_share(config: Any, setup: Setup) -> bool:
    """Whether ranks can share rows of this model: whether it can be traced so."""
    try:
        trace(build_skeleton(config, setup), setup)
    except UnsupportedModelError:
        return False
    return True


def least_by_group(config: Any, setup: Setup, sizes: list[int]) -> Iterator[MemoryEstimate]:
    """The estimates for these numbers of ranks that share a row."""
    return (estimate(config, replace(setup, cp=cp)) for cp in sizes)
