"""How many bytes are alive: a dispatch mode that tracks every storage that operations create.

A tensor is identified by its storage, and a storage by a number, given in the order in which the ledger first
saw it. So the bytes of several views count once. Python's ``id`` of a storage leads to the number while the
storage lives. Python then reuses ids, but numbers are never reused: a set of numbers, such as what a block
has saved, keeps its meaning after the tensors are gone.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils.flop_counter import flop_registry

from fsdp_sft._compat.modules import TorchDispatchMode
from fsdp_sft._model.view import tensors_in
from fsdp_sft.sac import is_decision

# Operations that run one after the other: FLOPs of each, bytes that it reads and writes in the device's
# memory, and whether it is attention. Those without FLOPs and bytes are left out.
Workload: TypeAlias = tuple[tuple[float, float, bool], ...]

_MOVE_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
_ONLY_WRITE = ("copy_", "zero_", "fill_", "new_zeros", "zeros_like", "ones_like", "full_like")


def flops_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """FLOPs of one operation; a multiplication and its addition are two. 0 for whatever is no product."""
    packet = op.overloadpacket
    # torch's registry does not know grouped products: (rows, inner) by (experts, inner, columns), each row
    # with the matrix of its expert.
    if packet.__name__ == "_grouped_mm":
        return float(2 * args[0].numel() * args[1].shape[-1])
    count: Any = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=result))


def moved_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Bytes that one operation reads and writes; 0 for a view, or where memory is only allocated."""
    name = op.overloadpacket.__name__
    if name in _MOVE_NOTHING or op.is_view:
        return 0.0
    read = args[1:] if name in _ONLY_WRITE else (args, kwargs)
    return float(sum(map(_nbytes, tensors_in(read))) + sum(map(_nbytes, tensors_in(result))))


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements: what ``expand`` repeats lies in memory once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


# Operations that the mode does not see as one, so `note` records them.
ATTENTION = "attention"  # a fused kernel
EXCHANGE = "exchange"  # between ranks that share rows or experts
LOSS = "loss"  # the chunked loss


@dataclass
class Event:
    """One operation, or the end of one storage.

    Attributes:
        op: Name of the operation; empty for the end of a storage.
        inputs: Numbers of the storages that it read.
        outputs: Numbers of the storages that it wrote or returned, new or old.
        freed: Number of the storage that ended; -1 for an operation.
        flops: FLOPs, if it is a product.
        moved: Bytes that it reads and writes.
        decided: Bytes of a router's choices among the outputs, which a checkpointed block keeps.
        live: Bytes alive after it.
    """

    op: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    freed: int = -1
    flops: float = 0.0
    moved: float = 0.0
    decided: int = 0
    live: int = 0


def work_of(events: Iterable[Event]) -> Workload:
    """The work of operations that run one by one."""
    return tuple(
        (event.flops, event.moved, event.op == ATTENTION) for event in events if event.flops or event.moved
    )


@dataclass(eq=False)
class Ledger(TorchDispatchMode):
    """A mode that counts the live bytes of storages and records events.

    It works on meta tensors, whose storages have a size and no memory. Storages of the tensors given to
    ``ignore``, and thus all views of them, have size 0. A moment is a number of events: those before it.

    Attributes:
        live: Bytes alive now.
        events: Operations and ends of storages, in order.
        sizes: Bytes of each storage, by number.
    """

    live: int = 0
    events: list[Event] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)  # id of a live storage -> its number
    _guards: dict[int, Any] = field(default_factory=dict)  # id -> weak reference that calls _end

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = tuple(self.number(tensor) for tensor in tensors_in((args, kwargs)))
        outputs = tuple(self.number(tensor) for tensor in tensors_in(result))
        flops, moved = flops_of(func, args, kwargs, result), moved_by(func, args, kwargs, result)
        decided = self.sizes[outputs[-1]] if is_decision(func, args) else 0
        done = Event(func.overloadpacket.__name__, inputs, outputs, -1, flops, moved, decided, self.live)
        self.events.append(done)
        return result

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give these tensors size 0: parameters, whose memory is accounted for elsewhere."""
        for tensor in tensors:
            self.number(tensor, counted=False)

    def number(self, tensor: torch.Tensor, *, counted: bool = True) -> int:
        """The number of a tensor's storage, which is counted from its first call on."""
        storage = tensor.untyped_storage()
        key = id(storage)
        found = self._numbers.get(key)
        if found is not None:
            return found
        number = self._numbers[key] = len(self.sizes)
        size = storage.nbytes() if counted else 0
        self.sizes.append(size)
        self._guards[key] = weakref.ref(storage, lambda _: self._end(key, number))
        self.live += size
        return number

    def note(
        self,
        op: str,
        inputs: Iterable[torch.Tensor | None],
        outputs: Iterable[torch.Tensor],
        *,
        flops: float = 0.0,
        moved: float = 0.0,
    ) -> None:
        """Record an operation that the mode does not see as one, such as a fused kernel."""
        read = tuple(self.number(tensor) for tensor in inputs if tensor is not None)
        written = tuple(self.number(tensor) for tensor in outputs)
        self.events.append(Event(op, read, written, flops=flops, moved=moved, live=self.live))

    def live_at(self, moment: int) -> int:
        """Bytes that were alive at a moment."""
        return self.events[moment - 1].live if moment else 0

    def added(self, begin: int, end: int) -> int:
        """Most bytes that were alive at once between two moments, beyond those at the first."""
        before = self.live_at(begin)
        return max([0, *(event.live - before for event in self.events[begin:end])])

    def _end(self, key: int, number: int) -> None:
        """Called when a storage dies."""
        self.live -= self.sizes[number]
        del self._numbers[key], self._guards[key]
        self.events.append(Event("", freed=number, live=self.live))
