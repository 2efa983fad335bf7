"""What a compiled block keeps: the smallest set of tensors from which the rest can be recomputed.

``torch.compile`` cuts the joint graph of forward and backward where the fewest bytes have to be kept, and
recomputes pointwise operations from there. Matrix products and attention are never recomputed, and what they
read in the backward has to be in memory.

Of the storages that an eager block saves, those that a product or attention touches are always kept. The
others (``wanted``) follow from some set of storages by pointwise operations, and a minimum cut finds the
smallest such set.
Source: Herrmann et al.'s min-cut as in torch's partitioner,
https://dev-discuss.pytorch.org/t/min-cut-optimal-recomputation-i-e-activation-checkpointing-with-aotautograd/467.
"""

from typing import Any

from fsdp_sft.planner.ledger import ATTENTION, EXCHANGE, LOSS, Event, Workload, work_of

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "_scaled_mm")
_NOT_FUSED = (
    *_PRODUCTS,
    "topk",
    "sort",
    "argsort",
    "cumsum",
    "histc",
    "bincount",
    "index_put",
    "_index_put_impl_",
)


def fused_footprint(
    *,
    forward: list[Event],
    backward: list[Event],
    sizes: list[int],
    saved: set[int],
    block_input: int,
    block_output: int,
) -> dict[str, Any]:
    """The fields of a compiled block's ``Footprint``, except the size of its output.

    Args:
        forward: Events of the block's eager forward.
        backward: Events of its eager backward.
        sizes: Bytes by storage number.
        saved: Storages that the eager forward saves for the backward.
        block_input: Number of the input's storage.
        block_output: Number of the output's storage.
    """
    in_memory = _materialised(forward)
    inside = {number for event in forward for number in event.outputs}
    own = {number for number in saved if number in inside}
    needed = own & in_memory
    cut = _cheapest_cut(forward, sizes, free=needed, wanted=own - needed, block_input=block_input)
    kept = needed | cut
    bytes_kept = sum(sizes[number] for number in kept)
    output = sizes[block_output]
    input_given_back = 0 if block_input in kept or block_input in saved & in_memory else sizes[block_input]
    without_input = bytes_kept - (sizes[block_input] if block_input in kept else 0)
    counted = in_memory | {block_output}
    forward_peak = max(_peak(forward, sizes, counted, 0), without_input + output)
    passed = _work(forward, sizes, in_memory | kept | counted | {block_input})
    return {
        "kept": without_input + output - input_given_back,
        "forward_peak": forward_peak,
        "unsaved_peak": forward_peak,
        "again_peak": forward_peak,
        "saved": without_input,
        "backward_peak": _peak(backward, sizes, _materialised(backward) | _left_over(backward), 0),
        "forward": passed,
        "again": passed,  # a compiled block is one graph: recomputation runs all of it
        "backward": _work(backward, sizes, kept | _materialised(backward) | _left_over(backward)),
    }


def _work(events: list[Event], sizes: list[int], in_memory: set[int]) -> Workload:
    """The work of operations that are all fused, except those that are kernels of their own.

    Intermediates of fused operations never reach memory. A tensor in memory is read once and written once.
    """
    alone: list[Event] = []
    read, written = set[int](), set[int]()
    for event in events:
        if event.op is None:
            continue
        if not _is_fused(event.op):
            alone.append(event)
        elif event.moved:
            made = set(event.outputs) - set(event.inputs)
            written |= made & in_memory
            read |= set(event.inputs) & in_memory - written
    moved = sum(sizes[number] for number in read | written)
    return work_of(alone) + (((0.0, float(moved), False),) if moved else ())


def _is_fused(op: Any) -> bool:
    """Whether the compiler fuses an operation with its neighbours, and so can recompute it."""
    if op in (ATTENTION, EXCHANGE, LOSS):
        return False
    return getattr(op, "overloadpacket", op).__name__ not in _NOT_FUSED


def _materialised(events: list[Event]) -> set[int]:
    """Storages that are in memory, since an operation that is not fused reads or writes them."""
    return {
        number
        for event in events
        if event.op is not None and not _is_fused(event.op)
        for number in (*event.inputs, *event.outputs)
    }


def _left_over(events: list[Event]) -> set[int]:
    """Storages that these events make and do not free."""
    made = {number for event in events for number in event.outputs}
    return made - {event.freed for event in events if event.op is None}


def _peak(events: list[Event], sizes: list[int], counted: set[int], live: int) -> int:
    """Most bytes that the ``counted`` storages take at once during these events, on top of ``live``."""
    peak, seen = live, set()
    for event in events:
        for number in event.outputs:
            if number in counted and number not in seen and number not in event.inputs:
                seen.add(number)
                live += sizes[number]
        peak = max(peak, live)
        if event.op is None and (event.freed in seen):
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
        if event.op is None:
            continue
        sources: list[Any] = [(number, "out") for number in event.inputs if _is_fused(event.op)]
        for number in set(event.outputs) - set(event.inputs):
            produced.add(number)
            graph.add_edges_from(((number, "in"), source) for source in sources or ["source"])
    for number in produced:
        graph.add_edge((number, "out"), (number, "in"), capacity=0 if number in free else sizes[number])
    _, (_, near) = networkx.minimum_cut(graph, "sink", "source")
    return {n for n in produced - free if (n, "in") in near and (n, "out") not in near}
