"""GPUs by name: memory, rates and links, from data sheets, ``nvidia-smi`` and published measurements."""

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

MIB = 1 << 20
GIB = 1 << 30
GB = 10**9

AttentionOutput = Literal["query", "tokens", "heads"]


@dataclass(frozen=True)
class Gpu:
    """One kind of device.

    Attributes:
        name: Name by which ``Run(gpu=...)`` takes it.
        device: Regular expression for whole words of the device's name in torch.
        memory_bytes: The whole memory, as ``nvidia-smi`` reports it for the usual model.
        flops_per_second: Dense bfloat16 peak with float32 accumulation.
        memory_bytes_per_second: Bandwidth of the GPU's own memory.
        node_bytes_per_second: Bandwidth per GPU within a node, one way.
        bytes_per_second: Bandwidth per GPU between nodes, for collectives over more GPUs than one node has.
        gpus_per_node: Number of GPUs that share the fast links.
        attention_output: Memory order of the attention's output. ``"query"``: that of the query.
            ``"tokens"``: (batch, sequence, heads, head_dim) under a mask, which the output projection reads
            as it is, and that of the query without a mask. ``"heads"``: (batch, heads, sequence, head_dim),
            which transformers copies once more.
        workspace_bytes: Bytes that cuBLAS takes from torch's allocator for the rest of the run.
        achievable: Measured share of the peak that the best large matrix product reaches.
        checked: Whether estimates for this GPU were compared with measurements on it.
    """

    name: str
    device: str
    memory_bytes: int
    flops_per_second: float
    memory_bytes_per_second: float
    node_bytes_per_second: float
    bytes_per_second: float
    gpus_per_node: int = 8
    attention_output: AttentionOutput = "tokens"
    workspace_bytes: int = 8 * MIB
    achievable: float = 0.8
    checked: bool = False


