"""How much of a device's memory a training can have."""

import math
from dataclasses import dataclass

from fsdp_sft._gpus import GIB, MIB, Gpu

# torch sees less than nvidia-smi reports as the total, by 350 MiB (RTX 4090) to 900 MiB (A100 80 GB).
_DRIVER = 256 * MIB
_DRIVER_SHARE = 0.005
_CONTEXT = 512 * MIB  # kernels and stacks of one process; less with CUDA_MODULE_LOADING=LAZY, torch's default
_NCCL_NODE = 512 * MIB  # buffers of the channels to a node's other GPUs, outside of torch's allocator
_NCCL_NODES = 1024 * MIB
_FRAGMENTS = 0.02  # of the memory: what the allocator has reserved and cannot use
_OTHERS = 0.1  # of a host's memory


@dataclass(frozen=True)
class Budget:
    """A device's memory, and what of it no tensor can have.

    Attributes:
        memory_bytes: In all, as ``nvidia-smi`` reports it.
        taken: By whom, and how many bytes.
    """

    memory_bytes: int
    taken: tuple[tuple[str, int], ...]

    @property
    def usable_bytes(self) -> int:
        """For tensors: what an estimate's peak is compared with."""
        return max(0, self.memory_bytes - sum(size for _, size in self.taken))

    def needed_for(self, peak_bytes: int) -> int:
        """Memory of the smallest device on which such a peak fits."""
        fixed = sum(size for name, size in self.taken if name in _FIXED)
        shares = sum(size for name, size in self.taken if name not in _FIXED) / self.memory_bytes
        return math.ceil((peak_bytes + fixed) / (1 - shares))

    def __str__(self) -> str:
        taken = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.taken)
        return f"{self.usable_bytes / GIB:.1f} of {self.memory_bytes / GIB:.1f} GiB usable ({taken})"


_FIXED = ("CUDA context", "NCCL")


def budget_of(gpu: Gpu, num_gpus: int, memory_bytes: int | None = None) -> Budget:
    """What tensors can have of a device.

    Args:
        gpu: The device.
        num_gpus: Ranks: more than one have buffers of NCCL, more than one node's more of them.
        memory_bytes: As ``nvidia-smi`` reports it, if not the usual model's.
    """
    memory = gpu.memory_bytes if memory_bytes is None else int(memory_bytes)
    if gpu.name == "cpu":
        return Budget(memory, (("other processes", int(memory * _OTHERS)),))
    driver = int(min(_DRIVER, memory * _FRAGMENTS) + memory * _DRIVER_SHARE)
    taken = [("driver", driver), ("CUDA context", _CONTEXT)]
    if num_gpus > 1:
        taken.append(("NCCL", _NCCL_NODE if num_gpus <= gpu.gpus_per_node else _NCCL_NODES))
    taken.append(("fragments", int(memory * _FRAGMENTS)))
    return Budget(memory, tuple(taken))
