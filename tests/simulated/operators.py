"""Operators that the simulated device lacks, made of the CPU's."""

from typing import Any

import torch


def register() -> None:
    """Give this process's simulated device all of them; once."""
    _integer_histc()
    _convolutions()
    _dropout()
    _random_operators_in_graphs()


_library = torch.library.Library("aten", "IMPL")


def _integer_histc() -> None:
    """The CPU has none; transformers counts tokens of an expert with it on every other device."""

    def histc(values: torch.Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> torch.Tensor:  # noqa: A002
        counted = torch.histc(values.cpu().double(), bins, min, max)
        return counted.to(values.dtype).to(values.device)

    _library.impl("histc", histc, "PrivateUse1")


def _convolutions() -> None:
    """Torch gives those of a device from outside it to operators of this name."""

    def convolution(values: Any, weight: Any, bias: Any, *rest: Any) -> torch.Tensor:
        own = None if bias is None else bias.cpu()
        return torch.ops.aten.convolution(values.cpu(), weight.cpu(), own, *rest).to(values.device)

    def backward(gradient: Any, values: Any, weight: Any, *rest: Any) -> tuple[torch.Tensor | None, ...]:
        *rest, mask = rest
        sizes = [weight.shape[1] * rest[-1] if rest[3] else weight.shape[0]]
        found = torch.ops.aten.convolution_backward(
            gradient.cpu(), values.cpu(), weight.cpu(), sizes if mask[2] else None, *rest, mask
        )
        return tuple(None if one is None else one.to(values.device) for one in found)

    _library.impl("convolution_overrideable", convolution, "PrivateUse1")
    _library.impl("convolution_backward_overrideable", backward, "PrivateUse1")


def _dropout() -> None:
    """What graphs call for dropout takes no generator, so the CPU's kernel would draw from the CPU's."""

    def native_dropout(values: Any, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
        if train is False:
            return values, torch.ones_like(values, dtype=torch.bool)
        mask = torch.empty_like(values, dtype=torch.bool).bernoulli_(1 - p)
        return values.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask

    _library.impl("native_dropout", native_dropout, "PrivateUse1")
    # Without this, torch's checkpoint takes the device for unused and does not keep its random state.
    torch.get_device_module("sim")._initialized = True


def _random_operators_in_graphs() -> None:
    """A graph that recomputes saves and restores random states by operators that know four devices by name.

    The simulated device takes the place of one of them ("hpu"), within these two operators alone.
    """
    from torch._prims import rng_prims

    def save(op: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.get_device_module("sim").get_rng_state(), op(*args, **kwargs)

    def restore(state: torch.Tensor, op: Any, *args: Any, **kwargs: Any) -> Any:
        module = torch.get_device_module("sim")
        before = module.get_rng_state()
        module.set_rng_state(state.cpu())
        out = op(*args, **kwargs)
        module.set_rng_state(before)
        return out

    named = rng_prims.get_device
    rng_prims.get_device = lambda args, kwargs: {"sim": "hpu"}.get(own := named(args, kwargs), own)
    for operator, own in ((rng_prims.run_and_save_rng_state, save), (rng_prims.run_with_rng_state, restore)):
        operator.py_impl(torch._C.DispatchKey.PrivateUse1)(own)
        select = operator.py_kernels[torch._C.DispatchKey.BackendSelect]
        cells = dict(zip(select.__code__.co_freevars, select.__closure__, strict=True))
        cells["impl_hpu"].cell_contents = own
