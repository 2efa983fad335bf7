"""The parameters of FSDP2's groups, by shapes alone: bytes of shards, of a gather and of a reduction.

What is packed, how rows lie and how values are computed is the library's own code (``shard/packing.py``,
``_tensors/packed_shard.py``), here on the meta device.
"""

import functools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fsdp_sft._quantised.find import is_left_out, rows_by_config
from fsdp_sft._quantised.recipes import RECIPES
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._tensors.packed_shard import PackedLayout
from fsdp_sft.planner.ledger import Ledger, Workload, work_of
from fsdp_sft.planner.run import Run
from fsdp_sft.shard.float32_modules import kept_parameters
from fsdp_sft.shard.packing import STORED, matrices_to_pack
from fsdp_sft.shard.units import shard_dim, shard_numel

_RUNS = 3  # of values that are computed at once, after which runs are alike


@dataclass(frozen=True)
class Parameter:
    """One parameter of a group.

    Attributes:
        shape: Its shape.
        trained: Whether it is trained.
        is_tower: Whether it is of a vision or audio tower.
        is_expert: Whether it is a stack of experts that ranks can share out.
        layout: How it lies in packed rows; None if it is not packed.
    """

    shape: tuple[int, ...]
    trained: bool
    is_tower: bool = False
    is_expert: bool = False
    layout: PackedLayout | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def share(self, ep_size: int) -> "Parameter":
        """What one rank has of it: its experts of a stack that ``ep_size`` ranks share out."""
        if not self.is_expert or ep_size == 1:
            return replace(self, is_expert=False)
        shape = (self.shape[0] // ep_size, *self.shape[1:])
        return replace(self, shape=shape, layout=self.layout and replace(self.layout, shape=shape))

    def stored_dtype(self, run: Run) -> torch.dtype:
        """Dtype of its shards, if it is not packed."""
        if self.trained:
            return run.master_dtype
        return run.param_dtype if self.is_tower and run.frozen_dtype is None else run.kept_dtype()


@dataclass(frozen=True, eq=False)
class Group:
    """The parameters of one FSDP2 group, in order: those of a block, or of the root."""

    parameters: tuple[Parameter, ...]


def group_of(
    module: nn.Module,
    left: dict[int, str],
    towers: tuple[str, ...],
    experts: Collection[str],
    layouts: dict[int, PackedLayout],
) -> Group:
    """The group of those parameters of a module that are in no earlier one: takes them from what is left."""
    found = []
    for parameter in module.parameters():
        name = left.pop(id(parameter), None)
        if name is not None:
            known = {
                "trained": parameter.requires_grad,
                "is_tower": name.startswith(tuple(f"{tower}." for tower in towers)),
                "is_expert": name.rpartition(".")[0] in experts,
            }
            found.append(Parameter(tuple(parameter.shape), layout=layouts.get(id(parameter)), **known))
    return Group(tuple(found))


@functools.lru_cache(maxsize=1024)
def decoding(layout: PackedLayout, dtype: torch.dtype) -> tuple[int, Workload, float]:
    """Compute a part of a gathered weight's values on the meta device, by the function that the gather calls.

    Returns:
        Most bytes that this takes besides the values, its work, and the weight in such parts.
    """
    number = min(layout.shape[0], max(2, -(-_RUNS * layout.form.at_once // math.prod(layout.shape[1:]))))
    rows = torch.empty((number * layout.rows_each, layout.form.row_bytes), dtype=torch.uint8, device="meta")
    place = torch.empty((number, *layout.shape[1:]), dtype=dtype, device="meta")
    ledger = Ledger()
    ledger.ignore((rows, place))
    with ledger:
        layout.fill(rows, place)
    return ledger.added(0, len(ledger.events)), work_of(ledger.events), layout.shape[0] / number


def decoding_peak(layouts: Iterable[PackedLayout], dtype: torch.dtype) -> int:
    """Most bytes that a gather of several weights takes beyond those that it ends with.

    They are computed one after the other, each into memory that is allocated just before.
    """
    most = behind = 0
    for layout in reversed(list(layouts)):
        most = max(most, decoding(layout, dtype)[0] - behind)
        behind += math.prod(layout.shape) * dtype.itemsize
    return most


@dataclass(frozen=True)
class Sizes:
    """Bytes of one FSDP2 group's buffers.

    Attributes:
        stored: This rank's shards as they are stored.
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
        shards: Elements of this rank's shard of each trained parameter, padding included.
        shard_gradients: This rank's gradients as the optimizer reads them, in the master dtype.
        moved: Gathered parameters that are not cut along their first dimension; FSDP2 copies them once more.
        largest_moved_gradient: The largest gradient of such a parameter.
        last_moved_gradient: The gradient of the last such parameter, whose pieces outlive foreach_reduce's
            loop too.
        packed: How packed parameters lie in rows.
        decoding: What computing the values of packed parameters takes beyond ``gathered``.
    """

    stored: int
    gathered: int
    buffer: int
    ahead: int
    received: int
    cast: int
    gradients: int
    reduced: int
    scattered: int
    last_gradient: int
    shards: tuple[int, ...]
    shard_gradients: int
    moved: int
    largest_moved_gradient: int
    last_moved_gradient: int
    packed: tuple[PackedLayout, ...]
    decoding: int


@functools.lru_cache(maxsize=4096)
def group_sizes(group: Group, run: Run) -> Sizes:
    """Sizes of a group's buffers, including its experts, a second group under expert parallelism.

    Where a single tensor is meant, it is the larger one of both groups.
    """
    compute, reduce = run.param_dtype.itemsize, run.reduce_dtype.itemsize
    own = [parameter.share(run.ep_size) for parameter in group.parameters]
    ranks = {False: run.num_shards, True: run.num_shards // run.ep_size}  # of a shard, by is_expert
    plain = [
        (p, ranks[p.is_expert], shard_numel(p.shape, ranks[p.is_expert])) for p in own if p.layout is None
    ]
    packed = [
        (p, ranks[p.is_expert], p.layout.shard_rows(ranks[p.is_expert]) * p.layout.form.row_bytes)
        for p in own
        if p.layout is not None
    ]
    sent = [(p, n, size * compute) for p, n, size in plain] + packed
    trained = [(p, n, size) for p, n, size in plain if p.trained]
    shards = tuple(size for _, _, size in trained)
    moved = [p for p, n, _ in plain if shard_dim(p.shape, n)]
    last = {p.is_expert: p.elements for p, _, _ in trained}
    last_moved = {p.is_expert: p.elements for p in moved if p.trained}
    layouts = {flag: [p.layout for p in own if p.layout and p.is_expert is flag] for flag in ranks}
    return Sizes(
        stored=sum(size * p.stored_dtype(run).itemsize for p, _, size in plain)
        + sum(size for _, _, size in packed),
        gathered=sum(n * size for _, n, size in sent) + sum(p.elements for p, _, _ in packed) * compute,
        buffer=sum(n * size for _, n, size in sent if n > 1),
        ahead=sum(n * size for p, n, size in sent if n > 1 and not p.is_expert),
        received=sum((n - 1) * size for _, n, size in sent),
        cast=sum(size for p, n, size in plain if n > 1 and p.stored_dtype(run) != run.param_dtype) * compute,
        gradients=sum(p.elements for p, _, _ in trained) * compute,
        reduced=sum(n * size for _, n, size in trained) * reduce,
        scattered=sum(shards) * reduce,
        last_gradient=max(last.values(), default=0) * compute,
        shards=shards,
        shard_gradients=sum(shards) * run.master_dtype.itemsize,
        moved=sum(p.elements for p in moved) * compute,
        largest_moved_gradient=max((p.elements for p in moved if p.trained), default=0) * compute,
        last_moved_gradient=max(last_moved.values(), default=0) * compute,
        packed=tuple(layout for flag in ranks for layout in layouts[flag]),
        decoding=max(decoding_peak(layouts[flag], run.param_dtype) for flag in ranks),
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
    kept = kept_parameters(model, model.dtype, named, {name: p.dtype for name, p in named.items()})
    matrices = matrices_to_pack(named, blocks, {id(named[n]) for n in kept if model.dtype.itemsize == 2})
    if not matrices:
        raise ValueError(
            f"frozen_dtype={kind!r} is for frozen weights, and no matrix in a block is frozen: give lora_rank"
        )
    if kind == STORED and settings is None:
        raise ValueError(
            "frozen_dtype='stored' keeps weights as a quantised checkpoint has them, and the config has "
            f"no quantization_config: take a dtype, or {' or '.join(map(repr, RECIPES))}"
        )
    own = settings if kind == STORED else None
    found = {}
    for name, parameter in matrices.items():
        if own is not None and is_left_out(own, name.removesuffix(".weight").removesuffix(".base")):
            continue
        shape = tuple(parameter.shape)
        rows = rows_by_config(own, shape) if own else (RECIPES[kind].form(shape[-1]), False)
        if rows is not None:
            found[id(parameter)] = PackedLayout(rows[0], shape, transposed=rows[1])
    if not found:
        raise ValueError(
            f"frozen_dtype={kind!r}: the config ({settings and settings.method}) does not say of any weight "
            f"that its rows have bytes of their own; {' or '.join(map(repr, RECIPES))} packs them anew"
        )
    return found
