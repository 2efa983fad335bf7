"""Whether the ranks of several hosts reach each other where gloo listens, before gloo waits for it.

gloo itself listens at any address. Where others do not reach it, some ranks fail and the rest wait until the
timeout, with words that say nothing about the network.
"""

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from fsdp_sft._ranks.interfaces import GlooAddress, gloo_address
from fsdp_sft._ranks.message import pack, unpack

_SECONDS = 10.0  # for a connection
_TO_HEAR = timedelta(seconds=10)
_LOOK = 0.1  # seconds between looks at whether all is said
_MOST_SHOWN = 4


@dataclass(frozen=True)
class Offer:
    """Where a rank answers.

    Attributes:
        at: Where gloo listens on its host.
        port: Port at which it answers; None if it does not.
        token: What it answers, so that nothing else at that address is taken for it.
        problem: Why it does not; "" if it does.
    """

    at: GlooAddress
    port: int | None
    token: str
    problem: str


def refuse_unreachable(store: Any, rank: int, world_size: int, *, is_one_host: bool) -> None:
    """Refuse an interface of gloo that other hosts do not reach: each rank connects to those beside it.

    Args:
        store: Of torch's, over which all ranks meet.
        rank: This rank.
        world_size: Number of ranks.
        is_one_host: Whether the launcher says that all are on one host, where they do reach each other.

    Raises:
        ValueError: On all ranks, with the ranks that are not reached, their addresses, and what to do.

    Collective: all ranks, over the store: four messages of each rank, and two more that rank 0 reads of each.
    """
    beside = [] if is_one_host else sorted({(rank - 1) % world_size, (rank + 1) % world_size} - {rank})
    with _answering(gloo_address(), is_one_host=is_one_host) as own:
        store.set(f"offer-{rank}", pack(own))
        found = own.problem
        for other in beside:
            found = found or _problem(own, rank, unpack(store.get(f"offer-{other}")), other)
        store.set(f"found-{rank}", found)
        if rank == 0:
            everyone = [store.get(f"found-{other}").decode() for other in range(world_size)]
            store.set("unreached", _said(everyone))
        problem = store.get("unreached").decode()
    if not problem:
        return
    store.set(f"heard-{rank}", "")
    if rank == 0:  # which may have the store: the others lose it when this process ends
        with suppress(RuntimeError):
            store.wait([f"heard-{other}" for other in range(world_size)], _TO_HEAR)
    raise ValueError(problem)


@contextmanager
def _answering(at: GlooAddress, *, is_one_host: bool) -> Iterator[Offer]:
    """Context in which this rank answers where gloo will listen."""
    token, problem = secrets.token_hex(8), ""
    if at.asked is not None and at.asked not in at.interfaces:
        problem = f"{at.host} has no interface {at.asked} ({at.reason}): it has {', '.join(at.interfaces)}"
    elif at.address is not None and not is_one_host:
        family = socket.AF_INET6 if ":" in at.address else socket.AF_INET
        try:
            server = socket.create_server((at.address, 0), family=family)
        except OSError as error:
            problem = f"{at.host} cannot listen at {at.address} ({at.reason}): {error.strerror or error}"
        else:
            with _thread(server, token):
                yield Offer(at, server.getsockname()[1], token, "")
            return
    yield Offer(at, None, token, problem)


@contextmanager
def _thread(server: socket.socket, token: str) -> Iterator[None]:
    """Context in which a thread answers at a socket, which is closed at the end."""
    ended = threading.Event()
    thread = threading.Thread(target=_answer, args=(server, token, ended), name="fsdp_sft-reach")
    with server:
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _answer(server: socket.socket, token: str, ended: threading.Event) -> None:
    server.settimeout(_LOOK)
    while not ended.is_set():
        with suppress(OSError):
            caller, _ = server.accept()
            with caller:
                caller.sendall(token.encode())


def _problem(own: Offer, rank: int, offer: Offer, other: int) -> str:
    """Why another rank is not reached from here; "" if it is, or has itself said why it does not answer."""
    if offer.port is None or offer.at.network == own.at.network:
        return ""
    try:
        with socket.create_connection((offer.at.address, offer.port), timeout=_SECONDS) as connection:
            answer = connection.recv(len(offer.token)).decode(errors="replace")
        problem = "" if answer == offer.token else "something else answers there"
    except OSError as error:
        problem = error.strerror or str(error)
    if not problem:
        return ""
    return (
        f"rank {other} on {offer.at.host} listens at {offer.at.address} on {offer.at.interface} "
        f"({offer.at.reason}), where rank {rank} on {own.at.host} does not reach it ({problem})"
    )


def _said(found: list[str]) -> str:
    """What ranks have found, and what to do; "" if nothing is wrong."""
    wrong = list(dict.fromkeys(filter(None, found)))
    if not wrong:
        return ""
    more = f"; and {len(wrong) - _MOST_SHOWN} more" if len(wrong) > _MOST_SHOWN else ""
    return (
        f"gloo, which carries control messages, would not connect the ranks: {'; '.join(wrong[:_MOST_SHOWN])}"
        f"{more}. Set GLOO_SOCKET_IFNAME on every node to the interface of the cluster's network (ip -br addr"
        " shows them), and let nodes reach each other's ports"
    )
