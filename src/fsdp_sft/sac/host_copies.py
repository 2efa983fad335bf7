"""Activations held in host memory for the backward: copied out during the forward, and back before use.

Each device has one stream for all of these copies, which keeps them in order. So a later copy cannot write to
host memory before an earlier one has read it. The compute stream waits for a copy before the device's memory
is freed or its values are used.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fsdp_sft._process.callers import warn_caller
from fsdp_sft._process.host_memory import available_host_bytes
from fsdp_sft._process.streams import copy_stream, host_buffer
from fsdp_sft._ranks.init import ranks_on_host
from fsdp_sft.errors import HostMemoryError

CHUNK_BYTES = 1 << 24  # size of a piece of host memory; torch rounds pinned memory up to a power of two
_GIB = 1 << 30


def host_bytes_for(size: int) -> int:
    """Bytes of host memory that a block takes for ``size`` bytes of activations: whole chunks."""
    return -(-size // CHUNK_BYTES) * CHUNK_BYTES


class CopyStream:
    """The copies of one device, and their host memory, which is pinned and kept from step to step.

    Args:
        device: Accelerator.
        num_blocks: Number of blocks that leave activations in one forward.
        at_first: Bytes of memory that the host had before any rank took some; None if unknown.
    """

    def __init__(self, device: torch.device, num_blocks: int, at_first: int | None) -> None:
        self.device = device
        self.at_first = at_first
        self.num_blocks = num_blocks
        self.stream = copy_stream(device)
        self.chunks = 0
        self.free: list[torch.Tensor] = []
        self.fullest = 0  # largest number of chunks of a block so far
        self._granted = 0  # number of chunks for which the host has been found to have memory
        self._latest: weakref.ref[BlockActivations] | None = None

    @contextmanager
    def forward_of_block(self) -> Iterator["BlockActivations"]:
        """The forward of one block, whose activations go to the host while this and the next block run.

        The inputs of the previous block are freed on the device when this block begins, and what it kept when
        this block has ended.

        Raises:
            HostMemoryError: From ``BlockActivations.offload``, if all ranks on this host together would take
                more memory than it has; it is raised before the memory is taken.
        """
        previous = None if self._latest is None else self._latest()
        if previous is not None:
            previous.release(previous.inputs)
        activations = BlockActivations(self, previous)
        self._latest = weakref.ref(activations)
        yield activations
        if previous is not None:
            previous.release(previous.kept)

    def chunk(self) -> torch.Tensor:
        """A free piece of host memory of ``CHUNK_BYTES``, or a new one."""
        try:
            return self.free.pop()
        except IndexError:
            pass
        if self.chunks >= self._granted:
            self._see_that_host_has_more()
        self.chunks += 1
        made = host_buffer((CHUNK_BYTES,), torch.uint8, self.device)
        if self.chunks == 1 and not made.is_pinned():
            warn_caller("host memory for activations could not be pinned: the device waits for each copy")
        return made

    def _see_that_host_has_more(self) -> None:
        """Raise unless the host has memory for a whole forward of this rank, and of all ranks together."""
        forward = self.fullest * self.num_blocks
        more = forward - self.chunks if forward > self.chunks else forward
        own, ranks, left = more * CHUNK_BYTES, ranks_on_host(), available_host_bytes()
        # The memory left now may lack what other ranks have already taken for the same purpose, so all ranks'
        # need is compared with the memory that there was before any rank took some.
        all_ranks = (self.chunks + more) * CHUNK_BYTES * ranks
        if (left is not None and own > left) or (self.at_first is not None and all_ranks > self.at_first):
            at_first = _gib(self.at_first)
            raise HostMemoryError(
                f"the activations of {self.num_blocks} blocks need {own / _GIB:.2f} GiB more of host memory "
                f"on each of {ranks} ranks of this host, of which {_gib(left)} are left, and "
                f"{at_first} were when offload=True was chosen: checkpoint without it, shorten the rows, or "
                "give the job more memory"
            )
        self._granted = self.chunks + more


class BlockActivations:
    """The tensors that one forward of one block has left in host memory."""

    def __init__(self, copies: CopyStream, previous: "BlockActivations | None") -> None:
        self.copies = copies
        self.inputs: list[weakref.ref[HostTensor]] = []
        self.kept: list[weakref.ref[HostTensor]] = []
        self.arguments: set[Any] = set()
        self._previous = None if previous is None else weakref.ref(previous)
        self._chunks: list[torch.Tensor] = []
        self._used = 0

    def __del__(self) -> None:
        self.copies.free.extend(self._chunks)

    def offload(self, tensors: list[torch.Tensor], *, as_inputs: bool) -> list["HostTensor"]:
        """Start to copy tensors to the host.

        Args:
            tensors: Dense tensors on the copies's device.
            as_inputs: Whether they are the block's inputs, which are freed when the next block begins;
                other tensors are freed when the next block has ended.
        """
        total = self._used + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.copies.fullest = max(self.copies.fullest, -(-total // CHUNK_BYTES))
        left = [HostTensor(self, tensor) for tensor in tensors]
        (self.inputs if as_inputs else self.kept).extend(weakref.ref(away) for away in left)
        return left

    def not_shared(self, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        """The arguments that the previous block did not have; the others have been copied already."""
        previous = None if self._previous is None else self._previous()
        shared = set() if previous is None else previous.arguments
        self.arguments = {identity(tensor) for tensor in arguments}
        return [tensor for tensor in arguments if identity(tensor) not in shared]

    def release(self, left: list["weakref.ref[HostTensor]"]) -> None:
        """Free the device's memory of tensors as soon as they are on the host."""
        for away in _alive(left):
            away.release()

    def prefetch(self) -> None:
        """Start to copy everything back to the device that is still needed."""
        for away in _alive([*self.kept, *self.inputs]):
            away.prefetch()

    def prefetch_previous(self) -> None:
        """Start to copy back what the previous block has left, which the backward needs next."""
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.prefetch()

    def room(self, size: int) -> list[torch.Tensor]:
        """Host memory for ``size`` bytes, as pieces of chunks."""
        pieces = []
        while size:
            used = self._used % CHUNK_BYTES
            if not used:
                self._chunks.append(self.copies.chunk())
            piece = self._chunks[-1][used : used + size]
            pieces.append(piece)
            self._used, size = self._used + piece.numel(), size - piece.numel()
        return pieces


