"""Modules, tensors and hooks of torch, and its gradient scalers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# The documented base class of modes that see every operation; only the name of its module is private.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer below ``module`` by ``function`` of it.

    ``nn.Module._apply`` is what ``.to()`` calls, and no public method takes a function. FSDP2 overrides it to
    take over the new shards, which makes it the supported way to change the dtype of shards.
    """
    module._apply(function)


def wrapper_tensor(cls: type[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """An instance of a tensor subclass, without storage.

    ``_make_wrapper_subclass`` is how torch's documentation of ``__torch_dispatch__`` makes one.
    """
    return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))


def has_hooks(owner: torch.Tensor | nn.Module) -> bool:
    """Whether hooks on gradients were registered, which only the fields of a parameter or a module show."""
    return bool(owner._backward_hooks or getattr(owner, "_backward_pre_hooks", None))


def has_grad_hooks(parameter: torch.Tensor) -> bool:
    """The same for ``register_post_accumulate_grad_hook``, by ``_post_accumulate_grad_hooks``."""
    return bool(parameter._post_accumulate_grad_hooks)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The object that a DTensor wraps, in its ``_local_tensor``; ``tensor`` itself if it is no DTensor.

    The public ``to_local`` returns a view. Tensor subclasses of other libraries may not implement views, or
    lose what they hold in one.
    """
    from torch.distributed.tensor import DTensor

    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or what a DTensor wraps, keeps its values in other tensors and has no memory itself.

    Such tensors are made by ``_make_wrapper_subclass``, which leaves no public mark. Most follow the public
    protocol of ``__tensor_flatten__``, but the test for it, ``is_traceable_wrapper_subclass``, is private.
    """
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    local: Any = local_tensor(tensor)
    if type(local) in (torch.Tensor, nn.Parameter, nn.Buffer) or local.is_meta:
        return False
    if is_traceable_wrapper_subclass(local):
        return True
    try:
        return bool(local.numel() > 0 and local.untyped_storage().data_ptr() == 0)
    except RuntimeError:  # "invalid python storage"
        return True


def found_infs(scaler: torch.amp.GradScaler, optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """The flags that ``unscale_`` set for each optimizer and device: not 0 if a gradient has an inf or nan.

    ``GradScaler`` decides for each optimizer separately, from ``_per_optimizer_states``, which no public
    function shows.
    """
    records: Any = scaler._per_optimizer_states
    found = [records[id(optimizer)]["found_inf_per_device"] for optimizer in optimizers]
    return [flag for by_device in found for flag in by_device.values()]


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Let a scaler unscale after a failed step: only ``update`` clears its ``_per_optimizer_states``."""
    scaler._per_optimizer_states.clear()


def known_scale(scaler: torch.amp.GradScaler) -> float | None:
    """The scale in ``_scale``; None if it is on a device, for which ``get_scale`` would wait."""
    scale: Any = scaler._scale
    if scale is None:
        return float(scaler._init_scale)
    return float(scale) if scale.device.type == "cpu" else None


def keep_scale_on_host(scaler: torch.amp.GradScaler) -> None:
    """Keep the scale of a ``GradScaler`` on the host, where the gradients of offloaded parameters are.

    ``unscale_`` copies the scale to a gradient's device without waiting. From an accelerator to the host that
    is a copy into pinned memory, which the CPU reads before the scale has arrived: the gradients become NaN,
    or are divided by what was there before. The scale is made on the device of the first scaled tensor, and
    no public function moves it (``_scale``, ``_growth_tracker``).
    """
    scale, tracker = scaler._scale, scaler._growth_tracker
    if scale is None:
        scaler.scale(torch.zeros(()))  # makes the scale, on the CPU
    elif scale.device.type != "cpu":
        scaler._scale, scaler._growth_tracker = scale.cpu(), None if tracker is None else tracker.cpu()
