"""Which gradient collectives a backward runs, and the norm of what they leave."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_sft._wrappers import replicated_by, unwrapped

SyncMode = Literal["all", "reduce_scatter", "none"]


@contextmanager
def gradient_sync(model: nn.Module, mode: SyncMode) -> Iterator[None]:
    """Choose which gradient collectives the backwards inside run.

    Args:
        model: A sharded model, or one inside DistributedDataParallel; for an ordinary one there is nothing to
            choose.
        mode: ``"all"`` reduce-scatters and, under HSDP, all-reduces. ``"reduce_scatter"`` leaves out the
            all-reduce between replicas. ``"none"`` keeps unsharded gradients on each rank; they are added
            to by later backwards and reduced by the first one under ``"all"``. DistributedDataParallel has
            an all-reduce only, which runs under ``"all"``, and always for a static graph; the forward has
            to be inside too.

    Raises:
        ValueError: For another mode.
    """
    if mode not in ("all", "reduce_scatter", "none"):
        raise ValueError(f"mode must be 'all', 'reduce_scatter' or 'none', got {mode!r}")
    replicated = replicated_by(model)
    if replicated is not None:
        # A static graph that begins with a backward without its all-reduce ends in an assertion of torch's.
        defers = mode != "all" and not replicated.static_graph
        with replicated.no_sync() if defers else nullcontext():
            yield
        return
    model = unwrapped(model)
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_requires_gradient_sync(mode != "none")
    model.set_requires_all_reduce(mode == "all")
    model.set_is_last_backward(mode == "all")
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
        model.set_is_last_backward(True)


def clip_gradients(model: nn.Module, max_grad_norm: float | None) -> float:
    """Clip the gradients in place and return their 2-norm over all ranks."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # the norm of shards is a partial result until it is reduced
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    return float(norm)
