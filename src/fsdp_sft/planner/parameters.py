"""The parameters of one FSDP2 group by their shapes: elements and bytes of shards, and of a gather."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_sft._tensors.packed_shard import PackedLayout
from fsdp_sft._tensors.sharding import shard_dim, shard_numel

if TYPE_CHECKING:
    from fsdp_sft.planner.setup import Setup


@dataclass(frozen=True)
class Group:
    """The parameters of one FSDP2 group: those of a block, or of the root.

    Attributes:
        shapes: Shape of each parameter, and whether it is trained.
        names: Name of each parameter; a block's parameters have the names that they have within it.
        stacks: Whether each parameter is a stack of experts that can be distributed; empty if none is.
        is_tower: Whether it is a vision or audio tower.
        layouts: How each parameter lies in packed rows, or None if it is not packed; empty if none is.
    """

    shapes: tuple[tuple[tuple[int, ...], bool], ...]
    names: tuple[str, ...] = ()
    stacks: tuple[bool, ...] = ()
    is_tower: bool = False
    layouts: tuple[PackedLayout | None, ...] = ()

    def parts(self, num_shards: int, ep_size: int) -> "tuple[tuple[Group, int], ...]":
        """Parts of the group that are sharded alike, each with the number of ranks it is sharded over.

        Usually that is the whole group. With expert parallelism the second part is this rank's experts, which
        are sharded over the ranks that have the same ones.
        """
        if ep_size == 1 or not any(self.stacks):
            return ((self, num_shards),)
        dense = self._those(lambda index: not self.stacks[index])
        own = self._those(lambda index: self.stacks[index])
        shapes = tuple(((shape[0] // ep_size, *shape[1:]), flag) for shape, flag in own.shapes)
        layouts = tuple(
            None if layout is None else replace(layout, shape=shape)
            for layout, (shape, _) in zip(own.layouts, shapes, strict=False)
        )
        return (dense, num_shards), (replace(own, shapes=shapes, layouts=layouts), num_shards // ep_size)

    def _those(self, is_one: Callable[[int], bool]) -> "Group":
        """The group of some of the parameters, by their indices."""

        def chosen(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(value for index, value in enumerate(values) if is_one(index))

        return Group(chosen(self.shapes), chosen(self.names), layouts=chosen(self.layouts))

    def elements(self, *, trained: bool | None = None) -> int:
        """Number of elements of all parameters, or only of the trained or the frozen ones."""
        return sum(math.prod(shape) for shape, flag in self.shapes if trained is None or flag is trained)

    def shard_elements(self, num_shards: int, *, trained: bool | None = None) -> int:
        """Number of elements in one rank's shard of what is not packed, padding included."""
        return sum(self.shards(num_shards, trained=trained))

    def shards(self, num_shards: int, *, trained: bool | None = None) -> list[int]:
        """Elements in one rank's shard of each parameter that is not packed, padding included."""
        return [shard_numel(shape, num_shards) for shape in self._chosen(trained)]

    def moved(self, num_shards: int, *, trained: bool | None = None) -> list[int]:
        """Elements of each parameter that is not cut along its first dimension, in order."""
        return [math.prod(shape) for shape in self._chosen(trained) if shard_dim(shape, num_shards)]

    def last_trained(self) -> int:
        """Elements of the trained parameter that comes last."""
        return next((math.prod(shape) for shape in reversed(self._chosen(True))), 0)

    def largest_shard(self, num_shards: int) -> int:
        """Elements in one rank's shard of the largest trained parameter."""
        return max(self.shards(num_shards, trained=True), default=0)

    @property
    def packed(self) -> list[PackedLayout]:
        """How the packed parameters lie in rows, in order."""
        return [layout for layout in self.layouts if layout is not None]

    def packed_elements(self) -> int:
        """Number of elements of the packed parameters."""
        return sum(math.prod(layout.shape) for layout in self.packed)

    def packed_bytes(self, num_shards: int) -> int:
        """Bytes of one rank's shards of the packed parameters, padding included."""
        return sum(layout.shard_rows(num_shards) * layout.form.row_bytes for layout in self.packed)

    def stored_bytes(self, num_shards: int, setup: "Setup") -> int:
        """Bytes of one rank's shards as they are stored."""
        trained, frozen = (self.shard_elements(num_shards, trained=flag) for flag in (True, False))
        kept = setup.tower_dtype if self.is_tower else setup.frozen_dtype
        stored = trained * setup.master_dtype.itemsize + frozen * kept.itemsize
        return stored + self.packed_bytes(num_shards)

    def received_bytes(self, num_shards: int, setup: "Setup") -> float:
        """Bytes that come from other ranks when the group is gathered."""
        dense = (self.elements() - self.packed_elements()) * setup.param_dtype.itemsize
        return dense * (num_shards - 1) / num_shards + self.packed_bytes(num_shards) * (num_shards - 1)

    def with_dims(self, num_shards: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """(name, shape, dimension along which it is cut) of each parameter."""
        for name, (shape, _), layout in zip(self.names, self.shapes, self._layouts, strict=True):
            yield name, shape, shard_dim(shape, num_shards) if layout is None else 0

    @property
    def _layouts(self) -> tuple[PackedLayout | None, ...]:
        return self.layouts or (None,) * len(self.shapes)

    def _chosen(self, trained: bool | None) -> list[tuple[int, ...]]:
        """Shapes of what is not packed: of all, or only of the trained or the frozen ones."""
        pairs = zip(self.shapes, self._layouts, strict=True)
        return [
            shape
            for (shape, flag), layout in pairs
            if layout is None and (trained is None or flag is trained)
        ]
