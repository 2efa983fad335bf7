"""Whether the ranks of several hosts reach each other where gloo listens, before gloo waits for it.

gloo itself listens at any address. Where others do not reach it, some ranks fail and the rest wait until the
timeout, with words that say nothing about the network.
"""

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
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
    """

    at: GlooAddress
    port: int | None
    token: str


def refuse_unreachable(store: Any, rank: int, world_size: int) -> None:
    """Refuse an interface of gloo that other hosts do not reach: each rank connects to those beside it.

    Args:
        store: Of torch's, over which all ranks meet, with a prefix that nothing else has.
        rank: This rank.
        world_size: Number of ranks.

    Raises:
        ValueError: On all ranks, with the ranks that are not reached, their addresses, and what to do.

    Collective: all ranks, over the store: up to eight messages of each rank, and one that rank 0 reads of
    each. Ranks of one host do not connect.
    """
    at, found = gloo_address(), ""
    store.set(f"address-{rank}", pack(at))
    if not at.is_there:
        found = f"{at.host} has no interface {at.asked} ({at.reason}): it has {', '.join(at.interfaces)}"
    beside = {(rank - 1) % world_size, (rank + 1) % world_size} - {rank} if at.is_there else set()
    addresses: dict[int, GlooAddress] = {other: unpack(store.get(f"address-{other}")) for other in beside}
    apart = [other for other, one in addresses.items() if one.is_there and one.network != at.network]
    with _answering(at) if apart else nullcontext() as own:
        if own is not None:
            store.set(f"offer-{rank}", pack(own))
        for other in apart:
            found = found or _problem(at, rank, unpack(store.get(f"offer-{other}")), other)
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
def _answering(at: GlooAddress) -> Iterator[Offer]:
    """Context in which this rank answers where gloo will listen, if it can."""
    token = secrets.token_hex(8)
    with ExitStack() as stack:
        port = None
        if at.address is not None:  # None: an interface without an IPv4 address
            family = socket.AF_INET6 if ":" in at.address else socket.AF_INET
            with suppress(OSError):  # gloo will not be able to listen there either, and says so
                server = stack.enter_context(socket.create_server((at.address, 0), family=family))
                stack.enter_context(_thread(server, token))
                port = server.getsockname()[1]
        yield Offer(at, port, token)


@contextmanager
def _thread(server: socket.socket, token: str) -> Iterator[None]:
    """Context in which a thread answers at a socket."""
    ended = threading.Event()
    thread = threading.Thread(target=_answer, args=(server, token, ended), name="fsdp_sft-reach")
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


def _problem(at: GlooAddress, rank: int, offer: Offer, other: int) -> str:
    """Why another rank is not reached from here; "" if it is, or does not answer anywhere."""
    if offer.port is None:
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
        f"({offer.at.reason}), where rank {rank} on {at.host} does not reach it ({problem})"
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
