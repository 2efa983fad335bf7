"""One process's simulated device."""

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch

from tests.simulated import build

BACKEND = "cpu:gloo,sim:simccl"


@dataclass(frozen=True)
class Simulated:
    """A simulated device; a process has one for as long as it lives.

    Attributes:
        index: Which of the devices that the process sees is its own.
        devices: How many it sees.
        copy_delay: Seconds that each copy across the bus takes at least: makes races show.
        comm_delay: Seconds that each collective takes at least.
        protected: Whether the host faults (SIGSEGV) when it touches device memory.
    """

    index: int
    devices: int = 2
    copy_delay: float = 0.0
    comm_delay: float = 0.0
    protected: bool = False

    def become(self) -> None:
        """Give this process its device; before anything else in it asks for an accelerator.

        Raises:
            NoCompilerError: If the simulator is not compiled yet and cannot be.
        """
        os.environ.update(
            SIM_DEVICES=str(self.devices),
            SIM_COPY_DELAY_US=str(round(self.copy_delay * 1e6)),
            SIM_COMM_DELAY_US=str(round(self.comm_delay * 1e6)),
            SIM_PROTECT=str(int(self.protected)),
        )
        sys.path.insert(0, str(build.folder()))
        import simdev  # noqa: F401

        _register_operators()
        torch.accelerator.set_device_index(self.index)

    def check(self) -> None:
        """Raise if this process has used any device but its own: on CUDA each would have a context there."""
        touched = torch.get_device_module("sim").touched()
        others = [index for index in touched if index != self.index]
        assert not others, f"the rank of device {self.index} has used device {others} too"


def _register_operators() -> None:
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
