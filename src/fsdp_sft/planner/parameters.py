"""The parameters of FSDP2's groups, by shapes alone: bytes of shards, of a gather and of a reduction.

What is packed, how rows lie and how values are computed is the library's own code (``shard/packing.py``,
``_tensors/packed_shard.py``), here on the meta device.
"""

import functools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from fsdp_sft._quantised.find import is_left_out, row_by_config
from fsdp_sft._quantised.recipes import RECIPES
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._tensors.packed_shard import VALUES_AT_ONCE, PackedLayout, RowFormat
from fsdp_sft._tensors.sharding import shard_dim, shard_numel
from fsdp_sft.planner.ledger import Ledger, Workload, work_of
from fsdp_sft.planner.run import Run
from fsdp_sft.shard.float32_modules import kept_parameters
from fsdp_sft.shard.packing import STORED, matrices_to_pack

_RUNS = 3  # of values that are computed at once, after which runs are alike


@dataclass(frozen=True)
class Parameter:
    """One parameter of a group.

    Attributes:
        shape: Its shape.
        trained: Whether it is trained.
        is_expert: Whether it is a stack of experts that ranks can share out.
        layout: How it lies in packed rows; None if it is not packed.
    """

    shape: tuple[int, ...]
    trained: bool
    is_expert: bool = False
    layout: PackedLayout | None = None

    def share(self, ep_size: int) -> "Parameter":
        """One rank's experts of a stack that ``ep_size`` ranks share out."""
        shape = (self.shape[0] // ep_size, *self.shape[1:])
        return replace(self, shape=shape, layout=self.layout and replace(self.layout, shape=shape))


@dataclass(frozen=True)
class Group:
    """The parameters of one FSDP2 group: those of a block, or of the root.

    Attributes:
        parameters: The parameters, in order.
        is_tower: Whether it is a vision or audio tower.
    """

    parameters: tuple[Parameter, ...]
    is_tower: bool = False

    def parts(self, num_shards: int, ep_size: int) -> "tuple[tuple[Group, int], ...]":
        """Parts of the group that are sharded alike, each with the number of ranks it is sharded over.

        Usually that is the whole group. With expert parallelism the second part is this rank's experts, which
        are sharded over the ranks that have the same ones.
        """
        own = tuple(p.share(ep_size) for p in self.parameters if p.is_expert)
        if ep_size == 1 or not own:
            return ((self, num_shards),)
        dense = tuple(p for p in self.parameters if not p.is_expert)
        return (Group(dense), num_shards), (Group(own), num_shards // ep_size)

    def elements(self, *, trained: bool | None = None) -> int:
        """Number of elements of all parameters, or only of the trained or the frozen ones."""
        return sum(math.prod(p.shape) for p in self.parameters if trained is None or p.trained is trained)

    def shapes(self, *, trained: bool | None = None) -> list[tuple[int, ...]]:
        """Shapes of what is not packed: of all, or only of the trained or the frozen ones."""
        unpacked = (p for p in self.parameters if p.layout is None)
        return [p.shape for p in unpacked if trained is None or p.trained is trained]

    def shards(self, num_shards: int, *, trained: bool | None = None) -> list[int]:
        """Elements in one rank's shard of each parameter that is not packed, padding included."""
        return [shard_numel(shape, num_shards) for shape in self.shapes(trained=trained)]

    def moved(self, num_shards: int, *, trained: bool | None = None) -> list[int]:
        """Elements of each parameter that is not cut along its first dimension, in order."""
        return [math.prod(shape) for shape in self.shapes(trained=trained) if shard_dim(shape, num_shards)]

    @property
    def packed(self) -> list[PackedLayout]:
        """How the packed parameters lie in rows, in order."""
        return [p.layout for p in self.parameters if p.layout is not None]

    def packed_elements(self) -> int:
        """Number of elements of the packed parameters."""
        return sum(math.prod(layout.shape) for layout in self.packed)

    def packed_bytes(self, num_shards: int) -> int:
        """Bytes of one rank's shards of the packed parameters, padding included."""
        return sum(layout.shard_rows(num_shards) * layout.form.row_bytes for layout in self.packed)

    def stored_bytes(self, num_shards: int, run: Run) -> int:
        """Bytes of one rank's shards as they are stored."""
        trained, frozen = (sum(self.shards(num_shards, trained=flag)) for flag in (True, False))
        kept = run.kept_dtype(is_tower=self.is_tower)
        stored = trained * run.master_dtype.itemsize + frozen * kept.itemsize
        return stored + self.packed_bytes(num_shards)


@dataclass(frozen=True)
class Decoding:
    """What computing the values of a gathered weight takes, besides the values.

    Attributes:
        peak: Most bytes alive at once.
        work: Operations of a part of the weight.
        times: The weight in such parts.
    """

    peak: int
    work: Workload
    times: float


@functools.lru_cache(maxsize=1024)
def decoding(layout: PackedLayout, dtype: torch.dtype) -> Decoding:
    """Compute a part of a weight on the meta device, by the function that the gather calls."""
    each = math.prod(layout.shape[1:])
    number = min(layout.shape[0], max(2, -(-_RUNS * VALUES_AT_ONCE // each)))
    rows = torch.empty((number * layout.rows_each, layout.form.row_bytes), dtype=torch.uint8, device="meta")
    place = torch.empty((number, *layout.shape[1:]), dtype=dtype, device="meta")
    ledger = Ledger()
    ledger.ignore((rows, place))
    with ledger:
        layout.fill(rows, place)
    return Decoding(ledger.added(0, len(ledger.events)), work_of(ledger.events), layout.shape[0] / number)


def decoding_peak(layouts: Iterable[PackedLayout], dtype: torch.dtype) -> int:
    """Most bytes that a gather of several weights takes beyond those that it ends with.

    They are computed one after the other, each into memory that is allocated just before.
    """
    most = behind = 0
    for layout in reversed(list(layouts)):
        most = max(most, decoding(layout, dtype).peak - behind)
        behind += math.prod(layout.shape) * dtype.itemsize
    return most


@dataclass(frozen=True)
class Sizes:
    """Bytes of one FSDP2 group's buffers.

    Attributes:
        gathered: Parameters in the compute dtype, unsharded and padded; beside the values of packed ones the
            bytes that they are computed from, which FSDP2 frees with them.
        buffer: The all-gather's output; 0 on one rank, which gathers nothing.
        ahead: Part of ``buffer`` that is prefetched: all but the experts under expert parallelism, which are
            a separate group within the block.
        received: Part of ``buffer`` that comes from other ranks.
        cast: Copies that the all-gather's input takes, of shards that are stored in another dtype than the
            compute dtype.
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
    received: int
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


@functools.lru_cache(maxsize=4096)
def group_sizes(group: Group, run: Run) -> Sizes:
    """Sizes of a block's buffers, including its experts, a second group under expert parallelism."""
    first, *others = (_part_sizes(*part, run) for part in group.parts(run.num_shards, run.ep_size))
    for other in others:
        # While both are gathered: sums, or the larger of two where a single tensor is meant.
        pairs = {f.name: (getattr(first, f.name), getattr(other, f.name)) for f in fields(Sizes)}
        sizes = {name: max(pair) if name in _OF_ONE else sum(pair) for name, pair in pairs.items()}
        first = Sizes(**{**sizes, "ahead": first.ahead})
    return first


_OF_ONE = ("last_gradient", "largest_moved_gradient", "last_moved_gradient", "decoding")


def _part_sizes(group: Group, shards: int, run: Run) -> Sizes:
    """Sizes of the buffers of parameters that are all sharded over ``shards`` ranks."""
    compute, reduce = run.param_dtype.itemsize, run.reduce_dtype.itemsize
    dense = sum(group.shards(shards)) * compute
    trained = sum(group.shards(shards, trained=True))
    packed = group.packed_bytes(shards)
    moved = group.moved(shards, trained=True)
    last_trained = [math.prod(shape) for shape in group.shapes(trained=True)][-1:]
    kept = {True: run.master_dtype, False: run.kept_dtype(is_tower=group.is_tower)}
    cast = (sum(group.shards(shards, trained=flag)) for flag, dtype in kept.items() if dtype != run.param_dtype)
    sent = (dense + packed) * shards if shards > 1 else 0
    return Sizes(
        gathered=(dense + packed) * shards + group.packed_elements() * compute,
        buffer=sent,
        ahead=sent,
        received=(dense + packed) * (shards - 1),
        cast=sum(cast) * compute if shards > 1 else 0,
        gradients=group.elements(trained=True) * compute,
        reduced=trained * shards * reduce,
        scattered=trained * reduce,
        last_gradient=sum(last_trained) * compute,
        shard_gradients=trained * run.master_dtype.itemsize,
        moved=sum(group.moved(shards)) * compute,
        largest_moved_gradient=max(moved, default=0) * compute,
        last_moved_gradient=sum(moved[-1:]) * compute,
        decoding=decoding_peak(group.packed, run.param_dtype),
    )


def layouts_of(
    model: Any, blocks: Collection[nn.Module], kind: str, settings: Settings | None
) -> dict[int, PackedLayout]:
    """How each weight that is kept packed lies in rows, by the id of the parameter.

    Args:
        model: The model on the meta device, in the compute dtype, with what is trained.
        blocks: Its blocks.
        kind: ``"stored"``, or the name of a recipe.
        settings: How the checkpoint is quantised by its config; None if it is not.

    Raises:
        ValueError: If nothing is frozen, or the config does not say how rows are stored.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    spared = set[int]()
    if model.dtype in (torch.float16, torch.bfloat16):
        names = kept_parameters(model, model.dtype, {name: p.dtype for name, p in named.items()})
        spared = {id(named[name]) for name in names}
    matrices = matrices_to_pack(named, blocks, spared)
    if not matrices:
        raise ValueError(
            f"frozen_dtype={kind!r} is for frozen weights, and no matrix in a block is frozen: give "
            "lora_rank, or trainable"
        )
    if kind == STORED and settings is None:
        raise ValueError(
            "frozen_dtype='stored' keeps weights as a quantised checkpoint has them, and the config has "
            f"no quantization_config: take a dtype, or {' or '.join(map(repr, RECIPES))}"
        )
    own = settings if kind == STORED else None

    @functools.cache
    def rows_of(shape: tuple[int, ...]) -> tuple[RowFormat, bool] | None:
        # Each format is made once, so that blocks that are alike compare equal.
        return (RECIPES[kind].form(shape[-1]), False) if own is None else row_by_config(own, shape)

    found = {}
    for name, parameter in matrices.items():
        if own is not None and is_left_out(own, name.removesuffix(".weight").removesuffix(".base")):
            continue
        shape = tuple(parameter.shape)
        rows = rows_of((1, *shape[1:]) if len(shape) == 3 else shape[1:])
        if rows is not None:
            found[id(parameter)] = PackedLayout(rows[0], shape, rows[1])
    if not found:
        assert settings is not None
        raise ValueError(
            f"frozen_dtype='stored': the config ({settings.method}) does not say of any weight that its rows "
            f"have bytes of their own; {' or '.join(map(repr, RECIPES))} packs them anew"
        )
    return found
