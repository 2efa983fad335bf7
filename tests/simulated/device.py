"""One process's simulated device."""

import os
import sys
from dataclasses import dataclass

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

        from tests.simulated import operators

        operators.register()
        torch.accelerator.set_device_index(self.index)

    def check(self) -> None:
        """Raise if this process has used any device but its own: on CUDA each would have a context there."""
        touched = torch.get_device_module("sim").touched()
        others = [index for index in touched if index != self.index]
        assert not others, f"the rank of device {self.index} has used device {others} too"
