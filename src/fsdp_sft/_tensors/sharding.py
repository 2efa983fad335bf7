"""Which rank has which part of a tensor, derived from the tensor's shape, the mesh and the cuts. No I/O.

The parts follow by repeating ``torch.chunk``. A (5, 4) matrix on a (2, 2) mesh, cut
along its rows over axis 0 of the mesh and then along its columns over axis 1::

                     columns 0, 1   columns 2, 3
    rows 0, 1, 2        rank 0         rank 1        5 rows in two chunks are 3 and 2
    rows 3, 4           rank 2         rank 3

>>> from fsdp_sft._tensors.sharding import Sharding
>>> sharding = Sharding(mesh_shape=(2, 2), ranks=None, splits=((0, 0), (1, 1)))
>>> sharding.part_of_rank((5, 4), copy=0, rank=3)
Box(offset=(3, 2), shape=(2, 2))

The order of the cuts need not be that of the axes: expert or tensor parallelism may have cut a tensor before
FSDP2, along a later axis of the mesh (torch's strided shard). With ``splits = ((1, 0), (0, 0))`` axis 1 cuts
the rows first, and axis 0 then cuts each of the resulting chunks.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fsdp_sft._ranks.agree import this_rank, world_size
from fsdp_sft._tensors.boxes import Box, box_at, check_ranks_ascend, chunk_of, cuts_of, whole
from fsdp_sft._tensors.stored import contiguous_strides


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
        return math.prod(self.mesh_shape[axis] for axis in self._uncut)

    @property
    def _uncut(self) -> list[int]:
        """The axes along which ranks have copies."""
        return [axis for axis in range(len(self.mesh_shape)) if axis not in dict(self.splits)]

    @property
    def _order(self) -> Sequence[int]:
        """The ranks of the mesh in row-major order."""
        return range(math.prod(self.mesh_shape)) if self.ranks is None else self.ranks

    def parts(
        self, shape: Sequence[int], copy: int = 0, wanted: Box | None = None
    ) -> Iterator[tuple[int, Box]]:
        """(rank, its part) for the parts of one copy that are not empty.

        Args:
            shape: Shape of the full tensor.
            copy: Number of the copy; numbers beyond the last one start again at the first.
            wanted: Box of the tensor; parts that do not intersect it are left out. None yields all parts.
        """
        everything = whole(shape)
        if everything.numel:
            yield from self._cut(0, self._place_of_copy(copy), everything, wanted or everything)

    def part_of_rank(self, shape: Sequence[int], copy: int, rank: int) -> Box | None:
        """The part of a copy that ``rank`` has; None if it is empty, or the rank has another copy.

        Args:
            shape: Shape of the full tensor.
            copy: Number of the copy, as in ``parts``.
            rank: The rank.
        """
        if rank not in self._order:
            return None
        index, own = self._order.index(rank), self._place_of_copy(copy)
        strides = contiguous_strides(self.mesh_shape)
        place = [index // step % size for size, step in zip(self.mesh_shape, strides, strict=True)]
        # Along the axes that do not cut, the coordinates say which copy a rank has.
        if any(place[axis] != own[axis] for axis in self._uncut):
            return None
        box = box_at(shape, self.splits, self.mesh_shape, place)
        return box if box.numel else None

    def _cut(self, number: int, place: list[int], box: Box, wanted: Box) -> Iterator[tuple[int, Box]]:
        """Make the cuts from ``number`` on in a box; (rank, part) of the results that intersect ``wanted``.

        ``place`` is a coordinate in the mesh, in which the cuts before have set their axes. Only chunks that
        intersect ``wanted`` are followed, so a loading rank does not visit the parts of all ranks.
        """
        if box.intersect(wanted) is None:
            return
        if number == len(self.splits):
            strides = contiguous_strides(self.mesh_shape)
            yield self._order[sum(at * step for at, step in zip(place, strides, strict=True))], box
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
        place = [0] * len(self.mesh_shape)
        for axis in reversed(self._uncut):
            copy, place[axis] = divmod(copy, self.mesh_shape[axis])
        return place


def sharding_of(tensor: torch.Tensor) -> Sharding:
    """The sharding of a tensor. One that is not a DTensor has a copy on every rank.

    Raises:
        TypeError: If a placement gives a rank several boxes, or is neither a shard nor a replica.
        ValueError: If the tensor does not lie on all ranks, or the mesh's ranks are not in order.
    """
    if not isinstance(tensor, DTensor):
        return Sharding((world_size(),), None, ())
    mesh = tensor.device_mesh
    if mesh.size() != world_size():
        raise ValueError(
            f"a tensor lies on {mesh} and not on all {world_size()} ranks (tensor parallelism leaves such "
            "tensors whole beside FSDP2), so which rank has which part is not known; load the model with "
            "tp_size=1"
        )
    return _sharding_on(mesh, tuple(tensor.placements), tensor.ndim)


@functools.lru_cache(maxsize=64)  # a model has thousands of tensors on a mesh, whose ranks torch lists anew
def _sharding_on(mesh: DeviceMesh, placements: tuple[Placement, ...], ndim: int) -> Sharding:
    """The sharding of any tensor with these placements."""
    splits = cuts_of(placements, tuple(mesh.shape), ndim)
    check_ranks_ascend(mesh, placements)
    ranks = mesh.mesh.flatten()
    in_order = torch.equal(ranks, torch.arange(len(ranks), dtype=ranks.dtype, device=ranks.device))
    return Sharding(tuple(mesh.shape), None if in_order else tuple(ranks.tolist()), splits)


def own_part(tensor: torch.Tensor, copy: int = 0) -> Box | None:
    """This rank's part of a tensor; None if it is empty, or belongs to another copy than number ``copy``."""
    return sharding_of(tensor).part_of_rank(tensor.shape, copy, this_rank())
