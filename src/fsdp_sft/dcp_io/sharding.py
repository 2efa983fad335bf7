"""Which rank has written which part of a tensor: derived from its shape, the mesh and the splits.

A manifest says this once for all tensors that lie alike, so its size does not grow with the ranks. What is
said is more general than FSDP2 alone needs: splits come in the order in which they are made, so that a tensor
cut by expert or tensor parallelism before FSDP2 (torch's strided shard) is said too.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_sft._boxes import Box, chunk_of, cuts_of, refuse_disordered

_MOST_AXES = 8


@dataclass(frozen=True)
class Sharding:
    """How a tensor lies on a mesh, by ``torch.chunk`` along one dimension after the other.

    Attributes:
        mesh_shape: Ranks along each axis of the mesh.
        ranks: Row-major; None for 0, 1, 2, ...
        splits: (axis of the mesh, dimension of the tensor), in the order of the cuts. Ranks along the other
            axes have copies.
    """

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...] | None
    splits: tuple[tuple[int, int], ...]

    @property
    def copies(self) -> int:
        """How many ranks have each part."""
        cut = {axis for axis, _ in self.splits}
        return math.prod(n for axis, n in enumerate(self.mesh_shape) if axis not in cut)

    def parts(self, shape: Sequence[int], copy: int, wanted: Box | None = None) -> Iterator[tuple[int, Box]]:
        """(rank, its part) of one copy, of the parts that are not empty and meet ``wanted`` (None: all)."""
        place = self._place_of_copy(copy)
        everything = Box((0,) * len(shape), tuple(shape))
        if everything.numel:
            yield from self._cut(0, place, everything, wanted or everything)

    def part_of_rank(self, shape: Sequence[int], copy: int, rank: int) -> Box | None:
        """What ``rank`` has written; None if nothing."""
        place = self._coordinate(rank)
        if place is None:
            return None
        cut = {axis for axis, _ in self.splits}
        own = self._place_of_copy(copy)
        if any(place[axis] != own[axis] for axis in range(len(place)) if axis not in cut):
            return None
        box = Box((0,) * len(shape), tuple(shape))
        for axis, dim in self.splits:
            box = chunk_of(box, dim, self.mesh_shape[axis], place[axis])
        return box if box.numel else None

    def _cut(self, number: int, place: list[int], box: Box, wanted: Box) -> Iterator[tuple[int, Box]]:
        if box.intersect(wanted) is None:
            return
        if number == len(self.splits):
            yield self._rank_at(place), box
            return
        axis, dim = self.splits[number]
        parts = self.mesh_shape[axis]
        step = -(-box.shape[dim] // parts)
        first = max(0, wanted.offset[dim] - box.offset[dim]) // step
        end = wanted.offset[dim] + wanted.shape[dim] - box.offset[dim]
        for index in range(first, min(parts, -(-min(end, box.shape[dim]) // step))):
            inner = list(place)
            inner[axis] = index
            yield from self._cut(number + 1, inner, chunk_of(box, dim, parts, index), wanted)

    def _place_of_copy(self, copy: int) -> list[int]:
        """The coordinate of a copy, with zeros along the axes that cut."""
        cut = {axis for axis, _ in self.splits}
        place = [0] * len(self.mesh_shape)
        for axis in reversed(range(len(self.mesh_shape))):
            if axis not in cut:
                copy, place[axis] = divmod(copy, self.mesh_shape[axis])
        return place

    def _rank_at(self, place: Sequence[int]) -> int:
        index = 0
        for size, at in zip(self.mesh_shape, place, strict=True):
            index = index * size + at
        return index if self.ranks is None else self.ranks[index]

    def _coordinate(self, rank: int) -> list[int] | None:
        if self.ranks is None:
            index = rank
        elif rank in self.ranks:
            index = self.ranks.index(rank)
        else:
            return None
        if not 0 <= index < math.prod(self.mesh_shape):
            return None
        place: list[int] = []
        for size in reversed(self.mesh_shape):
            index, at = divmod(index, size)
            place.insert(0, at)
        return place


class Shardings:
    """How live tensors lie; meshes are read once."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._ranks: dict[DeviceMesh, tuple[int, ...] | None] = {}

    def of(self, tensor: torch.Tensor) -> Sharding:
        """The sharding of a tensor; one that is not sharded has a copy on every rank.

        Raises:
            TypeError: For placements that leave a rank with several boxes.
        """
        if not isinstance(tensor, DTensor):
            return Sharding((self._world_size,), None, ())
        mesh = tensor.device_mesh
        splits = cuts_of(tensor.placements, tuple(mesh.shape), tensor.ndim)
        refuse_disordered(mesh, tensor.placements)
        if mesh.size() != self._world_size:
            raise ValueError(
                f"a tensor lies on {mesh} and not on all {self._world_size} ranks, as where tensor "
                "parallelism leaves it whole beside FSDP2, and who has which part is not known; load the "
                "model with tp_size=1"
            )
        if mesh not in self._ranks:
            ranks = tuple(mesh.mesh.flatten().tolist())
            self._ranks[mesh] = None if ranks == tuple(range(len(ranks))) else ranks
        return Sharding(tuple(mesh.shape), self._ranks[mesh], splits)


def one_rank(rank: int) -> Sharding:
    """All of a tensor on one rank."""
    return Sharding((1,), (rank,), ())


def encode_sharding(sharding: Sharding) -> dict[str, Any]:
    """As JSON."""
    splits = [list(split) for split in sharding.splits]
    encoded: dict[str, Any] = {"mesh": list(sharding.mesh_shape), "splits": splits}
    if sharding.ranks is not None:
        encoded["ranks"] = list(sharding.ranks)
    return encoded


def parse_sharding(raw: Any, world_size: int) -> Sharding:
    """The inverse.

    Raises:
        ValueError: If it is not valid, or says more than this release knows.
    """
    unknown = sorted(raw.keys() - {"mesh", "splits", "ranks"})
    if unknown:
        raise ValueError(f"a sharding has {unknown}, unknown here: load it with the release that wrote it")
    ranks = None if raw.get("ranks") is None else tuple(raw["ranks"])
    sharding = Sharding(tuple(raw["mesh"]), ranks, tuple((axis, dim) for axis, dim in raw["splits"]))
    numbers = [*sharding.mesh_shape, *(ranks or ()), *(n for split in sharding.splits for n in split)]
    if any(type(n) is not int or n < 0 for n in numbers) or not 0 < len(sharding.mesh_shape) <= _MOST_AXES:
        raise ValueError("a sharding is not valid")
    size = math.prod(sharding.mesh_shape)
    axes = [axis for axis, _ in sharding.splits]
    valid = 0 < size <= world_size
    if ranks is not None:
        valid = valid and len(ranks) == size == len(set(ranks)) and max(ranks) < world_size
    if not valid or len(set(axes)) != len(axes) or max(axes, default=0) >= len(sharding.mesh_shape):
        raise ValueError("a sharding is not valid")
    return sharding
