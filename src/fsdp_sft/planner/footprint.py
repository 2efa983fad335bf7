"""What a block keeps and needs, as it ran or compiled.

``torch.compile`` cuts the joint graph of forward and backward where the fewest bytes have to be kept, and
recomputes pointwise operations from there. Matrix products and attention are never recomputed, and what they
read in the backward has to be in memory.

Of the storages that an eager block saves, those that a product or attention touches are always kept. The
others (``wanted``) follow from some set of storages by pointwise operations, and a minimum cut finds the
smallest such set.
Source: Herrmann et al.'s min-cut as in torch's partitioner,
https://dev-discuss.pytorch.org/t/min-cut-optimal-recomputation-i-e-activation-checkpointing-with-aotautograd/467.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fsdp_sft.planner.ledger import ATTENTION, EXCHANGE, LOSS, Event, Ledger, Workload, work_of
from fsdp_sft.sac import decides

_NOT_FUSED = (
    "",  # the end of a storage
    *(ATTENTION, EXCHANGE, LOSS),
    *("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "_scaled_mm"),
    "topk",
    "sort",
    "argsort",
    "cumsum",
    "histc",
    "bincount",
    "index_put",
    "_index_put_impl_",
)


@dataclass(frozen=True)
class Footprint:
    """Bytes and work of one block, without its parameters and their gathering.

    Attributes:
        kept: Bytes that the forward adds to the activations: what it saves and its output, less its input if
            that is no longer needed.
        forward_peak: Most bytes that the forward adds while it runs.
        unsaved_peak: The same where nothing is saved for a backward, as in a checkpointed block.
        again_peak: Most bytes that recomputation adds; it ends at the last tensor that the backward needs.
        saved: Bytes that the block's backward needs besides its input.
        backward_peak: Most bytes that the backward adds while it runs, gradients of parameters included.
        output: Bytes of the output.
        decisions: Bytes of a router's choices, which a checkpointed block keeps with its input.
        exchanged: Bytes that the forward sends to the ranks that share its rows or experts.
        forward: Work of the forward.
        again: Work of the part of the forward that is repeated if the block is checkpointed.
        backward: Work of the backward, without recomputation.
    """

    kept: int
    forward_peak: int
    unsaved_peak: int
    again_peak: int
    saved: int
    backward_peak: int
    output: int
    decisions: int = 0
    exchanged: int = 0
    forward: Workload = ()
    again: Workload = ()
    backward: Workload = ()

    def left(self, checkpointed: bool) -> int:
        """Bytes that the forward leaves on the device for the backward."""
        return self.output + self.decisions if checkpointed else self.kept


@dataclass(eq=False)
class BlockRecord:
    """What was seen of one block.

    Attributes:
        block: The block.
        saved: Numbers of the storages that autograd saved in its forward.
        at: Moments of the ledger: a trial of its forward (``"unsaved"``), ``"before"`` and ``"after"`` its
            forward, ``"again"`` (the last tensor that is saved, if any), ``"backward"`` and its ``"end"``.
        input: Number of its input's storage.
        output: Number of its output's storage.
        arguments: Numbers of the storages of its other arguments, such as mask and rotary tables.
    """

    block: nn.Module
    saved: set[int] = field(default_factory=set)
    at: dict[str, int] = field(default_factory=dict)
    input: int = -1
    output: int = -1
    arguments: set[int] = field(default_factory=set)


def footprint(record: BlockRecord, ledger: Ledger, kept: int, *, compiled: bool) -> Footprint:
    """The footprint of a block as it ran, or as it would run under ``torch.compile``."""
    sizes, at = ledger.sizes, record.at
    forward = ledger.events[at["before"] : at["after"]]
    backward = ledger.events[at["backward"] : at["end"]]
    alike: dict[str, Any] = {
        "output": sizes[record.output],
        "decisions": sum(event.decided for event in forward) if decides(record.block) else 0,
        "exchanged": sum(sizes[n] for event in forward if event.op == EXCHANGE for n in event.inputs),
    }
    if compiled:
        return Footprint(**alike, **_fused(record, forward, backward, sizes))
    # Recomputation stops at the last operation that makes a tensor for the backward.
    last = max((i for i, event in enumerate(forward) if record.saved & set(event.outputs)), default=-1)
    return Footprint(
        forward=work_of(forward),
        again=work_of(forward[: last + 1]),
        backward=work_of(backward),
        kept=kept,
        forward_peak=ledger.added(at["before"], at["after"]),
        unsaved_peak=ledger.added(at["unsaved"], at["before"]),
        again_peak=ledger.added(at["before"], at.get("again", at["before"])),
        saved=ledger.live_at(at["after"]) - ledger.live_at(at["before"]) - sizes[record.output],
        backward_peak=ledger.added(at["backward"], at["end"]),
        **alike,
    )


def _fused(
    record: BlockRecord, forward: list[Event], backward: list[Event], sizes: list[int]
) -> dict[str, Any]:
    """The fields of a compiled block's ``Footprint`` that differ from those of an eager one.

    Args:
        record: What was seen of the eager block.
        forward: Events of its forward.
        backward: Events of its backward.
        sizes: Bytes by storage number.
    """
    saved, block_input, output = record.saved, record.input, sizes[record.output]
    in_memory = _materialised(forward)
    own = {number for event in forward for number in event.outputs} & saved
    needed = own & in_memory
    cut = _cheapest_cut(forward, sizes, free=needed, wanted=own - needed, block_input=block_input)
    kept = needed | cut
    input_given_back = 0 if block_input in kept or block_input in saved & in_memory else sizes[block_input]
    without_input = sum(sizes[number] for number in kept - {block_input})
    counted = in_memory | {record.output}
    forward_peak = max(_peak(forward, sizes, counted), without_input + output)
    passed = _work(forward, sizes, in_memory | kept | counted | {block_input})
    left_over = {number for event in backward for number in event.outputs} - {
        event.freed for event in backward
    }
    written = _materialised(backward) | left_over
    return {
        "kept": without_input + output - input_given_back,
        "forward_peak": forward_peak,
        "unsaved_peak": forward_peak,
        "again_peak": forward_peak,
        "saved": without_input,
        "backward_peak": _peak(backward, sizes, written),
        "forward": passed,
        "again": passed,  # a compiled block is one graph: recomputation runs all of it
        "backward": _work(backward, sizes, kept | written),
    }


def _work(events: list[Event], sizes: list[int], in_memory: set[int]) -> Workload:
    """The work of operations that are all fused, except those that are kernels of their own.

    Intermediates of fused operations never reach memory. A tensor in memory is read once and written once.
    """
    alone: list[Event] = []
    read, written = set[int](), set[int]()
    for event in events:
        if event.op in _NOT_FUSED:
            alone.append(event)
        elif event.moved:
            written |= in_memory & set(event.outputs) - set(event.inputs)
            read |= set(event.inputs) & in_memory - written
    moved = sum(sizes[number] for number in read | written)
    return work_of(alone) + (((0.0, float(moved), False),) if moved else ())


def _materialised(events: list[Event]) -> set[int]:
    """Storages that are in memory, since an operation that is not fused reads or writes them."""
    return {
        number for event in events if event.op in _NOT_FUSED for number in (*event.inputs, *event.outputs)
    }


def _peak(events: list[Event], sizes: list[int], counted: set[int]) -> int:
    """Most bytes that the ``counted`` storages take at once during these events."""
    peak = live = 0
    seen = set[int]()
    for event in events:
        for number in event.outputs:
            if number in counted and number not in seen and number not in event.inputs:
                seen.add(number)
                live += sizes[number]
        peak = max(peak, live)
        if event.freed in seen:
            live -= sizes[event.freed]
    return peak


def _cheapest_cut(
    events: list[Event], sizes: list[int], *, free: set[int], wanted: set[int], block_input: int
) -> set[int]:
    """The storages of least total size from which ``wanted`` follows by fused operations alone.

    Storages in ``free`` are kept in any case and cost nothing.
    """
    if not wanted:
        return set()
    # Each storage is an edge from its "in" to its "out" whose capacity is its size: cutting it is keeping it.
    # Fused operations are edges that cannot be cut (without a capacity). The source leads to what only memory
    # can provide, and what the backward wants leads to the sink, so a minimum cut is a cheapest set of
    # storages in between. Of several the one nearest to the source is taken: networkx gives that nearest to
    # the target, so all edges point backwards.
    import networkx  # type: ignore[import-untyped,unused-ignore]

    graph = networkx.DiGraph()
    graph.add_edges_from(("sink", (number, "out")) for number in wanted)
    graph.add_edge((block_input, "in"), "source")
    produced = {block_input}
    for event in events:
        sources: list[Any] = [(number, "out") for number in event.inputs if event.op not in _NOT_FUSED]
        for number in set(event.outputs) - set(event.inputs):
            produced.add(number)
            graph.add_edges_from(((number, "in"), source) for source in sources or ["source"])
    for number in produced:
        graph.add_edge((number, "out"), (number, "in"), capacity=0 if number in free else sizes[number])
    _, (_, near) = networkx.minimum_cut(graph, "sink", "source")
    return {n for n in produced - free if (n, "in") in near and (n, "out") not in near}
