"""Ranks of several hosts that do not reach each other where gloo listens are named before gloo waits."""

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist

import fsdp_sft as fs
from fsdp_sft._ranks import reach, rendezvous
from fsdp_sft._ranks.interfaces import GlooAddress, gloo_address
from tests.harness.ranks import run_distributed

HERE = gloo_address()


def _met(ranks: int, change: Callable[[int, GlooAddress], GlooAddress]) -> list[str]:
    """What each rank is told, each on a host of its own; ranks are threads."""
    store = dist.HashStore()  # type: ignore[attr-defined,unused-ignore]
    own = threading.local()

    def address() -> GlooAddress:
        alone = dataclasses.replace(HERE, host=f"n{own.rank}", network=f"net {own.rank}", address="127.0.0.1")
        return change(own.rank, alone)

    def join(rank: int) -> str:
        own.rank = rank
        try:
            reach.refuse_unreachable(store, rank, ranks)
        except ValueError as error:
            return str(error)
        return ""

    with mock.patch.object(reach, "gloo_address", address), ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(join, range(ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_hosts_that_reach_each_other_are_let_in(ranks: int) -> None:
    assert _met(ranks, lambda _, at: at) == [""] * ranks
    assert not [one for one in threading.enumerate() if one.name == "fsdp_sft-reach"]


def test_the_rank_that_is_not_reached_is_named_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = contextlib.contextmanager(lambda at: iter([reach.Offer(at, 1, "token")]))
    real = reach._answering
    monkeypatch.setattr(reach, "_answering", lambda at: (refusing if at.host == "n1" else real)(at))
    told = _met(3, lambda _, at: dataclasses.replace(at, asked="lo", interface="lo"))
    assert told[0] == told[1] == told[2]
    named = (
        r"rank 1 on n1 listens at 127\.0\.0\.1 on lo \(GLOO_SOCKET_IFNAME=lo\), where rank (0|2) on n\1 does"
    )
    assert re.search(named, told[0]), told[0]
    assert "rank 0 on n0 listens" not in told[0]
    assert "rank 2 on n2 listens" not in told[0]


def test_what_answers_in_the_place_of_a_rank_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = reach._answer
    monkeypatch.setattr(reach, "_answer", lambda server, _, ended: answer(server, "another program", ended))
    for told in _met(2, lambda _, at: at):
        assert "something else answers there" in told


@pytest.mark.parametrize("is_one_host", [False, True])
def test_an_interface_that_is_not_there_is_told_with_those_that_are(*, is_one_host: bool) -> None:
    def change(rank: int, at: GlooAddress) -> GlooAddress:
        at = dataclasses.replace(at, network="one" if is_one_host else at.network)
        return dataclasses.replace(at, asked="ib7", address=None) if rank == 1 else at

    told = _met(3, change)
    assert told[0] == told[1] == told[2]
    assert f"n1 has no interface ib7 (GLOO_SOCKET_IFNAME=ib7): it has {', '.join(HERE.interfaces)}" in told[0]


def test_ranks_of_one_host_do_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_answering", None)
    assert _met(3, lambda _, at: dataclasses.replace(at, network="one")) == ["", "", ""]


def _met_again() -> str:
    """What a process group of the caller's own says, on hosts that do not reach each other."""
    rank = dist.get_rank()
    apart = dataclasses.replace(gloo_address(), host=f"n{rank}", network=f"net {rank}", address="127.0.0.1")
    silent = mock.patch.object(reach, "_answer", lambda server, _, ended: ended.wait())
    with (
        mock.patch.object(reach, "gloo_address", return_value=apart),
        mock.patch.object(reach, "_SECONDS", 0.5),
        silent,
    ):
        try:
            fs.init_distributed()
        except ValueError as error:
            return str(error)
    return ""


def test_a_process_group_of_the_callers_own_is_looked_at_too() -> None:
    told = run_distributed(_met_again, 2)
    assert told[0] == told[1]
    assert "rank 0 on n0 listens at 127.0.0.1" in told[0]


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
    assert gloo_address().network == HERE.network
