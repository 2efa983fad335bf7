"""Random operators of the simulated device in graphs that torch has compiled."""

from typing import Any

import torch


def register() -> None:
    """Let graphs that recompute draw the same numbers again on the simulated device.

    Such a graph saves and restores random states by operators that know four devices by name. The simulated
    device takes the place of one of them ("hpu"), within these two operators alone.
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

    def device_of(args: Any, kwargs: Any) -> Any:
        own = named(args, kwargs)
        return "hpu" if own == "sim" else own

    rng_prims.get_device = device_of
    for operator, own in ((rng_prims.run_and_save_rng_state, save), (rng_prims.run_with_rng_state, restore)):
        operator.py_impl(torch._C.DispatchKey.PrivateUse1)(own)
        select = operator.py_kernels[torch._C.DispatchKey.BackendSelect]
        cells = dict(zip(select.__code__.co_freevars, select.__closure__, strict=True))
        cells["impl_hpu"].cell_contents = own
