"""Bytes of the buffers of one FSDP2 group."""

from dataclasses import dataclass, fields

from fsdp_sft.planner.packed import decoding_peak
from fsdp_sft.planner.parameters import Group
from fsdp_sft.planner.setup import Setup


@dataclass(frozen=True)
class Sizes:
    """Bytes of one FSDP2 group's buffers.

    Attributes:
        gathered: Parameters in the compute dtype, unsharded and padded; beside the values of packed ones the
            bytes that they are computed from, which FSDP2 frees with them.
        buffer: The all-gather's output; 0 on one rank, which gathers nothing.
        ahead: Part of ``buffer`` that is prefetched: all but the experts under expert parallelism, which are
            a separate group within the block.
        cast: Copies that the all-gather's input takes: of shards that are stored in another dtype than the
            compute dtype, and of all that lie on the host.
        gradients: Unsharded gradients of the trained parameters, in the compute dtype.
        reduced: The reduce-scatter's input: those gradients in the dtype of the reduction, padded.
        scattered: The reduce-scatter's output: this rank's part of it.
        last_gradient: Gradient of the last trained parameter, to which foreach_reduce's loop variable still
            refers after its loop.
        shard_gradients: This rank's gradients as the optimizer reads them, in the master dtype.
        moved: Gathered parameters that are not cut along their first dimension; FSDP2 copies them once more.
        largest_moved_gradient: The largest gradient of such a parameter.
        last_moved_gradient: The gradient of the last such parameter, whose pieces outlive foreach_reduce's
            loop too.
        decoding: What computing the values of packed parameters takes beyond ``gathered``.
    """

    gathered: int
    buffer: int
    ahead: int
    cast: int
    gradients: int
    reduced: int
    scattered: int
    last_gradient: int
    shard_gradients: int
    moved: int
    largest_moved_gradient: int
    last_moved_gradient: int
    decoding: int


def group_sizes(group: Group, setup: Setup) -> Sizes:
    """Sizes of a block's buffers, including its experts, a second group under expert parallelism."""
    first, *others = (_part_sizes(*part, setup) for part in group.parts(setup.num_shards, setup.ep_size))
    for other in others:
        first = _together(first, other)
    return first


def _together(dense: Sizes, experts: Sizes) -> Sizes:
    """Sizes while both groups are gathered: sums, or the larger of two where a single tensor is meant."""
    largest = ("last_gradient", "largest_moved_gradient", "last_moved_gradient", "decoding")
    pairs = {f.name: (getattr(dense, f.name), getattr(experts, f.name)) for f in fields(Sizes)}
    sizes = {name: max(pair) if name in largest else sum(pair) for name, pair in pairs.items()}
    return Sizes(**{**sizes, "ahead": dense.ahead})


def _part_sizes(group: Group, shards: int, setup: Setup) -> Sizes:
    """Sizes of the buffers of parameters that are all sharded over ``shards`` ranks."""
    compute, reduce = setup.param_dtype.itemsize, setup.reduce_dtype.itemsize
    dense = group.shard_elements(shards) * compute
    trained = group.shard_elements(shards, trained=True)
    packed = group.packed_bytes(shards)
    moved = group.moved(shards, trained=True)
    sent = (dense + packed) * shards if shards > 1 else 0
    return Sizes(
        gathered=(dense + packed) * shards + group.packed_elements() * compute,
        buffer=sent,
        ahead=sent,
        cast=_copied(group, shards, setup) if shards > 1 else 0,
        gradients=group.elements(trained=True) * compute,
        reduced=trained * shards * reduce,
        scattered=trained * reduce,
        last_gradient=group.last_trained() * compute,
        shard_gradients=trained * setup.master_dtype.itemsize,
        moved=sum(group.moved(shards)) * compute,
        largest_moved_gradient=max(moved, default=0) * compute,
        last_moved_gradient=(moved or [0])[-1] * compute,
        decoding=decoding_peak(group.packed, setup.param_dtype),
    )


def _copied(group: Group, shards: int, setup: Setup) -> int:
    """Bytes of the copies that are gathered in place of the shards."""
    if setup.cpu_offload:
        return group.shard_elements(shards) * setup.param_dtype.itemsize + group.packed_bytes(shards)
    stored = {True: setup.master_dtype, False: setup.tower_dtype if group.is_tower else setup.frozen_dtype}
    return sum(
        group.shard_elements(shards, trained=flag) * setup.param_dtype.itemsize
        for flag, dtype in stored.items()
        if dtype != setup.param_dtype
    )
