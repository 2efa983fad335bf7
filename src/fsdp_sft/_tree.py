"""Bytes from all ranks to rank 0 and back, along a binomial tree.

A rank talks to its parent and its children alone. N - 1 messages go up and N - 1 down, and any one rank takes
part in at most log2 N of each. gloo's own ``all_reduce`` and ``all_gather`` go around a ring, in which every
rank sends N messages.

The parent of rank r is r without its lowest set bit. Its children are r + 1, r + 2, r + 4, ... below that
bit. Eight ranks::

    0 --+-- 1
        +-- 2 --- 3
        +-- 4 --+-- 5
                +-- 6 --- 7
"""

import struct
from collections.abc import Callable

import torch
import torch.distributed as dist

Combine = Callable[[bytes, bytes], bytes]

_HEAD = struct.Struct("<?q")  # whether a rank is lost; length of the payload
_INLINE_BYTES = 256  # size of a message's first part, which both ends know; short payloads fit into it
_MOST_BYTES = 1 << 28  # sent at once, since gloo limits the length of a message


class Tree:
    """The tree over a gloo group of all ranks.

    A rank that cannot reach another one tells every rank that it talks to before it raises, so that none
    waits for a rank that has given up.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        rank, size = group.rank(), group.size()
        # `rank & -rank` is the lowest set bit. Rank 0, the root, has none: all powers of 2 are its children.
        lowest = rank & -rank if rank else 1 << (size - 1).bit_length()
        self._parent = rank - lowest if rank else None
        bits = range(lowest.bit_length() - 1)
        self._children = [rank + (1 << bit) for bit in bits if rank + (1 << bit) < size]

    def around(self, own: bytes, combine: Combine, decide: Callable[[bytes], bytes] | None = None) -> bytes:
        """All ranks' values combined, or what rank 0 makes of them; on every rank.

        Args:
            own: This rank's value.
            combine: Associative function that joins two values, of which the first is from lower ranks.
            decide: Function that rank 0 applies to the combined value, which must not raise; None leaves the
                value as it is.

        Raises:
            RuntimeError: If a rank cannot be reached; on every rank that can be.
        """
        lost = None
        for child in self._children:
            lost, theirs = self._receive(child, lost)
            own = combine(own, theirs) if lost is None else b""
        if self._parent is not None:
            # If sending fails, nothing has to be done here: receiving the answer fails as well.
            self._send(self._parent, own, lost)
        elif lost is None and decide is not None:
            own = decide(own)
        return self._down(own, lost)

    def down(self, value: bytes) -> bytes:
        """Rank 0's value, on every rank.

        Raises:
            RuntimeError: If the rank that would have sent it here cannot be reached.
        """
        return self._down(value, None)

    def _down(self, value: bytes, lost: str | None) -> bytes:
        """Pass rank 0's value down the tree, or the news that a rank is lost, and then raise."""
        if self._parent is not None:
            lost, value = self._receive(self._parent, lost)
        for child in reversed(self._children):
            said = self._send(child, value, lost)
            lost = lost or said
        if lost is not None:
            raise RuntimeError(lost)
        return value

    def _send(self, peer: int, payload: bytes, lost: str | None) -> str | None:
        """Send a value, or the news that a rank is lost; returns which rank is known to be lost by then."""
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
        """Receive a value; (which rank is known to be lost, the value)."""
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
        """Send or receive a block of memory in pieces that gloo takes."""
        end = "group_dst" if way is dist.send else "group_src"
        for piece in torch.frombuffer(memory, dtype=torch.uint8).split(_MOST_BYTES):
            way(piece, group=self._group, **{end: peer})


def _told(peer: int, error: RuntimeError) -> str:
    """A lost rank in words: its number and gloo's reason."""
    detail = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return f"rank {peer}: {detail}"
