"""A message from every rank to rank 0, and its answer to all, along a binomial tree over gloo's sends.

N - 1 messages go up and N - 1 down, and a rank takes part in at most log2 N of each. gloo's own
``all_reduce`` is a ring in which every rank sends to its neighbour 2 (N - 1) times, and torch's
``all_gather_object`` two of them: ``benchmarks/results/checkpoints.md``.

The parent of rank r is r without its lowest set bit. Its children are r + 1, r + 2, r + 4, ... below that
bit, and all that lies below r follows it without a gap. Eight ranks::

    0 --+-- 1
        +-- 2 --- 3
        +-- 4 --+-- 5
                +-- 6 --- 7
"""

import struct
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp_sft.errors import RemoteRankError

_HEAD = struct.Struct("<BIQ96p")  # how it is; the call by number; bytes that follow; the call's place
_FINE, _LOST, _APART = range(3)
_BLOCK = 512  # bytes of a message's first part, which both ends know; short ones fit into it
_MOST_BYTES = 1 << 28  # at a time, which gloo limits


class Tree:
    """The tree over a gloo group of all ranks, for one message up and one down.

    A rank that cannot reach another one says so to its neighbours before it raises, and rank 0 if ranks are
    in different calls, so that none waits for a rank that has given up.

    Args:
        group: Group of all ranks.
        kind: What has to be the same on all ranks.
        site: Where the call is, for an error.
    """

    def __init__(self, group: dist.ProcessGroup, kind: str = "", site: str = "") -> None:
        self._group, self._size, self.rank = group, group.size(), group.rank()
        self._call = zlib.crc32(kind.encode()), site.encode()[:95]
        self._answer = b""  # what goes down in place of an answer: that a rank is lost, or in another call
        # The lowest set bit. Rank 0, the root, has none: all powers of 2 are its children.
        self._below = self.rank & -self.rank or 1 << (self._size - 1).bit_length()
        bits = range(self._below.bit_length() - 1)
        self._children = [self.rank + (1 << bit) for bit in bits if self.rank + (1 << bit) < self._size]

    def up(self, own: bytes) -> list[bytes]:
        """On rank 0 all ranks' messages, in their order; else, or if the exchange fails, none."""
        messages = [self._message(_FINE, own)]
        for child in self._children:
            messages += self._receive(child, min(child & -child, self._size - child))
        if self.rank:
            self._send(self.rank - self._below, messages)  # if this fails, so does receiving the answer
            return []
        told = [_HEAD.unpack_from(message) for message in messages]
        lost = next((message for message, head in zip(messages, told, strict=True) if head[0] == _LOST), b"")
        apart = next((rank for rank, head in enumerate(told) if head[1] != told[0][1]), 0)
        if lost or apart:
            self._answer = lost or self._message(_APART, _different(apart, told[0][3], told[apart][3]))
            return []
        return [message[_HEAD.size :] for message in messages]

    def down(self, answer: bytes) -> bytes:
        """Rank 0's answer, on every rank.

        Raises:
            RuntimeError: If a rank cannot be reached; on every rank that can be.
            RemoteRankError: If ranks are in different calls; likewise.
        """
        if self.rank:
            (message,) = self._receive(self.rank - self._below, 1)
        else:
            message = self._answer or self._message(_FINE, answer)
        for child in reversed(self._children):
            message = self._send(child, [message]) or message
        state, payload = message[0], message[_HEAD.size :]
        if state != _FINE:
            raise (RemoteRankError if state == _APART else RuntimeError)(payload.decode())
        return payload

    def _message(self, state: int, payload: bytes) -> bytes:
        return _HEAD.pack(state, self._call[0], len(payload), self._call[1]) + payload

    def _send(self, peer: int, messages: list[bytes]) -> bytes:
        """Send messages; returns one that says that the rank is lost, or nothing."""
        blocks = b"".join(message[:_BLOCK].ljust(_BLOCK, b"\0") for message in messages)
        try:
            for part in (blocks, b"".join(message[_BLOCK:] for message in messages)):
                self._pass(self._group.send, bytearray(part), peer)
        except RuntimeError as error:  # gloo's errors have no type of their own
            return self._lost(peer, error)
        return b""

    def _receive(self, peer: int, count: int) -> list[bytes]:
        """Receive so many messages; where the rank is lost, as many that say so."""
        try:
            blocks = self._pass(self._group.recv, bytearray(count * _BLOCK), peer)
            firsts = [blocks[at : at + _BLOCK] for at in range(0, len(blocks), _BLOCK)]
            lengths = [_HEAD.size + _HEAD.unpack_from(first)[2] for first in firsts]
            rest = self._pass(self._group.recv, bytearray(sum(max(0, n - _BLOCK) for n in lengths)), peer)
        except RuntimeError as error:
            return [self._lost(peer, error)] * count
        messages, at = [], 0
        for first, length in zip(firsts, lengths, strict=True):
            end = at + max(0, length - _BLOCK)
            messages.append(bytes(first[:length] + rest[at:end]))
            at = end
        return messages

    def _lost(self, peer: int, error: RuntimeError) -> bytes:
        """The message that a rank is lost: its number and gloo's reason."""
        return self._message(_LOST, f"rank {peer}: {error}"[:300].encode())

    def _pass(self, way: Callable[..., Any], memory: bytearray, peer: int) -> bytearray:
        """Send or receive a block of memory in pieces that gloo takes; nothing if it is empty.

        Through the group itself and not torch.distributed's functions, which know it no more after
        ``destroy_process_group``: a save in the background then still comes to its end.
        """
        if memory:
            for piece in torch.frombuffer(memory, dtype=torch.uint8).split(_MOST_BYTES):
                way([piece], peer, 0).wait()
        return memory


def _different(rank: int, root: bytes, site: bytes) -> bytes:
    """What rank 0 and another rank are told that are in different calls."""
    here, there = (place.decode(errors="replace") or "another call" for place in (root, site))
    again = ", which one of them has come to more often (other numbers of rows, micro-batches or steps)"
    text = (
        f"rank 0 is in {here} and rank {rank} is in {there}{again * (here == there)}: all ranks have to make "
        "the same calls in the same order. A call that is for all of them, made by one (if rank == 0: ...), "
        "is the usual reason"
    )
    return text.encode()
