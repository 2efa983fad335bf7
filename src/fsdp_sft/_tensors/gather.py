"""Gathering the full tensors of a sharded model on rank 0, one at a time, by point-to-point sends."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp_sft._ranks.agree import answered, control_group, raise_first, this_rank
from fsdp_sft._tensors.boxes import values_of
from fsdp_sft._tensors.sharding import own_part, sharding_of

_MOST_BYTES = 1 << 28  # that gloo sends at once
T = TypeVar("T")


class Gatherer:
    """Gathers full tensors on rank 0, one at a time, over the control group.

    The other ranks never hold more than their own part. A rank that fails does not raise at once, which would
    leave rank 0 waiting for its parts: it sends zeros from then on and raises its error in ``finish``.

    Attributes:
        error: First error of this rank; None if there is none.

    Collective: all ranks make one, call ``gather`` for the same tensors in the same order, then ``finish``.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def gather(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """On rank 0 the full tensor, in CPU memory and as ``dtype``; None on the other ranks."""
        if this_rank() != 0:
            if (own := own_part(tensor)) is not None:
                values = torch.zeros(own.shape, dtype=dtype)
                self.attempt(lambda: values.copy_(values_of(tensor, dtype)))
                _exchange(dist.isend, values, 0)
            return None
        full = torch.empty(tensor.shape, dtype=dtype)
        for owner, box in sharding_of(tensor).parts(tensor.shape):
            if owner == 0:
                full[box.slices].copy_(values_of(tensor, dtype))
            else:
                values = torch.empty(box.shape, dtype=dtype)
                _exchange(dist.irecv, values, owner)
                full[box.slices].copy_(values)
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


def _exchange(operation: Callable[..., Any], values: torch.Tensor, rank: int) -> None:
    """Send a contiguous CPU tensor, or fill it with what arrives, as bytes: gloo knows few dtypes."""
    for piece in values.reshape(-1).view(torch.uint8).split(_MOST_BYTES):
        with answered():
            operation(piece, rank, group=control_group()).wait()