class HostTensor:
    """A tensor with its values on the host, and on the device only while it is copied or needed.

    Attributes:
        changed: Whether the tensor was changed in place while it was copied; its values are lost then.
    """

    def __init__(self, activations: BlockActivations, tensor: torch.Tensor) -> None:
        self.activations = activations
        self.changed = False
        self._here: torch.Tensor | None = None
        self._shape, self._strides, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._pieces = activations.room(tensor.numel() * tensor.element_size())
        self._here = tensor.detach()
        self._version = tensor._version
        self._stream = torch.accelerator.current_stream(tensor.device)
        self._copied = self._copy(tensor, to_host=True)

    def __del__(self) -> None:
        self.release()

    def get(self) -> torch.Tensor:
        """The tensor on the device, for computations on the current stream; check ``changed`` afterwards.

        This also starts to copy back the tensors of the previous block, which the backward needs next.
        """
        self.prefetch()
        assert self._here is not None
        self._look_for_changes()
        current = torch.accelerator.current_stream(self._here.device)
        current.wait_event(self._copied)
        if current != self._stream:
            self._here.record_stream(current)
        tensor, self._here = self._here, None
        self.activations.prefetch_previous()
        return tensor

    def prefetch(self) -> None:
        """Start to copy the tensor back to the device, unless it is there."""
        if self._here is None:
            device = self.activations.copies.device
            self._here = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=device)
            self._stream = torch.accelerator.current_stream(device)
            self._copied = self._copy(self._here, to_host=False)
            self._version = self._here._version

    def release(self) -> None:
        """Free the device's memory; the stream that it was made on may reuse it after the copy."""
        if self._here is not None:
            self._look_for_changes()
            self._stream.wait_event(self._copied)
            self._here = None

    def _look_for_changes(self) -> None:
        """Note a change in place since the last copy began: every such change raises a tensor's version."""
        self.changed |= self._here is not None and self._here._version != self._version

    def _copy(self, tensor: torch.Tensor, *, to_host: bool) -> torch.Event:
        """Queue a copy on the copies's stream, after the tensor was made; the event follows the copy."""
        copies, made = self.activations.copies, self._stream.record_event()
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        parts = flat.split([piece.numel() for piece in self._pieces])
        with copies.stream:
            copies.stream.wait_event(made)
            for piece, part in zip(self._pieces, parts, strict=True):
                target, source = (piece, part) if to_host else (part, piece)
                target.copy_(source, non_blocking=True)
            return copies.stream.record_event()


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensor objects with the same values in the same memory.

    Autograd hands over another object for the same tensor, so objects cannot be compared. A key is valid as
    long as a tensor with that memory is alive.
    """
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version


def _gib(size: int | None) -> str:
    """A number of bytes as text, in GiB."""
    return "an unknown number of GiB" if size is None else f"{size / _GIB:.2f} GiB"


def _alive(left: list["weakref.ref[HostTensor]"]) -> list["HostTensor"]:
    """The tensors that the backward may still need, which autograd keeps alive."""
    return [away for away in (reference() for reference in left) if away is not None]
