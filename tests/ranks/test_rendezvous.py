"""Ranks that have met others before."""

import torch.distributed as dist

import fsdp_sft as fs
from fsdp_sft._ranks import rendezvous
from tests.harness.ranks import run_distributed


def _met_others_before() -> int:
    """What the group has as its size, on ranks of which one has met others over another store."""
    if dist.get_rank() == 1:
        rendezvous._own_keys(dist.HashStore(), 1)  # type: ignore[attr-defined,unused-ignore]
    return fs.init_distributed().world_size


def test_a_rank_that_has_met_others_before_meets_these() -> None:
    assert run_distributed(_met_others_before, 2) == [2, 2]
