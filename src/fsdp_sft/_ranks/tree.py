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

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp_sft.errors import RemoteRankError

_LENGTH_BYTES = 8
_BLOCK = 512  # bytes of a message's first part, which both ends know; short ones fit into it
_MOST_BYTES = 1 << 28  # at a time, which gloo limits
_Message = tuple[type[Exception] | None, Any]  # an error for all ranks and its text; or None and content


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
        self._group, self.rank, size = group, group.rank(), group.size()
        self._kind, self._site = kind, site
        self._failed: _Message | None = None  # goes down in place of an answer
        # The lowest set bit. Rank 0, the root, has none: all powers of 2 are its children.
        below = self.rank & -self.rank or 1 << (size - 1).bit_length()
        self._parent = self.rank - below
        bits = range(below.bit_length() - 1)
        self._children = [self.rank + (1 << bit) for bit in bits if self.rank + (1 << bit) < size]

    def up(self, own: bytes) -> list[bytes]:
        """On rank 0 all ranks' messages, in their order; else, or if the exchange fails, none."""
        by_rank = [(self._kind, self._site, own)]
        for error, content in map(self._receive, self._children):
            if error is None:
                by_rank += content
            else:
                self._failed = error, content
        if self.rank:
            # If this fails, so does receiving the answer.
            self._send(self._parent, self._failed or (None, by_rank))
            return []
        apart = next((rank for rank, (kind, *_) in enumerate(by_rank) if kind != self._kind), 0)
        if apart and self._failed is None:
            self._failed = RemoteRankError, _different(apart, self._site, by_rank[apart][1])
        return [] if self._failed else [own for *_, own in by_rank]

    def down(self, answer: bytes) -> bytes:
        """Rank 0's answer, on every rank.

        Raises:
            RuntimeError: If a rank cannot be reached; on every rank that can be.
            RemoteRankError: If ranks are in different calls; likewise.
        """
        message = self._receive(self._parent) if self.rank else self._failed or (None, answer)
        for child in reversed(self._children):
            message = self._send(child, message) or message
        error, content = message
        if error is not None:
            raise error(content)
        payload: bytes = content
        return payload

    def _send(self, peer: int, message: _Message) -> _Message | None:
        """Send a message; returns one that says that the rank is lost, or None."""
        content = pickle.dumps(message)
        framed = len(content).to_bytes(_LENGTH_BYTES) + content
        try:
            for part in (framed[:_BLOCK].ljust(_BLOCK, b"\0"), framed[_BLOCK:]):
                self._pass(self._group.send, bytearray(part), peer)
        except RuntimeError as error:  # gloo's errors have no type of their own
            return _lost(peer, error)
        return None

    def _receive(self, peer: int) -> _Message:
        """Receive a message; where the rank is lost, one that says so."""
        try:
            first = self._pass(self._group.recv, bytearray(_BLOCK), peer)
            more = _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES]) - _BLOCK
            rest = self._pass(self._group.recv, bytearray(max(0, more)), peer)
        except RuntimeError as error:
            return _lost(peer, error)
        message: _Message = pickle.loads(first[_LENGTH_BYTES:] + rest)
        return message

    def _pass(self, way: Callable[..., Any], memory: bytearray, peer: int) -> bytearray:
        """Send or receive a block of memory in pieces that gloo takes; nothing if it is empty.

        Through the group itself and not torch.distributed's functions, which know it no more after
        ``destroy_process_group``: a save in the background then still comes to its end.
        """
        if memory:
            for piece in torch.frombuffer(memory, dtype=torch.uint8).split(_MOST_BYTES):
                way([piece], peer, 0).wait()
        return memory


def _lost(peer: int, error: RuntimeError) -> _Message:
    """The message that a rank is lost: its number and gloo's reason."""
    return RuntimeError, f"rank {peer}: {error}"[:300]


def _different(rank: int, root: str, site: str) -> str:
    """What rank 0 and another rank are told that are in different calls."""
    here, there = root or "another call", site or "another call"
    again = ", which one of them has come to more often (other numbers of rows, micro-batches or steps)"
    return (
        f"rank 0 is in {here} and rank {rank} is in {there}{again * (here == there)}: all ranks have to make "
        "the same calls in the same order. A call that is for all of them, made by one (if rank == 0: ...), "
        "is the usual reason"
    )
