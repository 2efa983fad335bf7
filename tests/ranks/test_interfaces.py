"""Where gloo listens on this host, and ranks that have met others before."""

from unittest import mock

import pytest
import torch.distributed as dist

import fsdp_sft as fs
from fsdp_sft._ranks import rendezvous
from fsdp_sft._ranks.interfaces import gloo_address
from tests.harness.ranks import run_distributed


def _met_others_before() -> int:
    """What the group has as its size, on ranks of which one has met others over another store."""
    if dist.get_rank() == 1:
        rendezvous._own_keys(dist.HashStore(), 1)  # type: ignore[attr-defined,unused-ignore]
    return fs.init_distributed().world_size


def test_a_rank_that_has_met_others_before_meets_these() -> None:
    assert run_distributed(_met_others_before, 2) == [2, 2]


def test_where_gloo_listens_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    at = gloo_address()
    assert (at.interface, at.address, at.asked) == ("lo", "127.0.0.1", "lo")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with mock.patch("socket.getaddrinfo", side_effect=OSError("no such name")):
        assert gloo_address().address == "127.0.0.1", "as gloo does"
