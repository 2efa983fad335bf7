"""Experts that ranks share out: each has some of them whole, and tokens travel to where theirs are."""

import math
import weakref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_sft._compat import reduction_dtype
from fsdp_sft._meshes import EP
from fsdp_sft._wrappers import unwrapped
from fsdp_sft.distributed import mesh_of, reshard
from fsdp_sft.errors import UnsupportedModelError

# What FSDP2 reduces without fear of overflow, and divides once.
_DIVIDED_ONCE = (torch.float32, torch.bfloat16)

_looked_at: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def refuse_divided_twice(model: nn.Module) -> None:
    """See that FSDP2 divides the gradients of experts once; each model is looked at once.

    Experts have more ranks' tokens than the ranks that FSDP2 reduces over, so it is told what to divide by.
    On a group of one rank it does so while it copies, and again around a reduction in float16 or float64,
    which it fears to overflow (torch 2.13, ``foreach_reduce``).

    Raises:
        UnsupportedModelError: If it does not.
    """
    inner = unwrapped(model)
    if inner in _looked_at:
        return
    reshard(model)  # gathered experts do not show what cuts them
    for name, module in inner.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for parameter in module.parameters(recurse=False):
            if not parameter.requires_grad or not _is_whole_on_its_rank(parameter):
                continue
            dtype = reduction_dtype(module, parameter.dtype)
            mesh = mesh_of(model)
            if dtype not in _DIVIDED_ONCE and mesh is not None and mesh.size() > 1:
                raise UnsupportedModelError(
                    f"gradients of {name} would be divided by the ranks twice: its experts lie whole on a "
                    f"rank and are reduced in {dtype}, for which torch divides them both as one rank's and "
                    "as those of several. Take reduce_dtype=torch.float32 (or bfloat16), or an ep_size below "
                    "the number of ranks"
                )
    _looked_at.add(inner)


def _is_whole_on_its_rank(parameter: nn.Parameter) -> bool:
    """Whether no axis but that of the experts cuts a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    axes = zip(names, parameter.device_mesh.shape, parameter.placements, strict=False)
    others = math.prod(size for name, size, p in axes if name != EP and not p.is_replicate())
    return EP in names and others == 1