# Where the numbers come from, in the order of the fields:
# - Memory is what nvidia-smi (or amd-smi) prints in MiB. That is less than the size a card is sold with if
#   error correction takes a part of it.
# - Peaks are dense (no structured sparsity) bfloat16 with float32 accumulation. Where a data sheet prints the
#   sparse number, half of it is taken.
# - Links within a node are NVLink if the card has it, else PCIe. Between nodes there is one adapter per GPU:
#   200 Gbit/s for A100 and MI250X (of which torch sees two dies), 400 for Hopper, MI300 and B200, 800 for
#   B300, 100 for cards that are rented by the machine.
# - cuBLAS's workspaces are 32 MiB on Hopper and Blackwell and about 8 MiB on other GPUs:
#   https://docs.pytorch.org/docs/stable/notes/cuda.html#cublas-workspaces
# - What products achieve is measured, and collected in
#   https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md
#   #maximum-achievable-matmul-flops-comparison-table; 0.8 stands where nobody has measured.
_HOPPER: dict[str, Any] = {"attention_output": "heads", "workspace_bytes": 32 * MIB}
_BLACKWELL: dict[str, Any] = {**_HOPPER, "achievable": 0.776}
_TABLE = (
    # https://resources.nvidia.com/en-us-blackwell-architecture/datasheet (a GB200 superchip has two);
    # four GPUs a tray, and links to the processor that two of them share
    Gpu("gb200", "GB200", 189471 * MIB, 2500e12, 8.0e12, 900e9, 50e9, 4, checked=True, **_BLACKWELL),
    Gpu("gb300", "GB300", 284208 * MIB, 2500e12, 8.0e12, 900e9, 100e9, 4, **_BLACKWELL),
    # https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet (and dgx-b300, eight GPUs a number)
    Gpu("b200", "B200", 183359 * MIB, 2250e12, 8.0e12, 900e9, 50e9, **_BLACKWELL),
    Gpu("b300", "B300", 275040 * MIB, 2250e12, 8.0e12, 900e9, 100e9, **_BLACKWELL),
    # https://resources.nvidia.com/en-us-hopper-architecture/hpc-datasheet-sc23 (H200 SXM and NVL)
    Gpu("h200-nvl", "H200 NVL", 143771 * MIB, 835.5e12, 4.8e12, 450e9, 50e9, 4, **_HOPPER),
    Gpu(
        "h200",
        "H200",
        143771 * MIB,
        989.4e12,
        4.8e12,
        450e9,
        50e9,
        achievable=0.837,
        checked=True,
        **_HOPPER,
    ),
    # https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip
    Gpu("gh200", "GH200", 97871 * MIB, 989.4e12, 4.0e12, 450e9, 50e9, 1, achievable=0.836, **_HOPPER),
    # https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet (H100 SXM, NVL, PCIe)
    Gpu("h100-pcie", "H[18]00 PCIe", 81559 * MIB, 756.5e12, 2.0e12, 64e9, 50e9, **_HOPPER),
    Gpu("h100-nvl", "H100 NVL", 95830 * MIB, 835.5e12, 3.9e12, 300e9, 50e9, 2, **_HOPPER),
    Gpu(
        "h100",
        "H[18]00",
        81559 * MIB,
        989.4e12,
        3.35e12,
        450e9,
        50e9,
        achievable=0.803,
        checked=True,
        **_HOPPER,
    ),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    Gpu(
        "a100",
        "A[18]00",
        81920 * MIB,
        312e12,
        2.0e12,
        300e9,
        25e9,
        achievable=0.869,
        checked=True,
    ),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/products/a30-gpu/pdf/a30-datasheet.pdf
    Gpu("a30", "A30", 24576 * MIB, 165e12, 0.933e12, 32e9, 12.5e9, 4),
    # https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf
    Gpu("a40", "A40", 46068 * MIB, 149.7e12, 0.696e12, 32e9, 12.5e9),
    # https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf
    Gpu("a10g", "A10G", 23028 * MIB, 70e12, 0.6e12, 32e9, 12.5e9),
    # https://images.nvidia.com/content/Solutions/data-center/a10/pdf/a10-datasheet.pdf
    Gpu("a10", "A10", 23028 * MIB, 125e12, 0.6e12, 32e9, 12.5e9),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/quadro-product-literature/proviz-print-nvidia-rtx-a6000-datasheet-us-nvidia-1454980-r9-web%20(1).pdf
    Gpu("a6000", "RTX A6000", 49140 * MIB, 154.8e12, 0.768e12, 32e9, 12.5e9),
    # https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413
    Gpu("l40s", "L40S", 46068 * MIB, 362.05e12, 0.864e12, 32e9, 12.5e9),
    # https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet
    Gpu("l4", "L4", 23034 * MIB, 121e12, 0.3e12, 32e9, 12.5e9),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
    Gpu("5090", r"RTX 5090(?! (Laptop|D\b))", 32607 * MIB, 209.5e12, 1.792e12, 64e9, 12.5e9),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf (appendix A;
    # not the laptop and "D" variants)
    Gpu("4090", r"RTX 4090(?! (Laptop|D\b))", 24564 * MIB, 165.2e12, 1.008e12, 32e9, 12.5e9),
    # https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf (appendix A)
    Gpu("3090", "RTX 3090(?! Ti)", 24576 * MIB, 71e12, 0.936e12, 32e9, 12.5e9),
    # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html and mi325x.html
    Gpu("mi325x", "MI325X", 262128 * MIB, 1307.4e12, 6.0e12, 448e9, 50e9, achievable=0.6),
    Gpu("mi300x", "MI300X", 196592 * MIB, 1307.4e12, 5.3e12, 448e9, 50e9, achievable=0.6),
    # https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html (torch sees one of its two dies)
    Gpu("mi250x", "MI250X", 65520 * MIB, 191.5e12, 1.6e12, 200e9, 12.5e9, achievable=0.767),
    # No device: this machine, for tests.
    Gpu("cpu", "(?!)", 64 * GB, 1e12, 0.1e12, 10e9, 10e9, attention_output="query", workspace_bytes=0),
)
GPUS = {gpu.name: gpu for gpu in _TABLE}
GPUS["h100-96gb"] = replace(GPUS["h100"], memory_bytes=97871 * MIB)
GPUS["a100-40gb"] = replace(GPUS["a100"], memory_bytes=40960 * MIB)
_EXTRA = ("link", "network", "per_node")


def known_device(name: str) -> Gpu | None:
    """The GPU with this name in torch; None if it is not in the table, or is a slice of a GPU (MIG)."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((gpu for gpu in _TABLE if re.search(rf"\b({gpu.device})\b", name)), None)


def gpu_named(name: str) -> Gpu:
    """A GPU of the table, or as the name describes it.

    Args:
        name: ``"h100"`` or ``"a100-40gb"``; or ``"NAME=GiB,TFLOPs,GB/s"``: memory as ``nvidia-smi`` reports
            it, dense bfloat16 peak, and bandwidth of its memory, after which ``link=GB/s`` within a node,
            ``network=GB/s`` between nodes and ``per_node=N`` may follow.

    Raises:
        ValueError: If the GPU is not known, or the description cannot be read.
    """
    text = str(name).strip().lower()
    if "=" in text:
        return _described(text)
    if text not in GPUS:
        raise ValueError(
            f"gpu must be one of {', '.join(GPUS)}, or described as NAME=GiB,TFLOPs,GB/s; got {name!r}"
        )
    return GPUS[text]


def _described(text: str) -> Gpu:
    """The GPU of a description such as ``"mine=48,362,864,per_node=4"``."""
    name, _, values = text.partition("=")
    parts = [part.partition("=") for part in values.split(",")]
    try:
        memory, peak, bandwidth = (float(number) for number, equals, _ in parts if not equals)
        extra = {key: float(value) for key, equals, value in parts if equals}
    except ValueError:
        extra, memory, peak, bandwidth = {}, 0.0, 0.0, 0.0
    if (
        not name
        or memory * GIB < 1
        or not extra.get("per_node", 1.0).is_integer()
        or set(extra) - set(_EXTRA)
        or min(memory, peak, bandwidth, *extra.values()) <= 0
        or not all(value < float("inf") for value in (memory, peak, bandwidth, *extra.values()))
    ):
        raise ValueError(
            f"cannot read {text!r}; a GPU is described as NAME=GiB,TFLOPs,GB/s, such as mine=48,362,864, "
            f"after which {', '.join(f'{key}=' for key in _EXTRA)} may follow (GB/s per GPU, GPUs)"
        )
    return Gpu(
        name,
        "(?!)",
        int(memory * GIB),
        peak * 1e12,
        bandwidth * 1e9,
        extra.get("link", 32.0) * 1e9,
        extra.get("network", 12.5) * 1e9,
        int(extra.get("per_node", 8)),
    )
