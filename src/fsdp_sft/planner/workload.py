"""What a sequence of operations costs a device: FLOPs, and bytes read from and written to its memory."""

from collections.abc import Iterable
from typing import TypeAlias

from fsdp_sft.planner.ledger import ATTENTION, Event

# FLOPs of an operation, bytes that it reads and writes, and whether it is attention.
Operation: TypeAlias = tuple[float, float, bool]
# Operations that run one after the other; those without FLOPs and bytes are left out.
Workload: TypeAlias = tuple[Operation, ...]


def work_of(events: Iterable[Event]) -> Workload:
    """The work of operations that run one by one."""
    counted = (event for event in events if event.flops or event.moved)
    return tuple((event.flops, event.moved, event.op == ATTENTION) for event in counted)


def until(events: list[Event], wanted: set[int]) -> list[Event]:
    """The events up to the last one that makes a ``wanted`` storage: recomputation stops there."""
    last = max((i for i, event in enumerate(events) if wanted & set(event.outputs)), default=-1)
    return events[: last + 1]
