"""How much of a device's memory is left for tensors."""

import math
from dataclasses import dataclass

from fsdp_sft._process.gpus import GIB, MIB, Gpu

# torch sees less than nvidia-smi reports as the total, by 350 MiB (RTX 4090) to 900 MiB (A100 80 GB).
_DRIVER = 256 * MIB
_DRIVER_SHARE = 0.005
_CONTEXT = 512 * MIB  # kernels and stacks of one process; less with CUDA_MODULE_LOADING=LAZY, torch's default
_NCCL_NODE = 512 * MIB  # buffers of the channels to a node's other GPUs, outside of torch's allocator
_NCCL_NODES = 1024 * MIB
_FRAGMENTS = 0.02  # share of the memory that the allocator has reserved and cannot use
_OTHERS = 0.1  # share of a host's memory that is left to other processes


@dataclass(frozen=True)
class Budget:
    """A device's memory, and the part of it that tensors cannot have.

    Attributes:
        memory_bytes: The whole memory, as ``nvidia-smi`` reports it.
        taken: What else takes memory, each with its bytes.
    """

    memory_bytes: int
    taken: tuple[tuple[str, int], ...]

    @property
    def usable_bytes(self) -> int:
        """Bytes left for tensors: an estimate's peak is compared with this."""
        return max(0, self.memory_bytes - sum(size for _, size in self.taken))

    def needed_for(self, peak_bytes: int) -> int:
        """Memory in bytes of the smallest device on which such a peak fits."""
        fixed = sum(size for name, size in self.taken if name in _FIXED)
        shares = sum(size for name, size in self.taken if name not in _FIXED) / self.memory_bytes
        return math.ceil((peak_bytes + fixed) / (1 - shares))

    def __str__(self) -> str:
        taken = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.taken)
        return f"{self.usable_bytes / GIB:.1f} of {self.memory_bytes / GIB:.1f} GiB usable ({taken})"


_FIXED = ("CUDA context", "NCCL")  # the same on every device; the rest grows with the device's memory


def budget_of(gpu: Gpu, num_gpus: int, memory_bytes: int | None = None) -> Budget:
    """The part of a device's memory that tensors can have.

    Args:
        gpu: The device.
        num_gpus: Number of ranks. NCCL's buffers come with more than one, and are larger where the ranks take
            more than one node.
        memory_bytes: Memory as ``nvidia-smi`` reports it; None takes that of the usual model.

    Raises:
        ValueError: If the memory is not positive, or infinite.
    """
    if memory_bytes is not None and (isinstance(memory_bytes, bool) or not 0 < memory_bytes < math.inf):
        raise ValueError(f"gpu_memory_bytes must be positive and finite, got {memory_bytes!r}")
    memory = gpu.memory_bytes if memory_bytes is None else int(memory_bytes)
    if gpu.name == "cpu":
        return Budget(memory, (("other processes", int(memory * _OTHERS)),))
    driver = int(min(_DRIVER, memory * _FRAGMENTS) + memory * _DRIVER_SHARE)
    taken = [("driver", driver), ("CUDA context", _CONTEXT)]
    if num_gpus > 1:
        taken.append(("NCCL", _NCCL_NODE if num_gpus <= gpu.gpus_per_node else _NCCL_NODES))
    taken.append(("fragments", int(memory * _FRAGMENTS)))
    return Budget(memory, tuple(taken))
