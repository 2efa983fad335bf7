"""What frozen weights hold once they are packed, a block of a row after the other."""

import torch

# bitsandbytes' table (functional.py, get_4bit_type), from arXiv 2305.14314, appendix E.
TABLE = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
        *(0.7229568362236023, 1.0),
    ]
)


def in_nf4(weight: torch.Tensor) -> torch.Tensor:
    """The values of a matrix or a stack of them in NF4."""
    values = torch.empty(weight.shape)
    for row, packed in zip(weight.float().flatten(0, -2), values.flatten(0, -2), strict=True):
        for first in range(0, len(row), 64):
            block = row[first : first + 64]
            largest = block.abs().max().bfloat16().float()
            nearest = (block[:, None] / largest - TABLE).abs().argmin(1)
            packed[first : first + 64] = TABLE[nearest] * largest
    return values


def in_fp8(weight: torch.Tensor) -> torch.Tensor:
    """The values of a matrix or a stack of them in FP8."""
    values = torch.empty(weight.shape)
    for row, packed in zip(weight.float().flatten(0, -2), values.flatten(0, -2), strict=True):
        for first in range(0, len(row), 128):
            scale = row[first : first + 128].abs().max() / 448
            eight = (row[first : first + 128] / scale).to(torch.float8_e4m3fn)
            packed[first : first + 128] = eight.float() * scale
    return values


def is_packed(name: str, weight: torch.Tensor) -> bool:
    """Whether a weight is one that is packed: a matrix of a layer that is not tiny, and no router."""
    is_router = any(part in name for part in ("router", ".gate.", "bias", "lora_"))
    return "layers." in name and weight.ndim > 1 and min(weight.shape[-2:]) >= 32 and not is_router
