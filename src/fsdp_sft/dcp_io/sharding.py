"""Which rank has written which part of a tensor, derived from the tensor's shape, the mesh and the cuts.

A manifest states a sharding once for all tensors that are sharded alike, so its size does not grow with the
number of ranks. The parts follow from it by repeating ``torch.chunk``. A (5, 4) matrix on a (2, 2) mesh, cut
along its rows over axis 0 of the mesh and then along its columns over axis 1::

                     columns 0, 1   columns 2, 3
    rows 0, 1, 2        rank 0         rank 1        5 rows in two chunks are 3 and 2
    rows 3, 4           rank 2         rank 3

>>> from fsdp_sft.dcp_io.sharding import Sharding
>>> sharding = Sharding(mesh_shape=(2, 2), ranks=None, splits=((0, 0), (1, 1)))
>>> sharding.part_of_rank((5, 4), copy=0, rank=3)
Box(offset=(3, 2), shape=(2, 2))

The order of the cuts need not be that of the axes: expert or tensor parallelism may have cut a tensor before
FSDP2, along a later axis of the mesh (torch's strided shard). With ``splits = ((1, 0), (0, 0))`` axis 1 cuts
the rows first, and axis 0 then cuts each of the resulting chunks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_sft._tensors.boxes import Box, check_ranks_ascend, chunk_of, cuts_of

_MOST_AXES = 8


@dataclass(frozen=True)
class Sharding:
    """How a tensor is laid out on a mesh, by ``torch.chunk`` along one dimension after the other.

    Attributes:
        mesh_shape: Number of ranks along each axis of the mesh.
        ranks: Ranks of the mesh in row-major order; None for 0, 1, 2, ...
        splits: (axis of the mesh, dimension of the tensor) of each cut, in the order of the cuts. Ranks along
            the other axes have copies.
    """

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...] | None
    splits: tuple[tuple[int, int], ...]

    @property
    def copies(self) -> int:
        """Number of ranks that have each part."""
        cut = {axis for axis, _ in self.splits}
        return math.prod(n for axis, n in enumerate(self.mesh_shape) if axis not in cut)

    def parts(self, shape: Sequence[int], copy: int, wanted: Box | None = None) -> Iterator[tuple[int, Box]]:
        """(rank, its part) for the parts of one copy that are not empty.

        Args:
            shape: Shape of the full tensor.
            copy: Number of the copy.
            wanted: Box of the tensor; parts that do not intersect it are left out. None yields all parts.
        """
        place = self._place_of_copy(copy)
        everything = Box((0,) * len(shape), tuple(shape))
        if everything.numel:
            yield from self._cut(0, place, everything, wanted or everything)

    def part_of_rank(self, shape: Sequence[int], copy: int, rank: int) -> Box | None:
        """The part of a copy that ``rank`` has written; None if it has written none.

        Args:
            shape: Shape of the full tensor.
            copy: Number of the copy that was written.
            rank: The rank.
        """
        place = self._coordinate(rank)
        if place is None:
            return None
        cut = {axis for axis, _ in self.splits}
        own = self._place_of_copy(copy)
        # Along the axes that do not cut, the coordinates say which copy a rank has.
        if any(place[axis] != own[axis] for axis in range(len(place)) if axis not in cut):
            return None
        box = Box((0,) * len(shape), tuple(shape))
        for axis, dim in self.splits:
            box = chunk_of(box, dim, self.mesh_shape[axis], place[axis])
        return box if box.numel else None

    def _cut(self, number: int, place: list[int], box: Box, wanted: Box) -> Iterator[tuple[int, Box]]:
        """Make the cuts from ``number`` on in a box; (rank, part) of the results that intersect ``wanted``.

        ``place`` is a coordinate in the mesh, in which the cuts before have set their axes. Only chunks that
        intersect ``wanted`` are followed, so a loading rank does not visit the parts of all ranks.
        """
        if box.intersect(wanted) is None:
            return
        if number == len(self.splits):
            yield self._rank_at(place), box
            return
        axis, dim = self.splits[number]
        parts = self.mesh_shape[axis]
        step = -(-box.shape[dim] // parts)  # extent of a chunk, rounded up, as torch.chunk takes it
        first = max(0, wanted.offset[dim] - box.offset[dim]) // step  # the chunk in which `wanted` begins
        end = wanted.offset[dim] + wanted.shape[dim] - box.offset[dim]  # where it ends, counted in the box
        for index in range(first, min(parts, -(-min(end, box.shape[dim]) // step))):
            inner = list(place)
            inner[axis] = index
            yield from self._cut(number + 1, inner, chunk_of(box, dim, parts, index), wanted)

    def _place_of_copy(self, copy: int) -> list[int]:
        """The coordinate of a copy: digits of its number along the axes that do not cut, zeros elsewhere."""
        cut = {axis for axis, _ in self.splits}
        place = [0] * len(self.mesh_shape)
        for axis in reversed(range(len(self.mesh_shape))):
            if axis not in cut:
                copy, place[axis] = divmod(copy, self.mesh_shape[axis])
        return place

    def _rank_at(self, place: Sequence[int]) -> int:
        """The rank at a coordinate of the mesh."""
        index = 0
        for size, at in zip(self.mesh_shape, place, strict=True):
            index = index * size + at
        return index if self.ranks is None else self.ranks[index]

    def _coordinate(self, rank: int) -> list[int] | None:
        """The coordinate of a rank in the mesh; None if it is not in the mesh."""
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
    """The shardings of live tensors. The ranks of each mesh are read only once."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._ranks: dict[DeviceMesh, tuple[int, ...] | None] = {}

    def of(self, tensor: torch.Tensor) -> Sharding:
        """The sharding of a tensor. One that is not a DTensor has a copy on every rank.

        Raises:
            TypeError: If a placement gives a rank several boxes, or is neither a shard nor a replica.
            ValueError: If the tensor does not lie on all ranks, or the mesh's ranks are not in order.
        """
        if not isinstance(tensor, DTensor):
            return Sharding((self._world_size,), None, ())
        mesh = tensor.device_mesh
        splits = cuts_of(tensor.placements, tuple(mesh.shape), tensor.ndim)
        check_ranks_ascend(mesh, tensor.placements)
        if mesh.size() != self._world_size:
            raise ValueError(
                f"a tensor lies on {mesh} and not on all {self._world_size} ranks (tensor parallelism leaves "
                "such tensors whole beside FSDP2), so which rank has which part is not known; load the model "
                "with tp_size=1"
            )
        if mesh not in self._ranks:
            ranks = tuple(mesh.mesh.flatten().tolist())
            self._ranks[mesh] = None if ranks == tuple(range(len(ranks))) else ranks
        return Sharding(tuple(mesh.shape), self._ranks[mesh], splits)


def one_rank(rank: int) -> Sharding:
    """The sharding of a tensor that a single rank has."""
    return Sharding((1,), (rank,), ())


def encode_sharding(sharding: Sharding) -> dict[str, Any]:
    """A sharding as JSON."""
    splits = [list(split) for split in sharding.splits]
    encoded: dict[str, Any] = {"mesh": list(sharding.mesh_shape), "splits": splits}
    if sharding.ranks is not None:
        encoded["ranks"] = list(sharding.ranks)
    return encoded


def parse_sharding(raw: Any, world_size: int) -> Sharding:
    """The inverse of ``encode_sharding``.

    Raises:
        ValueError: If it is not valid, or has keys that this release does not know.
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
