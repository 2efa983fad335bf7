"""Which box of each global tensor a rank holds, read from the DTensor itself."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp_sft._compat import local_box
from fsdp_sft.weights.provenance import Ints


@dataclass(frozen=True)
class Box:
    """A box of a global tensor: first index and extent by dimension."""

    start: Ints
    size: Ints


def box_of(tensor: torch.Tensor, coordinate: list[int] | None = None) -> Box:
    """The box that a rank holds: the whole tensor if it is not a DTensor.

    Args:
        tensor: Parameter or buffer.
        coordinate: In the tensor's mesh; None is this rank's.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box((0,) * len(shape), shape)
    mesh = tensor.device_mesh
    if coordinate is None:
        coordinate = list(mesh.get_coordinate() or ())
    start, size = local_box(shape, tuple(mesh.shape), coordinate, tensor.placements)
    return Box(start, size)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a rank holds of a parameter or buffer; writing to it writes to the parameter."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def replicate_dims(tensor: torch.Tensor) -> tuple[DeviceMesh, list[int]] | None:
    """(mesh, the dimensions of it over which a tensor is replicated); None if on no rank twice."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    dims = [
        dim
        for dim, placement in enumerate(tensor.placements)
        if isinstance(placement, Replicate) and mesh.size(dim) > 1
    ]
    return (mesh, dims) if dims else None
