"""Checkpoints in FP8 as DeepSeek publishes them, and many others since; DeepSeek-V4 has experts in MXFP4.

Source: transformers/integrations/finegrained_fp8.py; for DeepSeek-V4 its inference/model.py.
"""

from collections.abc import Iterable

import torch

from fsdp_sft._quantised import elements
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._quantised.tensors import Entries, Method, Tensors
from fsdp_sft._tensors.stored import Ints

_WHOLE: list[Ints | None] = [None, (0, 0), (1, 0)]


def check(settings: Settings) -> None:
    """Refuse what no reader reads, by the config alone."""
    _blocks(settings)


def find(tensors: Tensors, keys: Iterable[str]) -> None:
    """Add all weights in FP8, and those of 4 bits that DeepSeek-V4 keeps in int8."""
    blocks = _blocks(tensors.settings)
    for key in keys:
        if not tensors.is_free(key):
            continue
        names = [f"{key}_scale_inv", f"{key}_scale"]
        if key.endswith(".weight"):
            names.append(f"{key.removesuffix('.weight')}.scale")
        dtype = tensors.entry(key).dtype
        if dtype not in (*elements.FLOATS, torch.int8):
            continue
        scales = tensors.first(names)
        if scales is None:
            continue
        if dtype == torch.int8:
            elements.find_mx(tensors, key, key, scales)
        else:
            elements.find(tensors, key, scales, blocks)


def _blocks(settings: Settings) -> list[Ints | None]:
    """Layouts that scales may have: blocks of the config, or one for the tensor, a matrix or a channel."""
    size = settings.fields.get("weight_block_size")
    if size is None:
        return _WHOLE
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        raise settings.refused(f"weight_block_size={size!r:.80} is not two numbers, of rows and columns")
    down, across = (settings.block(each, "weight_block_size") for each in size)
    return [(down, across)]


def bits(settings: Settings) -> float:
    """Bits of a packed value with its share of the scales: of an expert's, where these have fewer."""
    return 4.25 if settings.fields.get("expert_dtype") == "fp4" else 8


def stored_as(settings: Settings, shape: Ints) -> Entries | None:
    """One row; scales are float32, or exponents where experts are in MXFP4 (DeepSeek-V4)."""
    width, (block,) = shape[-1], _blocks(settings)[:1]
    is_v4 = settings.fields.get("expert_dtype") == "fp4"
    if is_v4 and len(shape) == 3:
        return elements.mx_row(width, "w.weight", "w.scale", torch.int8)
    of_scales = torch.float8_e8m0fnu if is_v4 else torch.float32
    grid = () if block is None else (1, -(-width // block[1]))
    return {"w.weight": (torch.float8_e4m3fn, (1, width)), "w.weight_scale_inv": (of_scales, grid)}


METHOD = Method(
    check,
    find,
    r"weight_scale(_inv)?$|_scale_inv$",
    bits,
    skips=("modules_to_not_convert", "ignored_layers"),
    stored_as=stored_as,
)
