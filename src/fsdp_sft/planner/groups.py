"""What a search may choose: how many ranks share a row of a model, and how the optimizer updates."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

from fsdp_sft.attention.context_parallel import check_shareable
from fsdp_sft.errors import UnsupportedModelError
from fsdp_sft.planner.model import build_skeleton
from fsdp_sft.planner.setup import Setup
from fsdp_sft.planner.trace import trace


def with_leanest_update(setup: Setup, options: dict[str, Any]) -> Setup:
    """The setup with fused AdamW, which makes no copies, unless an optimizer was asked for."""
    if "optimizer" in options or setup.device.name == "cpu":
        return setup
    return replace(setup, optimizer="adamw_fused")


def group_sizes(config: Any, setup: Setup, options: dict[str, Any]) -> list[int]:
    """Numbers of ranks that could share a row, ascending; only ``cp`` if it is given."""
    if "cp" in options:
        return [setup.cp]
    divisors = group_divisors(config, setup)
    if divisors:
        with suppress(UnsupportedModelError):  # a model that cannot be traced so
            trace(build_skeleton(config, setup), replace(setup, cp=divisors[0]))
            return [1, *divisors]
    return [1]


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
