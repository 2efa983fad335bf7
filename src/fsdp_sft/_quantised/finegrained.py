"""Checkpoints in FP8 as DeepSeek publishes them, and many others since; DeepSeek-V4 has experts in MXFP4.

Source: transformers/integrations/finegrained_fp8.py; for DeepSeek-V4 its inference/model.py.
"""

from collections.abc import Iterable

import torch

from fsdp_sft._quantised import elements
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._quantised.tensors import Method, Tensors
from fsdp_sft._tensors.stored import Ints


def find(tensors: Tensors, keys: Iterable[str]) -> None:
    """Add all weights in FP8, and those of 4 bits that DeepSeek-V4 keeps in int8."""
    blocks = check(tensors.settings)
    for key in keys:
        if not tensors.is_of(key, torch.int8, *elements.FLOATS):
            continue
        names = [f"{key}_scale_inv", f"{key}_scale"]
        if key.endswith(".weight"):
            names.append(f"{key.removesuffix('.weight')}.scale")
        scales = tensors.first(names)
        if scales is None:
            continue
        if tensors.stored[key].entry.dtype == torch.int8:
            elements.find_mx(tensors, key, key, scales)
        else:
            elements.find(tensors, key, scales, blocks)


def check(settings: Settings) -> list[Ints | None]:
    """Layouts that scales may have: blocks of the config, or one for the tensor, a matrix or a channel."""
    size = settings.fields.get("weight_block_size")
    if size is None:
        return [None, (0, 0), (1, 0)]
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        raise settings.refused(f"weight_block_size={size!r:.80} is not two numbers, of rows and columns")
    down, across = (settings.block(each, "weight_block_size") for each in size)
    return [(down, across)]


def bits(settings: Settings, dims: int) -> float:
    """Bits of a value in a row: scales are float32, or exponents where experts are in MXFP4 (DeepSeek-V4)."""
    is_v4 = settings.fields.get("expert_dtype") == "fp4"
    if is_v4 and dims == 3:
        return 4.25
    block = check(settings)[0]
    return 8 + (8 if is_v4 else 32) / block[1] if block else 8


METHOD = Method(
    check,
    find,
    r"weight_scale(_inv)?$|_scale_inv$",
    bits,
    skips=("modules_to_not_convert", "ignored_layers"),
)
