"""Weights in FP8 element by element, and in 4-bit floats, of which two are in a byte, the low half first.

FP8: value = q * s, in float32, with scales for blocks, groups, channels or the tensor.
MXFP4: value = e2m1 * 2^(s - 127), a scale for 32 columns; exact in bfloat16. NVFP4: a scale in FP8 for 16
columns and one float32 number g for the tensor; value = e2m1 * (s / g) in compressed-tensors, and
e2m1 * (s * g) in ModelOpt, in which the scales are combined first.

Sources: DeepSeek-V3's inference/kernel.py (``weight_dequant``; ``weight_scale_inv`` multiplies), for partial
blocks compressed_tensors/converters; OCP Microscaling Formats 1.0, sections 5.2 and 5.4.1;
compressed_tensors/compressors/nvfp4 and mxfp4; modelopt/torch/quantization/qtensor/nvfp4_tensor.py
(``dequantize``).
"""

from collections.abc import Mapping
from functools import partial

import torch

from fsdp_sft._quantised.tensors import Tensors
from fsdp_sft._quantised.values import E2M1, as_scales, of_floats, of_nibbles, scale
from fsdp_sft._tensors.packed import StoredPart
from fsdp_sft._tensors.stored import Ints

FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
OF_32, _OF_16 = 32, 16


def find(tensors: Tensors, key: str, scales: str, blocks: list[Ints | None]) -> None:
    """Add the values of one weight in FP8.

    Args:
        tensors: The checkpoint.
        key: Name of the weight.
        scales: Name of its scales.
        blocks: Layouts that the scales may have; see ``Tensors.grid``.
    """
    shape = tensors.matrix(key)
    parts = {"weight": StoredPart(tensors.take(key, key, FLOATS), (1, 1), shape[-1])}
    parts["scale"], layout = tensors.grid(scales, shape, blocks, key)
    decode = partial(_fp8, (parts["scale"].each or (0, 0))[1])
    tensors.add(key, key, f"fp8 {layout}", shape, parts, decode, by_rows=decode)


def _fp8(across: int, parts: Mapping[str, torch.Tensor], rows: range, columns: range) -> torch.Tensor:
    return scale(of_floats(parts["weight"]), as_scales(parts["scale"]), across)


def find_mx(tensors: Tensors, name: str, codes: str, scales: str) -> None:
    """Add an MXFP4 weight, whose columns are those of the model."""
    parts, shape = _nibbles(tensors, codes, scales, OF_32, EXPONENTS)
    tensors.add(name, codes, "mxfp4", shape, parts, mx, dtype=torch.bfloat16, by_rows=mx)


def find_nv(tensors: Tensors, name: str, codes: str, scales: str, whole: str, *, divide: bool) -> None:
    """Add an NVFP4 weight; ``whole`` is the number for the tensor, by which scales are divided or not."""
    parts, shape = _nibbles(tensors, codes, scales, _OF_16, (torch.float8_e4m3fn,))
    parts["whole"] = tensors.one(whole, codes)
    decode = partial(_nv, divide)
    tensors.add(name, codes, "nvfp4", shape, parts, decode, by_rows=decode)


def _nibbles(
    tensors: Tensors, codes: str, scales: str, across: int, of_scales: tuple[torch.dtype, ...]
) -> tuple[dict[str, StoredPart], Ints]:
    """The codes and scales of a weight in 4-bit floats, and the shape of its values."""
    *lead, half = tensors.matrix(codes)
    stored = tensors.take(codes, codes, (torch.uint8, torch.int8))
    columns = -(-2 * half // across)
    scaled = tensors.shaped(scales, (*lead, columns), codes, of_scales)
    parts = {"codes": StoredPart(stored, (1, 2), half), "scale": StoredPart(scaled, (1, across), columns)}
    return parts, (*lead, 2 * half)


def mx(parts: Mapping[str, torch.Tensor], rows: range, columns: range) -> torch.Tensor:
    """The values of MXFP4."""
    return scale(of_nibbles(parts["codes"], E2M1), as_scales(parts["scale"]), OF_32)


def _nv(divide: bool, parts: Mapping[str, torch.Tensor], rows: range, columns: range) -> torch.Tensor:
    scales, whole = parts["scale"].to(torch.float32), parts["whole"].reshape(-1, 1)
    scales = scales / whole if divide else scales * whole
    return scale(of_nibbles(parts["codes"], E2M1), scales, _OF_16)
