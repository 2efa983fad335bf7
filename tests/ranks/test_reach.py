"""Ranks of several hosts that do not reach each other where gloo listens are named before gloo waits."""

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from fsdp_sft._ranks import reach
from fsdp_sft._ranks.interfaces import GlooAddress, gloo_address

HERE = gloo_address()


def _met(ranks: int, change: Callable[[int, GlooAddress], GlooAddress], **options: Any) -> list[str]:
    """What each rank is told, each on a host of its own; ranks are threads."""
    store = dist.HashStore()  # type: ignore[attr-defined,unused-ignore]
    own = threading.local()

    def address() -> GlooAddress:
        alone = dataclasses.replace(HERE, host=f"n{own.rank}", network=f"net {own.rank}", address="127.0.0.1")
        return change(own.rank, alone)

    def join(rank: int) -> str:
        own.rank = rank
        try:
            reach.refuse_unreachable(store, rank, ranks, **{"is_one_host": False, **options})
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
    refusing = contextlib.contextmanager(lambda at, **_: iter([reach.Offer(at, 1, "token", "")]))
    real = reach._answering
    monkeypatch.setattr(
        reach, "_answering", lambda at, **_: (refusing if at.host == "n1" else real)(at, is_one_host=False)
    )
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
    told = _met(
        2,
        lambda rank, at: dataclasses.replace(at, asked="ib7", address=None) if rank == 1 else at,
        is_one_host=is_one_host,
    )
    assert told[0] == told[1]
    assert f"n1 has no interface ib7 (GLOO_SOCKET_IFNAME=ib7): it has {', '.join(HERE.interfaces)}" in told[0]


def test_where_gloo_listens_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    at = gloo_address()
    assert (at.interface, at.address, at.asked) == ("lo", "127.0.0.1", "lo")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with mock.patch("socket.getaddrinfo", side_effect=OSError("no such name")):
        assert gloo_address().address == "127.0.0.1", "as gloo does"
    assert gloo_address().network == HERE.network
