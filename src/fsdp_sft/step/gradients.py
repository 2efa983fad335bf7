"""The gradient collectives that a backward runs, and the norm of the reduced gradients."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_sft._compat.fsdp import allow_unused_groups, forget_failed_iteration
from fsdp_sft._model.sharded import reshard
from fsdp_sft._model.wrappers import replicated_by, unwrapped
from fsdp_sft._tensors.boxes import local_of

SyncMode = Literal["all", "reduce_scatter", "none"]
_PIECE = 1 << 16  # elements whose squares have a sum in float32 that is right to some 1e-7


@contextmanager
def gradient_sync(model: nn.Module, mode: SyncMode) -> Iterator[None]:
    """Context manager that chooses the gradient collectives of the backwards inside it.

    Args:
        model: Sharded model, or one inside DistributedDataParallel; nothing changes for any other model.
        mode: ``"all"`` reduce-scatters and, under HSDP, all-reduces. ``"reduce_scatter"`` leaves out the
            all-reduce between replicas. ``"none"`` runs no collective: each rank keeps unsharded gradients,
            to which later backwards add, until the first backward under ``"all"`` reduces them.
            DistributedDataParallel has one all-reduce only. It runs under ``"all"``, and for a static graph
            in every mode; the forward must be inside the context too.

    Raises:
        ValueError: If ``mode`` is none of these.

    Example:
        >>> targets = fs.count_targets(window)
        >>> for index, batch in enumerate(window):
        ...     with fs.gradient_sync(model, "all" if index == len(window) - 1 else "none"):
        ...         fs.causal_lm_loss(model, batch, num_targets=targets).backward()
    """
    if mode not in ("all", "reduce_scatter", "none"):
        raise ValueError(f"mode must be 'all', 'reduce_scatter' or 'none', got {mode!r}")
    replicated = replicated_by(model)
    if replicated is not None:
        # DistributedDataParallel(static_graph=True) fails an assertion in torch if the first backward runs
        # under no_sync.
        defers = mode != "all" and not replicated.static_graph
        with replicated.no_sync() if defers else nullcontext():
            yield
        return
    model = unwrapped(model)
    if not isinstance(model, FSDPModule):
        yield
        return
    by_hand = getattr(model, "set_manual_backward_finalization", None)  # torch 2.15
    if by_hand is not None:
        by_hand(False)  # the last backward of a window finalizes it
    model.set_requires_gradient_sync(mode != "none")
    if mode == "none":
        allow_unused_groups(model)
    model.set_requires_all_reduce(mode == "all")
    model.set_is_last_backward(mode == "all")
    try:
        yield
    except BaseException:
        forget_failed_iteration(model)  # what was held back would go into the next window
        raise
    finally:
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(True)
        model.set_is_last_backward(True)


def checked_norm(given: Any) -> float | None:
    """``max_grad_norm`` as a number that ranks can compare; None clips nothing.

    Raises:
        ValueError: If it is not above 0.
    """
    if given is None:
        return None
    if not float(given) > 0:
        raise ValueError(f"max_grad_norm must be above 0, or None to clip nothing, got {given!r}")
    return float(given)


def clip_gradients(model: nn.Module, max_grad_norm: float | None) -> torch.Tensor:
    """Clip the gradients in place; return their 2-norm over all ranks, a 0-dim tensor on their device.

    Under tensor and expert parallelism gradients lie on several meshes, and some on none. Each kind has its
    norm, and the norm of these norms is that of the whole gradient.
    """
    reshard(model)  # parameters that stay gathered after a backward, as FSDP2 can be told, have no gradients
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None:
            sharded = isinstance(gradient, DTensor)
            kind = (gradient.device_mesh, gradient.placements) if sharded else None  # type: ignore[attr-defined]
            kinds.setdefault(kind, []).append(parameter)
    norms = [_norm(parameters) for parameters in kinds.values()]
    norm = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)
    for parameters in kinds.values() if max_grad_norm is not None else ():
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)  # type: ignore[arg-type]
    return norm


def _norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Norm of gradients with the same mesh and placements."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    first = gradients[0]
    placements = first.placements if isinstance(first, DTensor) else ()
    cuts = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    if len(cuts) < 2 and first.device.type != "cpu":
        norm = torch.nn.utils.get_total_norm(gradients)
        # The norm of shards is a partial result until it is reduced.
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    # full_tensor() would compute the same, and warn that it reduces along one axis after the other.
    pieces = [piece for gradient in gradients for piece in _pieces(local_of(gradient))]
    norm = torch.nn.utils.get_total_norm(pieces)
    if not cuts:
        return norm
    squared = norm.square()
    for axis in cuts:
        dist.all_reduce(squared, group=first.device_mesh.get_group(axis))  # type: ignore[attr-defined]
    return squared.sqrt()


def _pieces(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A gradient in pieces on the CPU, where torch adds squares up one by one: 50 million are 0.4 % off."""
    return gradient.reshape(-1).split(_PIECE) if gradient.device.type == "cpu" else (gradient,)
