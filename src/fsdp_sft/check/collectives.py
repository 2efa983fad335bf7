"""The collectives that FSDP2 itself calls, by the names that this version of torch has for them."""

from typing import Any

import torch
import torch.distributed as dist


def gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
    """All-gather into one tensor."""
    # torch 2.13 has renamed both, and warns of the former names.
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(whole, part, group=group, **options)


def reduce_scatter(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
    """Reduce-scatter out of one tensor."""
    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(part, whole, group=group, **options)
