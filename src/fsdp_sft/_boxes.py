"""Boxes: which part of a tensor a rank holds or a file stores, and who owns it. No I/O."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_sft._agree import is_distributed, this_rank, world_size
from fsdp_sft._compat import split_factor_of

_MAX_CUTS = 16


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor.

    Attributes:
        offset: Index of its first element, per dimension.
        shape: Its extent, per dimension.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """The part that both have, or None if it is empty."""
        low = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        high = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))

    def relative_to(self, outer: "Box") -> "Box":
        """The same part, counted from the start of ``outer``."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of this part in a tensor."""
        return tuple(slice(first, first + n) for first, n in zip(self.offset, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def cuts_of(placements: Sequence[Any], mesh_shape: Sequence[int], ndim: int) -> tuple[tuple[int, int], ...]:
    """(axis of the mesh, dimension of the tensor) for each cut by ``torch.chunk``, in the order of the cuts.

    That is the order of the axes, but for a strided shard: FSDP2 leaves one where expert or tensor
    parallelism has cut the same dimension before, along an axis that comes later. Cut in this order, what
    each rank has is one box.

    Args:
        placements: Of a DTensor.
        mesh_shape: Ranks along each axis of its mesh.
        ndim: Dimensions of the tensor.

    Raises:
        TypeError: For a placement that leaves a rank with several boxes, or with no part at all.
    """
    cuts: list[tuple[int, int]] = []
    # From the last axis on, so that what a strided shard comes after is there already.
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
    shape: Sequence[int], placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> Box:
    """What the rank at ``coordinate`` has: ``torch.chunk`` along each sharded dimension.

    Raises:
        TypeError: For placements that leave a rank with several boxes.
    """
    box = whole(shape)
    for axis, dim in cuts_of(placements, mesh_shape, len(shape)):
        box = chunk_of(box, dim, mesh_shape[axis], coordinate[axis])
    return box


def chunk_of(box: Box, dim: int, parts: int, index: int) -> Box:
    """The ``index``-th of ``torch.chunk`` of a box into ``parts``; empty where that makes fewer."""
    extent = box.shape[dim]
    step = -(-extent // parts)
    start = min(step * index, extent)
    offset, shape = list(box.offset), list(box.shape)
    offset[dim] += start
    shape[dim] = min(step, extent - start)
    return Box(tuple(offset), tuple(shape))


def box_of(tensor: torch.Tensor, rank: int | None = None) -> Box:
    """What ``rank`` (None: this one) holds of ``tensor``; all of it unless it is a DTensor.

    Raises:
        TypeError: For placements that leave a rank with several boxes.
    """
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    mesh = tensor.device_mesh
    refuse_disordered(mesh, tensor.placements)
    return box_at(tensor.shape, tensor.placements, mesh.shape, _coordinate(tensor, rank))


def refuse_disordered(mesh: DeviceMesh, placements: Sequence[Any]) -> None:
    """See that the ranks along each axis that cuts are in ascending order.

    FSDP2 cuts by the rank within the process group, which is in ascending order, and not by the coordinate in
    the mesh; where the two differ, DTensor and FSDP2 disagree on which part a rank has.

    Raises:
        ValueError: If they are not.
    """
    ranks = mesh.mesh
    if type(ranks) is not torch.Tensor:  # under FakeTensorMode it has no values
        return
    for axis, placement in enumerate(placements):
        cuts = type(placement) is not Replicate
        if cuts and mesh.size(axis) > 1 and bool((ranks.diff(dim=axis) <= 0).any()):
            raise ValueError(
                f"the ranks of the mesh {ranks.tolist()} do not ascend along axis {axis}, and FSDP2 cuts "
                "tensors in ascending order: take build_mesh(...), or ranks in order"
            )


def owner_ranks(tensor: torch.Tensor, replica: int = 0) -> list[int]:
    """Ranks that together have one copy of ``tensor``: the ``replica``-th, counted round robin."""
    if not isinstance(tensor, DTensor):
        return [replica % world_size()]
    mesh = tensor.device_mesh
    if mesh.size() != world_size() and is_distributed():
        raise ValueError(
            f"a tensor lies on {mesh} and not on all {world_size()} ranks, as where tensor parallelism "
            "leaves it whole beside FSDP2, and who has which part is not known; load the model with tp_size=1"
        )
    copies = [n for p, n in zip(tensor.placements, mesh.shape, strict=True) if isinstance(p, Replicate)]
    wanted = replica % math.prod(copies)
    index: list[Any] = []
    for placement, size in zip(reversed(tensor.placements), reversed(mesh.shape), strict=True):
        if isinstance(placement, Replicate):
            index.insert(0, wanted % size)
            wanted //= size
        else:
            index.insert(0, slice(None))
    return [int(rank) for rank in mesh.mesh[tuple(index)].reshape(-1)]


def replicate_dims(tensor: torch.Tensor) -> tuple[DeviceMesh, list[int]] | None:
    """(mesh, the dimensions of it over which a tensor is replicated); None if no two ranks hold the same."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    dims = [d for d, p in enumerate(tensor.placements) if isinstance(p, Replicate) and mesh.size(d) > 1]
    return (mesh, dims) if dims else None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory with ``tensor``."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A tensor cut as ``tensor`` is, of which this rank's part is ``local``. No communication.

    ``from_local`` moves what is elsewhere to the mesh's device: parts that stay on the host are copied there.
    """
    if local.device.type not in (tensor.device_mesh.device_type, "meta"):
        made: Any = torch.empty_like(tensor, dtype=local.dtype, device=local.device)
        made.to_local().copy_(local)
        return made  # type: ignore[no-any-return]
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of ``tensor`` that ``box`` names."""
    for dim, (offset, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def tiling_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why ``boxes`` do not cover a tensor exactly once, or None if they do."""
    for box in boxes:
        if len(box.shape) != len(shape) or any(
            a < 0 or n < 0 or a + n > size for a, n, size in zip(box.offset, box.shape, shape, strict=True)
        ):
            return f"a part {box.shape} at {box.offset} lies outside the shape {tuple(shape)}"
    covered = sum(box.numel for box in boxes)
    if covered != math.prod(shape):
        return f"its parts have {covered} of {math.prod(shape)} elements"
    if not _disjoint([box for box in boxes if box.numel]):
        return "its parts overlap"
    return None


def _disjoint(boxes: Sequence[Box], depth: int = 0) -> bool:
    """Whether recursive axis-aligned cuts separate every box.

    Every sharding by dimensions can be cut like that. Not every tiling can; one that cannot, or takes more
    than a few rounds, counts as overlapping, which bounds the time that a hostile manifest can take.
    """
    if len(boxes) < 2:
        return True
    for dim in range(len(boxes[0].shape) if depth < _MAX_CUTS else 0):
        pieces: list[list[Box]] = []
        end = -1
        for box in sorted(boxes, key=lambda box: box.offset[dim]):
            if box.offset[dim] >= end:
                pieces.append([])
            pieces[-1].append(box)
            end = max(end, box.offset[dim] + box.shape[dim])
        if len(pieces) > 1:
            return all(_disjoint(piece, depth + 1) for piece in pieces)
    return False


def _coordinate(tensor: DTensor, rank: int | None) -> list[int]:
    mesh = tensor.device_mesh
    if rank is None:
        found: Any = mesh.get_coordinate()
    else:
        found = next(iter((mesh.mesh == rank).nonzero().tolist()), None)
    if found is None:
        rank = this_rank() if rank is None else rank
        raise ValueError(f"rank {rank} is not in the mesh of the model's parameters; all ranks must be")
    return [int(index) for index in found]
