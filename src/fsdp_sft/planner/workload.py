"""What a sequence of operations costs a device: FLOPs, and bytes read from and written to its memory."""

from collections.abc import Iterable
from typing import Any, TypeAlias

from fsdp_sft.planner.ledger import ATTENTION, Event

# FLOPs of an operation, bytes that it reads and writes, and whether it is attention.
Operation: TypeAlias = tuple[float, float, bool]
# Operations that run one after the other; those without FLOPs and bytes are left out.
Workload: TypeAlias = tuple[Operation, ...]


def work_of(events: Iterable[Event]) -> Workload:
    """The work of operations that run one by one."""
    counted = (event for event in events if event.flops or event.moved)
    return tuple((event.flops, event.moved, event.op == ATTENTION) for event in counted)


def fused_work(events: Iterable[Event], sizes: list[int], *, in_memory: set[int], apart: Any) -> Workload:
    """The work of operations that are all fused, except those for which ``apart`` is true.

    Intermediates of fused operations never reach memory. A tensor in memory is read once and written once.

    Args:
        events: The events of the operations.
        sizes: Bytes by storage number.
        in_memory: Numbers of the storages that are in memory.
        apart: Predicate of an operation: whether it is a separate kernel.
    """
    alone: list[Event] = []
    read, written = set[int](), set[int]()
    for event in events:
        if event.op is None:
            continue
        if apart(event.op):
            alone.append(event)
        elif event.moved:
            made = set(event.outputs) - set(event.inputs)
            written |= made & in_memory
            read |= set(event.inputs) & in_memory - written
    moved = sum(sizes[number] for number in read | written)
    return work_of(alone) + (((0.0, float(moved), False),) if moved else ())


def until(events: list[Event], wanted: set[int]) -> list[Event]:
    """The events up to the last one that makes a ``wanted`` storage: recomputation stops there."""
    last = max((i for i, event in enumerate(events) if wanted & set(event.outputs)), default=-1)
    return events[: last + 1]
