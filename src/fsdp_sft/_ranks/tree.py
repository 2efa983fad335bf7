"""Bytes from all ranks to rank 0 and back, along a binomial tree.

A rank talks only to its parent and its children. N - 1 messages go up and N - 1 down, and a rank takes part
in at most log2 N of each. gloo's own ``all_reduce`` and ``all_gather`` use a ring, in which every rank sends
N messages.

The parent of rank r is r without its lowest set bit. Its children are r + 1, r + 2, r + 4, ... below that
bit. Eight ranks::

    0 --+-- 1
        +-- 2 --- 3
        +-- 4 --+-- 5
                +-- 6 --- 7
"""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_sft.errors import RemoteRankError

Combine = Callable[[bytes, bytes], bytes]

_HEAD = struct.Struct("<BqI96p")  # the news; length of the payload; the call by number and by name
_FINE, _LOST, _APART = range(3)
_AGAIN = ", which one of them has come to more often (other numbers of rows, micro-batches or steps)"
_INLINE_BYTES = 512  # size of a message's first part, which both ends know; short payloads fit into it
_MOST_BYTES = 1 << 28  # per message, whose length gloo limits


@dataclass(frozen=True)
class Call:
    """What a rank exchanges a message for.

    Attributes:
        kind: What has to be the same on all ranks.
        site: Where the call is, for an error.
    """

    kind: str = ""
    site: str = ""


@dataclass(frozen=True)
class _News:
    """Why an exchange fails: a lost rank, or ranks in different calls."""

    kind: int
    text: str


class Tree:
    """The tree over a gloo group of all ranks.

    A rank that cannot reach another one, or finds it in another call, tells its neighbours before it raises,
    so that none waits for a rank that has given up.

    Args:
        group: Group of all ranks.
        call: What this rank exchanges messages for.
    """

    def __init__(self, group: dist.ProcessGroup, call: Call = Call()) -> None:
        self._group, self._call = group, call
        self._number = zlib.crc32(call.kind.encode())
        rank, size = group.rank(), group.size()
        # `rank & -rank` is the lowest set bit. Rank 0, the root, has none: all powers of 2 are its children.
        lowest = rank & -rank if rank else 1 << (size - 1).bit_length()
        self._parent = rank - lowest if rank else None
        bits = range(lowest.bit_length() - 1)
        self._children = [rank + (1 << bit) for bit in bits if rank + (1 << bit) < size]

    def around(self, own: bytes, combine: Combine, decide: Callable[[bytes], bytes] | None = None) -> bytes:
        """All ranks' values combined, or what rank 0 makes of them, on every rank.

        Args:
            own: This rank's value.
            combine: Associative function that joins two values, of which the first is from lower ranks.
            decide: Function that rank 0 applies to the combined value, which must not raise; None leaves the
                value as it is.

        Raises:
            RuntimeError: If a rank cannot be reached; on every rank that can be.
            RemoteRankError: If ranks are in different calls; likewise.
        """
        news = None
        for child in self._children:
            news, theirs = self._receive(child, news)
            own = combine(own, theirs) if news is None else b""
        if self._parent is not None:
            # If sending fails, so does receiving the answer.
            self._send(self._parent, own, news)
        elif news is None and decide is not None:
            own = decide(own)
        return self._down(own, news)

    def _down(self, value: bytes, news: _News | None) -> bytes:
        """Pass rank 0's value down the tree, or the news, and then raise."""
        if self._parent is not None:
            news, value = self._receive(self._parent, news)
        for child in reversed(self._children):
            said = self._send(child, value, news)
            news = news or said
        if news is not None:
            raise RemoteRankError(news.text) if news.kind == _APART else RuntimeError(news.text)
        return value

    def _send(self, peer: int, payload: bytes, news: _News | None) -> _News | None:
        """Send a value, or the news; returns the news known by then."""
        payload = payload if news is None else news.text.encode()
        first = bytearray(_INLINE_BYTES)
        room = _INLINE_BYTES - _HEAD.size
        kind = _FINE if news is None else news.kind
        _HEAD.pack_into(first, 0, kind, len(payload), self._number, self._call.site.encode()[:95])
        first[_HEAD.size : _HEAD.size + len(payload)] = payload[:room]
        try:
            self._pass("send", first, peer)
            if len(payload) > room:
                self._pass("send", bytearray(payload[room:]), peer)
        except RuntimeError as error:  # gloo's errors have no type of their own
            return news or _told(peer, error)
        return news

    def _receive(self, peer: int, news: _News | None) -> tuple[_News | None, bytes]:
        """Receive a value; returns (the news known by then, the value)."""
        first = bytearray(_INLINE_BYTES)
        try:
            self._pass("recv", first, peer)
            kind, length, number, site = _HEAD.unpack_from(first)
            payload = bytes(first[_HEAD.size : _HEAD.size + length])
            if length > len(payload):
                rest = bytearray(length - len(payload))
                self._pass("recv", rest, peer)
                payload += rest
        except RuntimeError as error:
            return news or _told(peer, error), b""
        if news is None and kind != _FINE:
            news = _News(kind, payload.decode())
        if news is None and number != self._number:
            here = {self._group.rank(): self._call.site, peer: site.decode(errors="replace")}
            said = [f"rank {rank} is in {here[rank] or 'another call'}" for rank in sorted(here)]
            again = _AGAIN if here[peer] and len(set(here.values())) == 1 else ""
            news = _News(
                _APART,
                f"{' and '.join(said)}{again}: all ranks have to make the same calls in the same order. A "
                "call that is for all of them, made by one (if rank == 0: ...), is the usual reason",
            )
        return news, payload

    def _pass(self, way: str, memory: bytearray, peer: int) -> None:
        """Send or receive a block of memory in pieces that gloo takes.

        Through the group itself and not torch.distributed's functions, which know it no more after
        ``destroy_process_group``: a save in the background then still comes to its end.
        """
        for piece in torch.frombuffer(memory, dtype=torch.uint8).split(_MOST_BYTES):
            getattr(self._group, way)([piece], peer, 0).wait()


def _told(peer: int, error: RuntimeError) -> _News:
    """A lost rank in words: its number and gloo's reason."""
    detail = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return _News(_LOST, f"rank {peer}: {detail}")
