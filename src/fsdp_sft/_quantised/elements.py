"""Weights stored element by element, in FP8 or int8, with scales for blocks, groups, channels or the tensor.

value = (q - z) * s, in float32; only compressed-tensors has zero points z, and those for int8.

Sources: DeepSeek-V3's inference/kernel.py (``weight_dequant``; ``weight_scale_inv`` multiplies), for partial
blocks compressed_tensors/converters; compressed_tensors/quantization/lifecycle/forward_helpers.py; for
exponents as scales OCP Microscaling Formats 1.0, section 5.4.1.
"""

from collections.abc import Mapping
from functools import partial

import torch

from fsdp_sft._quantised.tensors import Entries, Tensors
from fsdp_sft._quantised.values import E2M1, as_scales, of_floats, of_nibbles, scale, shift
from fsdp_sft._tensors.packed import StoredPart
from fsdp_sft._tensors.stored import Ints

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


# Weights in 4-bit floats (E2M1), two in a byte, the low half first: MXFP4 and NVFP4.
#
# MXFP4: value = e2m1 * 2^(s - 127), a scale for 32 columns; exact in bfloat16. NVFP4: a scale in FP8 for 16
# columns and one float32 number g for the tensor; value = e2m1 * (s / g) in compressed-tensors, and
# e2m1 * (s * g) in ModelOpt, in which the scales are combined first.
#
# Sources: OCP Microscaling Formats 1.0, section 5.2; for gpt-oss transformers/integrations/mxfp4.py
# (``convert_moe_packed_tensors``: transposed afterwards); compressed_tensors/compressors/nvfp4 and mxfp4;
# modelopt/torch/quantization/qtensor/nvfp4_tensor.py (``dequantize``).

BYTES = (torch.uint8, torch.int8)
_OF_32, _OF_16 = 32, 16


def find_mx(tensors: Tensors, name: str, codes: str, scales: str) -> None:
    """Add an MXFP4 weight, whose columns are those of the model."""
    *lead, half = tensors.matrix(codes)
    stored = tensors.take(codes, codes, BYTES)
    shape = (*lead, 2 * half)
    columns = -(-shape[-1] // _OF_32)
    exponents = tensors.shaped(scales, (*lead, columns), codes, (torch.uint8, torch.float8_e8m0fnu))
    parts = {"codes": StoredPart(stored, (1, 2), half), "scale": StoredPart(exponents, (1, _OF_32), columns)}
    tensors.add(name, codes, "mxfp4", shape, parts, _mx, dtype=torch.bfloat16, by_rows=_mx)


def find_experts(tensors: Tensors, name: str, blocks: str, scales: str) -> None:
    """Add the MXFP4 experts of gpt-oss: (experts, rows, n, 16) bytes for (experts, 32 n, rows) values."""
    stored = tensors.take(blocks, blocks, (torch.uint8,))
    shape = stored.entry.shape
    if len(shape) != 4 or shape[-1] * 2 != _OF_32:
        raise tensors.settings.refused(f"{blocks!r} has shape {shape}, and not (experts, rows, blocks, 16)")
    experts, height, columns, _ = shape
    exponents = tensors.shaped(scales, shape[:-1], blocks, (torch.uint8, torch.float8_e8m0fnu))
    width = columns * _OF_32
    parts = {
        "codes": StoredPart(stored, (1, 2), width // 2),
        "scale": StoredPart(exponents, (1, _OF_32), columns),
    }
    tensors.add(
        name,
        blocks,
        "mxfp4",
        (experts, width, height),
        parts,
        _mx,
        rows=(height, width),
        stride=(height * width, 1, width),
        dtype=torch.bfloat16,
        by_rows=_mx,
    )


def find_nv(tensors: Tensors, name: str, codes: str, scales: str, whole: str, *, divide: bool) -> None:
    """Add an NVFP4 weight; ``whole`` is the number for the tensor, by which scales are divided or not."""
    *lead, half = tensors.matrix(codes)
    stored = tensors.take(codes, codes, (torch.uint8,))
    shape = (*lead, 2 * half)
    columns = -(-shape[-1] // _OF_16)
    scaled = tensors.shaped(scales, (*lead, columns), codes, (torch.float8_e4m3fn,))
    parts = {
        "codes": StoredPart(stored, (1, 2), half),
        "scale": StoredPart(scaled, (1, _OF_16), columns),
        "whole": tensors.one(whole, codes),
    }
    decode = partial(_nv, divide)
    tensors.add(name, codes, "nvfp4", shape, parts, decode, by_rows=decode)


def mx_row(width: int, codes: str, scales: str, of: torch.dtype = torch.uint8) -> Entries | None:
    """One row of an MXFP4 weight as ``find_mx`` finds it; None if it cannot have so many columns."""
    if width % _OF_32:
        return None
    return {codes: (of, (1, width // 2)), scales: (torch.float8_e8m0fnu, (1, width // _OF_32))}


def nv_row(width: int, codes: str, scales: str, whole: str) -> Entries | None:
    """One row of an NVFP4 weight as ``find_nv`` finds it; None if it cannot have so many columns."""
    if width % _OF_16:
        return None
    return {
        codes: (torch.uint8, (1, width // 2)),
        scales: (torch.float8_e4m3fn, (1, width // _OF_16)),
        whole: (torch.float32, (1,)),
    }


def _mx(parts: Mapping[str, torch.Tensor], rows: range, columns: range) -> torch.Tensor:
    return scale(of_nibbles(parts["codes"], E2M1), as_scales(parts["scale"]), _OF_32)


def _nv(divide: bool, parts: Mapping[str, torch.Tensor], rows: range, columns: range) -> torch.Tensor:
    scales, whole = parts["scale"].to(torch.float32), parts["whole"].reshape(-1, 1)
    scales = scales / whole if divide else scales * whole
    return scale(of_nibbles(parts["codes"], E2M1), scales, _OF_16)
