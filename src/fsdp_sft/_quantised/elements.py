"""Weights stored element by element, in FP8 or int8, with scales for blocks, groups, channels or the tensor.

value = (q - z) * s, in float32; only compressed-tensors has zero points z, and those for int8.

Sources: DeepSeek-V3's inference/kernel.py (``weight_dequant``; ``weight_scale_inv`` multiplies), for partial
blocks compressed_tensors/converters; compressed_tensors/quantization/lifecycle/forward_helpers.py; for
exponents as scales OCP Microscaling Formats 1.0, section 5.4.1.
"""

from collections.abc import Mapping
from functools import partial

import torch

from fsdp_sft._quantised.tensors import Tensors
from fsdp_sft._quantised.values import as_scales, of_floats, scale, shift
from fsdp_sft._tensors.packed import StoredPart
from fsdp_sft._tensors.pieces import Ints

FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
_KIND = {torch.int8: "int8"}


def find(
    tensors: Tensors, key: str, scales: str, blocks: list[Ints | None], zeros: str | None = None
) -> None:
    """Add the values of one such weight.

    Args:
        tensors: The checkpoint.
        key: Name of the weight.
        scales: Name of its scales.
        blocks: Layouts that the scales may have; see ``Tensors.grid``.
        zeros: Name of its zero points, in the layout of the scales, if there are any.
    """
    shape = tensors.matrix(key)
    weight = tensors.take(key, key, (*FLOATS, torch.int8))
    parts = {"weight": StoredPart(weight, (1, 1), shape[-1])}
    parts["scale"], layout = tensors.grid(scales, shape, blocks, key)
    if zeros is not None:
        like = tensors.entry(scales).shape
        stored = tensors.shaped(zeros, like, key, (torch.int8, *FLOATS))
        parts["zero"] = StoredPart(stored, parts["scale"].each, parts["scale"].columns)
    across = (parts["scale"].each or (0, 0))[1]
    form = f"{_KIND.get(weight.entry.dtype, 'fp8')} {layout}"
    decode = partial(_decode, across)
    tensors.add(key, key, form, shape, parts, decode, by_rows=decode)


def _decode(across: int, parts: Mapping[str, torch.Tensor], rows: range, columns: range) -> torch.Tensor:
    weight = parts["weight"]
    values = of_floats(weight) if weight.dtype in FLOATS else weight.to(torch.float32)
    if "zero" in parts:
        values = shift(values, parts["zero"].to(torch.float32), across)
    return scale(values, as_scales(parts["scale"]), across)
