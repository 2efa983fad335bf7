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

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_LENGTH_BYTES = 8
_BLOCK = 512  # bytes of a message's first part, which both ends know; short ones fit into it
_MOST_BYTES = 1 << 28  # at a time, which gloo limits


def through_root(
    group: dist.ProcessGroup, own: bytes, answer: Callable[[list[bytes]], bytes | Exception]
) -> bytes:
    """Rank 0's answer to the messages of all ranks, on every rank.

    A rank that cannot reach another one says so to its neighbours before it raises, so that none waits for a
    rank that has given up.

    Args:
        group: A gloo group of all ranks.
        own: This rank's message.
        answer: What rank 0 answers to all messages, which are in rank order, or an error for all ranks. It
            must not raise: the others wait.

    Raises:
        RuntimeError: If a rank cannot be reached; on every rank that can be.
        Exception: What ``answer`` has returned; on every rank.

    Collective: all ranks of the group.
    """
    rank, size = group.rank(), group.size()
    # The lowest set bit. Rank 0, the root, has none: all powers of 2 are its children.
    below = rank & -rank or 1 << (size - 1).bit_length()
    children = [rank + (1 << bit) for bit in range(below.bit_length() - 1) if rank + (1 << bit) < size]
    received = [_receive(group, child) for child in children]
    lost = next((one for one in received if isinstance(one, Exception)), None)
    message: Any = lost or [own, *itertools.chain.from_iterable(received)]
    if rank:
        _send(group, rank - below, message)  # if this fails, so does receiving the answer
        message = _receive(group, rank - below)
    elif lost is None:
        message = answer(message)
    for child in reversed(children):
        message = _send(group, child, message) or message
    if isinstance(message, Exception):
        raise message
    answered: bytes = message
    return answered


def _send(group: dist.ProcessGroup, peer: int, message: Any) -> RuntimeError | None:
    """Send a message; returns the error for all ranks if that rank is lost."""
    content = pickle.dumps(message)
    framed = len(content).to_bytes(_LENGTH_BYTES) + content
    try:
        for part in (framed[:_BLOCK].ljust(_BLOCK, b"\0"), framed[_BLOCK:]):
            _pass(group.send, bytearray(part), peer)
    except RuntimeError as error:  # gloo's errors have no type of their own
        return RuntimeError(f"rank {peer}: {error}"[:300])
    return None


def _receive(group: dist.ProcessGroup, peer: int) -> Any:
    """Receive a message; an error for all ranks if that rank is lost."""
    try:
        first = _pass(group.recv, bytearray(_BLOCK), peer)
        more = _LENGTH_BYTES + int.from_bytes(first[:_LENGTH_BYTES]) - _BLOCK
        rest = _pass(group.recv, bytearray(max(0, more)), peer)
    except RuntimeError as error:
        return RuntimeError(f"rank {peer}: {error}"[:300])
    return pickle.loads(first[_LENGTH_BYTES:] + rest)


def _pass(way: Callable[..., Any], memory: bytearray, peer: int) -> bytearray:
    """Send or receive a block of memory in pieces that gloo takes; nothing if it is empty.

    Through the group itself and not torch.distributed's functions, which know it no more after
    ``destroy_process_group``: a save in the background then still comes to its end.
    """
    if memory:
        for piece in torch.frombuffer(memory, dtype=torch.uint8).split(_MOST_BYTES):
            way([piece], peer, 0).wait()
    return memory
