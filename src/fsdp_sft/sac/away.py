"""Activations that wait for the backward in host memory: copied out beside the forward, back ahead of use.

Each device has one stream for these copies, and they keep their order on it: host memory that one copy has
read is written by none before that. On the other side, memory of the device is given up, or looked at, only
after the stream that computes has been told to wait for the copy.
"""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fsdp_sft._host_memory import available_host_bytes
from fsdp_sft._streams import copy_stream, host_buffer
from fsdp_sft.distributed import ranks_on_host
from fsdp_sft.errors import HostMemoryError

CHUNK_BYTES = 1 << 24  # a power of two, to which torch rounds pinned memory up
_GIB = 1 << 30


def host_bytes_for(size: int) -> int:
    """Host memory that one block takes for ``size`` bytes."""
    return -(-size // CHUNK_BYTES) * CHUNK_BYTES


class Lane:
    """The copies of one device, and the host memory that they fill: pinned, and kept for the next step.

    Args:
        device: An accelerator.
        visits: How many blocks leave something behind in one forward.
        at_first: Bytes that the host had before any rank took some; None if that is not known.
    """

    def __init__(self, device: torch.device, visits: int, at_first: int | None) -> None:
        self.device = device
        self.at_first = at_first
        self.visits = visits
        self.stream = copy_stream(device)
        self.chunks = 0
        self.free: list[torch.Tensor] = []
        self._fullest = 0  # chunks of a visit
        self._granted = 0  # chunks that the host was seen to have
        self._latest: weakref.ref[Visit] | None = None

    @contextmanager
    def visit(self) -> Iterator["Visit"]:
        """One block's forward: what the visit takes in goes to the host while this and the next one run.

        Raises:
            HostMemoryError: From ``Visit.leave``, before more of the host's memory is taken than it has,
                counting every rank on this host.
        """
        previous = None if self._latest is None else self._latest()
        if previous is not None:
            previous.give_up(previous.inputs)
        visit = Visit(self, previous)
        self._latest = weakref.ref(visit)
        yield visit
        if previous is not None:
            previous.give_up(previous.kept)

    def chunk(self) -> torch.Tensor:
        """Host memory for ``CHUNK_BYTES``."""
        try:
            return self.free.pop()
        except IndexError:
            pass
        if self.chunks >= self._granted:
            self._see_that_host_has_more()
        self.chunks += 1
        made = host_buffer((CHUNK_BYTES,), torch.uint8, self.device)
        if self.chunks == 1 and not made.is_pinned():
            warnings.warn(
                "host memory for activations could not be pinned: the device waits for each copy",
                stacklevel=2,
            )
        return made

    def expect(self, chunks: int) -> None:
        """Note that a visit needs so many chunks; the others of this forward will, too."""
        self._fullest = max(self._fullest, chunks)

    def _see_that_host_has_more(self) -> None:
        forward = self._fullest * self.visits
        more = forward - self.chunks if forward > self.chunks else forward
        own, ranks, left = more * CHUNK_BYTES, ranks_on_host(), available_host_bytes()
        # What is left now may lack what other ranks have taken already; what there was at first does not.
        all_ranks = (self.chunks + more) * CHUNK_BYTES * ranks
        if (left is not None and own > left) or (self.at_first is not None and all_ranks > self.at_first):
            at_first = _gib(self.at_first)
            raise HostMemoryError(
                f"the activations of {self.visits} blocks need {own / _GIB:.2f} GiB more of host memory on "
                f"each of {ranks} ranks of this host, of which {_gib(left)} are left, and "
                f"{at_first} were when offload=True was chosen: checkpoint without it, shorten the rows, or "
                "give the job more memory"
            )
        self._granted = self.chunks + more


class Visit:
    """What one forward of one block has left in host memory."""

    def __init__(self, lane: Lane, previous: "Visit | None") -> None:
        self.lane = lane
        self.inputs: list[weakref.ref[Away]] = []
        self.kept: list[weakref.ref[Away]] = []
        self.arguments: set[Any] = set()
        self._previous = None if previous is None else weakref.ref(previous)
        self._chunks: list[torch.Tensor] = []
        self._used = 0

    def __del__(self) -> None:
        self.lane.free.extend(self._chunks)

    def leave(self, tensors: list[torch.Tensor], *, as_inputs: bool) -> list["Away"]:
        """Start to copy them to the host.

        Args:
            tensors: Dense ones on the lane's device.
            as_inputs: Whether the block's forward has yet to run, so that the copies end with it.
        """
        total = self._used + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.lane.expect(-(-total // CHUNK_BYTES))
        left = [Away(self, tensor) for tensor in tensors]
        (self.inputs if as_inputs else self.kept).extend(weakref.ref(away) for away in left)
        return left

    def not_shared(self, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those that the visit before did not have as well: one copy of the others is on the device."""
        previous = None if self._previous is None else self._previous()
        shared = set() if previous is None else previous.arguments
        self.arguments = {identity(tensor) for tensor in arguments}
        return [tensor for tensor in arguments if identity(tensor) not in shared]

    def give_up(self, left: list["weakref.ref[Away]"]) -> None:
        """Let the device's memory of these go, once they are on the host."""
        for away in _alive(left):
            away.give_up()

    def bring_back(self) -> None:
        """Start to copy everything back that is still waited for."""
        for away in _alive([*self.kept, *self.inputs]):
            away.bring_back()

    def bring_back_previous(self) -> None:
        """The same for the visit before, which the backward comes to next."""
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.bring_back()

    def room(self, size: int) -> list[torch.Tensor]:
        """Host memory for ``size`` bytes, in pieces."""
        pieces = []
        while size:
            used = self._used % CHUNK_BYTES
            if not used:
                self._chunks.append(self.lane.chunk())
            piece = self._chunks[-1][used : used + size]
            pieces.append(piece)
            self._used, size = self._used + piece.numel(), size - piece.numel()
        return pieces


class Away:
    """A tensor whose values are on the host, and on the device only while they are leaving or needed.

    Attributes:
        changed: Whether someone has changed it in place while it was copied, so that both are lost.
    """

    def __init__(self, visit: Visit, tensor: torch.Tensor) -> None:
        self.visit = visit
        self.changed = False
        self._here: torch.Tensor | None = None
        self._shape, self._strides, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._pieces = visit.room(tensor.numel() * tensor.element_size())
        self._here = tensor.detach()
        self._version = tensor._version
        self._stream = torch.accelerator.current_stream(tensor.device)
        self._copied = self._copy(tensor, to_host=True)

    def __del__(self) -> None:
        self.give_up()

    def get(self) -> torch.Tensor:
        """The tensor, on the device, to compute with on the current stream; those needed next start too.

        Look at ``changed`` afterwards.
        """
        self.bring_back()
        assert self._here is not None
        self._look_for_changes()
        current = torch.accelerator.current_stream(self._here.device)
        current.wait_event(self._copied)
        if current != self._stream:
            self._here.record_stream(current)
        tensor, self._here = self._here, None
        self.visit.bring_back_previous()
        return tensor

    def bring_back(self) -> None:
        """Start to copy it back, if it is not there."""
        if self._here is None:
            device = self.visit.lane.device
            self._here = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=device)
            self._stream = torch.accelerator.current_stream(device)
            self._copied = self._copy(self._here, to_host=False)
            self._version = self._here._version

    def give_up(self) -> None:
        """Let the device's memory go, which the stream that it was made on may use after the copy."""
        if self._here is not None:
            self._look_for_changes()
            self._stream.wait_event(self._copied)
            self._here = None

    def _look_for_changes(self) -> None:
        self.changed |= self._here is not None and self._here._version != self._version

    def _copy(self, tensor: torch.Tensor, *, to_host: bool) -> torch.Event:
        lane, made = self.visit.lane, self._stream.record_event()
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        parts = flat.split([piece.numel() for piece in self._pieces])
        with lane.stream:
            lane.stream.wait_event(made)
            for piece, part in zip(self._pieces, parts, strict=True):
                target, source = (piece, part) if to_host else (part, piece)
                target.copy_(source, non_blocking=True)
            return lane.stream.record_event()


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which values a tensor has, as long as one that has them is held: autograd hands over another object."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version


def _gib(size: int | None) -> str:
    return "an unknown number of GiB" if size is None else f"{size / _GIB:.2f} GiB"


def _alive(left: list["weakref.ref[Away]"]) -> list["Away"]:
    return [away for away in (reference() for reference in left) if away is not None]
