"""Bytes from all ranks to rank 0 and back, along a binomial tree.

A rank talks to its parent and its children alone: N - 1 messages up and N - 1 down, at most log2 N of them
of any one rank. gloo's own ``all_reduce`` and ``all_gather`` go around a ring: N messages of every rank.

Rank r's parent is r without its lowest set bit; its children are r + 1, r + 2, r + 4, ... below that bit.
"""

import struct
from collections.abc import Callable

import torch
import torch.distributed as dist

Combine = Callable[[bytes, bytes], bytes]

_HEAD = struct.Struct("<?q")  # whether a rank is lost; bytes of what follows
_INLINE_BYTES = 256  # of a message's first part, which has a size that both ends know
_MOST_BYTES = 1 << 28  # gloo does not take messages of any length


class Tree:
    """The tree over a gloo group of all ranks.

    A rank that misses another says so to all it talks to before it raises, so that nobody waits for a rank
    that is waiting itself.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        rank, size = group.rank(), group.size()
        lowest = rank & -rank if rank else 1 << (size - 1).bit_length()
        self._parent = rank - lowest if rank else None
        bits = range(lowest.bit_length() - 1)
        self._children = [rank + (1 << bit) for bit in bits if rank + (1 << bit) < size]

    def around(self, own: bytes, combine: Combine, decide: Callable[[bytes], bytes] | None = None) -> bytes:
        """What rank 0 makes of what all ranks have; on every rank.

        Args:
            own: Of this rank.
            combine: Makes one of two, of which the first belongs to the lower ranks; associative.
            decide: Run by rank 0 on what has come together; must not raise. None leaves it as it is.

        Raises:
            RuntimeError: On every rank that can be reached, if one cannot.
        """
        lost = None
        for child in self._children:
            lost, theirs = self._receive(child, lost)
            own = combine(own, theirs) if lost is None else b""
        if self._parent is not None:
            # Of no matter if it fails: the answer will not come either.
            self._send(self._parent, own, lost)
        elif lost is None and decide is not None:
            own = decide(own)
        return self._down(own, lost)

    def down(self, value: bytes) -> bytes:
        """Rank 0's value; on every rank.

        Raises:
            RuntimeError: If the rank that would have told this one cannot be reached.
        """
        return self._down(value, None)

    def _down(self, value: bytes, lost: str | None) -> bytes:
        if self._parent is not None:
            lost, value = self._receive(self._parent, lost)
        for child in reversed(self._children):
            said = self._send(child, value, lost)
            lost = lost or said
        if lost is not None:
            raise RuntimeError(lost)
        return value

    def _send(self, peer: int, payload: bytes, lost: str | None) -> str | None:
        """What was lost, if that is known now."""
        payload = payload if lost is None else lost.encode()
        first = bytearray(_INLINE_BYTES)
        room = _INLINE_BYTES - _HEAD.size
        _HEAD.pack_into(first, 0, lost is not None, len(payload))
        first[_HEAD.size : _HEAD.size + len(payload)] = payload[:room]
        try:
            self._pass(dist.send, first, peer)
            if len(payload) > room:
                self._pass(dist.send, bytearray(payload[room:]), peer)
        except RuntimeError as error:  # gloo's errors have no type of their own
            return lost or _told(peer, error)
        return lost

    def _receive(self, peer: int, lost: str | None) -> tuple[str | None, bytes]:
        """(what is lost, the message)."""
        first = bytearray(_INLINE_BYTES)
        try:
            self._pass(dist.recv, first, peer)
            is_lost, length = _HEAD.unpack_from(first)
            payload = bytes(first[_HEAD.size : _HEAD.size + length])
            if length > len(payload):
                rest = bytearray(length - len(payload))
                self._pass(dist.recv, rest, peer)
                payload += rest
        except RuntimeError as error:
            return lost or _told(peer, error), b""
        return (payload.decode() if is_lost and lost is None else lost), payload

    def _pass(self, way: Callable[..., object], memory: bytearray, peer: int) -> None:
        end = "group_dst" if way is dist.send else "group_src"
        for piece in torch.frombuffer(memory, dtype=torch.uint8).split(_MOST_BYTES):
            way(piece, group=self._group, **{end: peer})


def _told(peer: int, error: RuntimeError) -> str:
    detail = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return f"rank {peer}: {detail}"
