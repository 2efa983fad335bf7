"""GPUs that the planner knows: which attention kernels they run, how fast they are, how they are wired."""

from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
GB = 10**9


@dataclass(frozen=True)
class Gpu:
    """One kind of device.

    Attributes:
        name: As ``estimate_memory(gpu=...)`` takes it.
        attention_output: Memory order of the attention's output. ``"query"``: that of the query.
            ``"tokens"``: (batch, sequence, heads, head_dim) under a mask, which the output projection reads
            as it is, and that of the query without. ``"heads"``: (batch, heads, sequence, head_dim), which
            transformers copies once more.
        workspace_bytes: What cuBLAS takes from torch's allocator for the rest of the run.
        memory_bytes: Of the usual model.
        flops_per_second: Dense bfloat16 peak.
        memory_bytes_per_second: Of its own memory.
        bytes_per_second: Per GPU between nodes, for collectives over more GPUs than one node has.
        node_bytes_per_second: Per GPU within a node.
        host_bytes_per_second: Per GPU to the memory of its host, one way.
        gpus_per_node: GPUs that share the fast links.
    """

    name: str
    attention_output: Literal["query", "tokens", "heads"]
    workspace_bytes: int
    memory_bytes: int
    flops_per_second: float
    memory_bytes_per_second: float
    bytes_per_second: float
    node_bytes_per_second: float
    host_bytes_per_second: float
    gpus_per_node: int = 8


# Workspaces: torch takes 32 MiB on Hopper and Blackwell and about 8 MiB elsewhere,
# https://docs.pytorch.org/docs/stable/notes/cuda.html#cublas-workspaces. Peaks and links are the data sheets'
# (see metrics/flops.py): to the host PCIe 4 (A100) or 5, or NVLink-C2C, which two GPUs share; between nodes
# one 200 (A100) or 400 Gbit/s (others) adapter per GPU is taken.
GPUS = {
    "a100": Gpu("a100", "tokens", 8 << 20, 80 * GB, 312e12, 2.0e12, 25e9, 300e9, 32e9),
    "h100": Gpu("h100", "heads", 32 << 20, 80 * GB, 989.4e12, 3.35e12, 50e9, 450e9, 64e9),
    "h200": Gpu("h200", "heads", 32 << 20, 141 * GB, 989.4e12, 4.8e12, 50e9, 450e9, 64e9),
    "gb200": Gpu("gb200", "heads", 32 << 20, 186 * GB, 2500e12, 8.0e12, 50e9, 900e9, 225e9, 4),
    "cpu": Gpu("cpu", "query", 0, 64 * GB, 1e12, 0.1e12, 10e9, 10e9, 10e9),
}


def gpu_named(name: str) -> Gpu:
    """The device of that name; raises ValueError with the list of names."""
    found = GPUS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, got {name!r}")
    return found


def parse_gpu(text: str) -> tuple[str, int]:
    """``"h100-80gb"`` to its name and bytes; without a size, the usual model's.

    Raises:
        ValueError: For a device that is not known, or a size that cannot be read.
    """
    name, _, size = text.lower().partition("-")
    gpu = gpu_named(name)
    if not size:
        return name, gpu.memory_bytes
    digits, unit = size.rstrip("gib"), size.lstrip("0123456789.")
    scale = {"gb": GB, "gib": GIB}.get(unit)
    try:
        return name, int(float(digits) * scale) if scale else int("")
    except ValueError:
        raise ValueError(
            f"cannot read the memory in {text!r}; write it as h100-80gb or h100-79.1gib"
        ) from None
