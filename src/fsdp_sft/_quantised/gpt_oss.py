"""Checkpoints with experts in MXFP4, as OpenAI publishes gpt-oss: transposed, 32 values in 16 bytes.

Sources: transformers/quantizers/quantizer_mxfp4.py; transformers/integrations/mxfp4.py
(``convert_moe_packed_tensors``).
"""

from collections.abc import Iterable

import torch

from fsdp_sft._quantised import elements
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._quantised.tensors import Method, Tensors
from fsdp_sft._tensors.packed import StoredPart


def check(settings: Settings) -> None:
    """Refuse nothing: the config has no field on which the values depend."""


def find(tensors: Tensors, keys: Iterable[str]) -> None:
    """Add all experts."""
    for key in keys:
        name = key.removesuffix("_blocks")
        if name != key and tensors.is_of(key, torch.uint8):
            _add(tensors, name, key, f"{name}_scales")


def _add(tensors: Tensors, name: str, blocks: str, scales: str) -> None:
    """Add the experts of one layer: (experts, rows, n, 16) bytes for (experts, 32 n, rows) values."""
    stored = tensors.take(blocks, blocks, (torch.uint8,))
    shape = stored.entry.shape
    if len(shape) != 4 or shape[-1] * 2 != elements.OF_32:
        raise tensors.settings.refused(f"{blocks!r} has shape {shape}, and not (experts, rows, blocks, 16)")
    experts, height, columns, _ = shape
    exponents = tensors.shaped(scales, shape[:-1], blocks, elements.EXPONENTS)
    width = columns * elements.OF_32
    tensors.add(
        name,
        blocks,
        "mxfp4",
        (experts, width, height),
        {
            "codes": StoredPart(stored, (1, 2), width // 2),
            "scale": StoredPart(exponents, (1, elements.OF_32), columns),
        },
        elements.mx,
        rows=(height, width),
        stride=(height * width, 1, width),
        dtype=torch.bfloat16,
        by_rows=elements.mx,
    )


def bits(settings: Settings, dims: int) -> float:
    """Bits of a value in a row: of experts alone."""
    return 4.25 if dims == 3 else 0


METHOD = Method(
    check,
    find,
    r"_(blocks|scales)$",
    bits,
    skips=("modules_to_not_convert",),
    transposed=True,
)
