"""Boxes: which part of a tensor a rank holds or a file stores. No I/O.

A box is a rectangular part of a tensor, given by the index of its first element and its extent. The
intersection of two boxes is a box or empty, so what a rank reads from a file is its own box intersected with
the file's.

>>> from fsdp_sft._tensors.boxes import Box
>>> rank_1 = Box(offset=(2, 0), shape=(2, 4))  # rows 2 and 3 of a (4, 4) matrix
>>> file = Box(offset=(1, 0), shape=(2, 4))  # rows 1 and 2
>>> common = rank_1.intersect(file)
>>> common
Box(offset=(2, 0), shape=(1, 4))
>>> common.relative_to(rank_1), common.relative_to(file)  # row 0 of the shard is row 1 of the file
(Box(offset=(0, 0), shape=(1, 4)), Box(offset=(1, 0), shape=(1, 4)))
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_sft._compat.fsdp import split_factor_of
from fsdp_sft._ranks.agree import this_rank


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor.

    Attributes:
        offset: Index of the box's first element in the tensor, per dimension.
        shape: Extent of the box, per dimension.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """Intersection with another box of the same tensor; None if it is empty."""
        # Along each dimension, two intervals: from the larger of the starts to the smaller of the ends.
        low = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        high = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))

    def relative_to(self, outer: "Box") -> "Box":
        """The same box in coordinates that start at the first element of ``outer``."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that selects the box from its tensor."""
        return tuple(slice(first, first + n) for first, n in zip(self.offset, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """Box that covers a whole tensor of that shape."""
    return Box((0,) * len(shape), tuple(shape))


def cuts_of(placements: Sequence[Any], mesh_shape: Sequence[int], ndim: int) -> tuple[tuple[int, int], ...]:
    """The ``torch.chunk`` cuts that shard a tensor, in the order that gives each rank a single box.

    This is the order of the mesh's axes, except for strided shards. FSDP2 makes one where expert or tensor
    parallelism, along a later axis, has cut the same dimension already: its cut comes after that one.

    Args:
        placements: Placements of a DTensor.
        mesh_shape: Ranks along each axis of its mesh.
        ndim: Number of dimensions of the tensor.

    Returns:
        (axis of the mesh, dimension of the tensor) for each cut.

    Raises:
        TypeError: If a placement gives a rank several boxes, or is neither a shard nor a replica.
    """
    cuts: list[tuple[int, int]] = []
    # From the last axis to the first, so that a strided shard finds the cuts that come before its own. Its
    # split factor is the number of parts into which they have cut the dimension.
    for axis, placement in reversed(list(enumerate(placements))):
        if type(placement) is Replicate:
            continue
        factor = 1 if type(placement) is Shard else split_factor_of(placement)
        dim = placement.dim % max(ndim, 1) if factor is not None else -1
        before = [cut for cut in cuts if cut[1] == dim]
        if factor == 1 and (type(placement) is Shard or not before):
            cuts.insert(0, (axis, dim))
        elif factor is not None and factor == math.prod(mesh_shape[other] for other, _ in before):
            cuts.append((axis, dim))
        else:
            raise TypeError(
                f"a tensor placed as {tuple(placements)} on a mesh of {tuple(mesh_shape)} cannot be read or "
                "stored by boxes: each rank must have one, and of fused weights that tensor parallelism cuts "
                "it has several; load the model with tp_size=1"
            )
    return tuple(cuts)


def box_at(
    shape: Sequence[int],
    cuts: Sequence[tuple[int, int]],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Box:
    """The box of the rank at ``coordinate`` of the mesh, by ``torch.chunk`` along each sharded dimension.

    Args:
        shape: Global shape of the tensor.
        cuts: What ``cuts_of`` returned.
        mesh_shape: Ranks along each axis of its mesh.
        coordinate: Index of the rank along each axis.
    """
    box = whole(shape)
    for axis, dim in cuts:
        box = chunk_of(box, dim, mesh_shape[axis], coordinate[axis])
    return box


def chunk_of(box: Box, dim: int, parts: int, index: int) -> Box:
    """Chunk number ``index`` of a box that is cut into ``parts`` along ``dim``, as ``torch.chunk`` cuts.

    All chunks have the extent rounded up but for the last ones, which may be shorter or empty: 10 rows in 4
    parts are 3, 3, 3 and 1, and 5 rows in 4 parts are 2, 2, 1 and 0.
    """
    extent = box.shape[dim]
    step = -(-extent // parts)
    start = min(step * index, extent)
    offset, shape = list(box.offset), list(box.shape)
    offset[dim] += start
    shape[dim] = min(step, extent - start)
    return Box(tuple(offset), tuple(shape))


def box_of(tensor: torch.Tensor) -> Box:
    """Box of ``tensor`` that this rank holds; the whole tensor unless it is a DTensor.

    Raises:
        TypeError: If a placement gives a rank several boxes, or is neither a shard nor a replica.
        ValueError: If this rank is not in the tensor's mesh, or the mesh's ranks are not in order.
    """
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    mesh = tensor.device_mesh
    check_ranks_ascend(mesh, tensor.placements)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(
            f"rank {this_rank()} is not in the mesh of the model's parameters; all ranks must be"
        )
    return box_at(tensor.shape, cuts_of(tensor.placements, mesh.shape, tensor.ndim), mesh.shape, coordinate)


def check_ranks_ascend(mesh: DeviceMesh, placements: Sequence[Any]) -> None:
    """Check that ranks ascend along each mesh axis that shards a tensor.

    FSDP2 assigns shards by a rank's number in the process group, whose ranks ascend, and DTensor by the
    rank's coordinate in the mesh. Where the two differ, they disagree on which shard a rank has.

    Raises:
        ValueError: If they do not ascend.
    """
    ranks = mesh.mesh
    if type(ranks) is not torch.Tensor:  # under FakeTensorMode the mesh has no values
        return
    for axis, placement in enumerate(placements):
        cuts = type(placement) is not Replicate
        if cuts and mesh.size(axis) > 1 and bool((ranks.diff(dim=axis) <= 0).any()):
            raise ValueError(
                f"the ranks of the mesh {ranks.tolist()} do not ascend along axis {axis}, and FSDP2 cuts "
                "tensors in ascending order: take build_mesh(...), or ranks in order"
            )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor``, which shares its memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


# A subclass of tensor may hold its values in another form, as frozen weights that are kept packed do. What
# they are made of is in a plain tensor, ``rows``; ``dense(dtype)`` computes them; ``format`` names the form.


def values_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The values of this rank's part of ``tensor``; what has to be computed is of ``dtype``, or its own."""
    local: Any = local_of(tensor)
    return local.dense(dtype or tensor.dtype) if hasattr(local, "dense") else local  # type: ignore[no-any-return]


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that holds this rank's part of ``tensor``: its values, or what they are made of."""
    local = local_of(tensor)
    return getattr(local, "rows", local)


def memory_key(tensor: torch.Tensor) -> int | None:
    """The same number for tensors in the same memory; an empty shard has none, so its ``id`` is used.

    None without memory: on the meta device, and of a subclass that keeps its values in other tensors.
    """
    local = memory_of(tensor)
    try:
        return (local.untyped_storage().data_ptr() or None) if local.numel() else id(tensor)
    except RuntimeError:  # "invalid python storage" of such a subclass
        return None
