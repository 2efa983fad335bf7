"""Gathering the full tensors of a sharded model on rank 0, one at a time, by point-to-point sends."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist

from fsdp_sft._ranks.agree import answered, control_group, raise_first, this_rank
from fsdp_sft._tensors.boxes import Box, part_of, whole
from fsdp_sft._tensors.packed_shard import values_of
from fsdp_sft._tensors.sharding import own_part, sharding_of

T = TypeVar("T")


class Gatherer:
    """Gathers full tensors on rank 0, one at a time, over the control group.

    The other ranks never hold more than their own part. A rank that fails does not raise at once, which would
    leave rank 0 waiting for its parts: it sends zeros from then on and raises its error in ``finish``.

    Attributes:
        rank: This rank.
        error: First error of this rank; None if there is none.

    Collective: all ranks make one, call ``gather`` for the same tensors in the same order, then ``finish``.
    """

    def __init__(self) -> None:
        self.rank = this_rank()
        self.error: Exception | None = None

    def gather(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """On rank 0 the full tensor, in CPU memory and as ``dtype``; None on the other ranks."""
        if self.rank != 0:
            own = own_part(tensor)
            if own is not None:
                self._send(tensor, dtype, own)
            return None
        parts = list(sharding_of(tensor).parts(tensor.shape))
        if parts == [(0, whole(tensor.shape))]:
            return values_of(tensor, dtype).to("cpu", dtype).contiguous()
        full = torch.empty(tensor.shape, dtype=dtype)
        for owner, box in parts:
            part = part_of(full, box)
            if owner == 0:
                part.copy_(values_of(tensor, dtype))
            else:
                receive_into(part, owner)
        return full

    def attempt(self, action: Callable[[], T]) -> T | None:
        """What ``action`` returns; None if it or one before it fails, whose error ``finish`` raises."""
        if self.error is None:
            try:
                return action()
            except Exception as error:
                self.error = error
        return None

    def finish(self, phase: str) -> None:
        """Raise the first error of any rank on every rank."""
        raise_first(self.error, phase)

    def _send(self, tensor: torch.Tensor, dtype: torch.dtype, box: Box) -> None:
        """Send this rank's part, the box ``box``, to rank 0; zeros if this rank has failed."""
        payload = self.attempt(lambda: values_of(tensor, dtype).to("cpu", dtype).contiguous())
        send(payload if payload is not None else torch.zeros(box.shape, dtype=dtype), 0)


def send(tensor: torch.Tensor, rank: int) -> None:
    """Send a contiguous CPU tensor's bytes over the control group."""
    for piece in _byte_pieces(tensor):
        with answered():
            dist.send(piece, dst=rank, group=control_group())


def receive_into(tensor: torch.Tensor, rank: int) -> None:
    """Fill a CPU tensor with the bytes that ``rank`` sends."""
    target = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
    for piece in _byte_pieces(target):
        with answered():
            dist.recv(piece, src=rank, group=control_group())
    if target is not tensor:
        tensor.copy_(target)


def _byte_pieces(tensor: torch.Tensor, most: int = 1 << 28) -> Iterator[torch.Tensor]:
    """A contiguous tensor's bytes in pieces that gloo can send, which limits dtypes and lengths."""
    yield from tensor.reshape(-1).view(torch.uint8).split(most)
