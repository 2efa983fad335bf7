"""Weights that compressed-tensors packs as integers of 4 or 8 bits, along the columns.

value = (q - z) * s, in float32, which is exact where the scales have 16 bits; the package itself rounds to
the scales' dtype. q and z are stored with 2^(bits - 1) added, in words of 32 bits, the lowest first. Zero
points z, of asymmetric schemes alone, are packed along the rows. ``weight_g_idx`` assigns columns to groups.

Source: compressed_tensors/compressors/pack_quantized (``helpers.py``, ``base.py``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fsdp_sft._quantised.tensors import Tensors
from fsdp_sft._quantised.values import as_scales, of_nibbles, scale, shift
from fsdp_sft._tensors.packed import StoredPart
from fsdp_sft._tensors.pieces import Ints
from fsdp_sft.errors import CheckpointFormatError

_WORDS = (torch.int32,)


@dataclass(frozen=True)
class Scheme:
    """How weights of one group of modules are packed.

    Attributes:
        bits: Bits of a value, 4 or 8.
        block: Numbers of (rows, columns) that share a scale; see ``Tensors.grid``.
        symmetric: Whether there are no zero points.
        ordered: Whether ``weight_g_idx`` assigns columns to groups.
    """

    bits: int
    block: Ints | None
    symmetric: bool
    ordered: bool


def find(tensors: Tensors, name: str, schemes: Sequence[Scheme]) -> None:
    """Add one such weight: ``<name>_packed``, and ``_scale``, ``_shape``, ``_zero_point`` and ``_g_idx``."""
    key, said = f"{name}_packed", f"{name}_shape"
    stored, shape_part = tensors.take(key, key, _WORDS), tensors.take(said, key, (torch.int64, torch.int32))
    shape, bits = _shape_and_bits(tensors, name, schemes)
    fitting = [scheme for scheme in schemes if scheme.bits == bits]
    scales, layout = tensors.grid(f"{name}_scale", shape, [scheme.block for scheme in fitting], key)
    parts = {
        "codes": StoredPart(stored, (1, 32 // bits), tensors.entry(key).shape[-1]),
        "scale": scales,
        "shape": StoredPart(shape_part),
    }
    zeros = f"{name}_zero_point"
    if tensors.is_free(zeros):
        parts["zero"] = _zeros(tensors, zeros, shape, bits, scales, key)
    elif not any(scheme.symmetric for scheme in fitting):
        raise tensors.settings.refused(f"{key!r} is packed asymmetrically, and {zeros!r} is not there")
    order = f"{name}_g_idx"
    if tensors.is_free(order):
        if scales.each is None:
            raise tensors.settings.refused(f"{order!r} names groups, and {key!r} has one scale")
        parts["group"] = StoredPart(tensors.shaped(order, shape[-1:], key, (torch.int32, torch.int64)))
        for each in ("scale", "zero"):  # any column may belong to any group
            if each in parts and (given := parts[each].each) is not None:
                parts[each] = StoredPart(parts[each].stored, (given[0], 0), parts[each].columns)
    elif all(scheme.ordered for scheme in fitting):
        raise tensors.settings.refused(
            f"{key!r} has its columns in an order of their own: {order!r} is missing"
        )
    across = (scales.each or (0, 0))[1]
    decode = partial(_decode, name, shape, bits, across)
    by_rows = None if {"zero", "group"} & parts.keys() else partial(_by_rows, bits, across)
    tensors.add(name, key, f"int{bits} {layout}", shape, parts, decode, by_rows=by_rows)


def _shape_and_bits(tensors: Tensors, name: str, schemes: Sequence[Scheme]) -> tuple[Ints, int]:
    """Shape of the values, and the bits of each.

    Where scales of whole groups say how many columns there are, the stored shape is read later, with the
    values: a model with 384 experts has 70,000 of them.
    """
    key, scales = f"{name}_packed", f"{name}_scale"
    there = tensors.matrix(key)
    *lead, words = there
    if not schemes:
        raise tensors.settings.refused(f"{key!r} is packed, and the config has no scheme of 4 or 8 bits")
    groups = tensors.entry(scales).shape[-1:] if tensors.is_free(scales) else ()
    widths = {
        (groups[0] * scheme.block[1], scheme.bits)
        for scheme in schemes
        if groups and scheme.block is not None and scheme.block[1]
    }
    fitting = [found for found in widths if num_words(*found) == words]
    if len(fitting) == 1:
        return (*lead, fitting[0][0]), fitting[0][1]
    shape = tuple(tensors.read(f"{name}_shape").reshape(-1).tolist())
    bits = sorted({scheme.bits for scheme in schemes})
    known = [
        each for each in bits if shape and shape[:-1] == tuple(lead) and num_words(shape[-1], each) == words
    ]
    if not known:
        raise tensors.settings.refused(
            f"{key!r} has shape {there}, and {name + '_shape'!r} says {shape}: these are not as many values "
            f"of {' or '.join(map(str, bits))} bits"
        )
    return shape, known[0]


def num_words(width: int, bits: int) -> int:
    """Number of words that hold so many values."""
    return -(-width * bits // 32)


def _zeros(tensors: Tensors, zeros: str, shape: Ints, bits: int, scales: StoredPart, key: str) -> StoredPart:
    """The zero points, one for each scale: packed along the rows, or one alone."""
    if scales.each is None:
        return StoredPart(tensors.shaped(zeros, tensors.entry(scales_of(zeros)).shape, key, (torch.int8,)))
    down, across = scales.each
    if down != 1:
        raise tensors.settings.refused(f"{zeros!r} belongs to blocks of {down} rows, which is not known")
    if tensors.is_of(zeros, torch.int8):  # not packed, as in early releases
        like = tensors.entry(scales_of(zeros)).shape
        return StoredPart(tensors.shaped(zeros, like, key, (torch.int8,)), scales.each, scales.columns)
    packed = (*shape[:-2], num_words(shape[-2], bits), scales.columns)
    return StoredPart(tensors.shaped(zeros, packed, key, _WORDS), (32 // bits, across), scales.columns)


def scales_of(zeros: str) -> str:
    """Name of the scales that zero points belong to."""
    return zeros.removesuffix("_zero_point") + "_scale"


def _numbers(bits: int, codes: torch.Tensor, count: int) -> torch.Tensor:
    """The first numbers of each row of words."""
    offset = 1 << (bits - 1)
    if bits == 4:
        return of_nibbles(codes, range(-offset, offset))[:, :count]
    return (codes.contiguous().view(torch.uint8).to(torch.float32) - offset)[:, :count]


def _by_rows(
    bits: int, across: int, parts: Mapping[str, torch.Tensor], rows: range, columns: range
) -> torch.Tensor:
    """Values of symmetric schemes, of which no shape was read: the reader of values compares it."""
    return scale(_numbers(bits, parts["codes"], len(columns)), as_scales(parts["scale"]), across)


def _decode(
    name: str,
    shape: Ints,
    bits: int,
    across: int,
    parts: Mapping[str, torch.Tensor],
    rows: range,
    columns: range,
) -> torch.Tensor:
    said = tuple(parts["shape"].reshape(-1).tolist())
    if said != shape:
        raise CheckpointFormatError(f"{name + '_shape'!r} says {said}, and the packed values are {shape}")
    offset = 1 << (bits - 1)
    values = _numbers(bits, parts["codes"], len(columns))
    scales, zeros = as_scales(parts["scale"]), None
    if "zero" in parts:
        zeros = parts["zero"]
        if zeros.dtype == torch.int32:
            height = shape[-2]
            places = torch.tensor([row % height * bits % 32 for row in rows], dtype=torch.int32)
            zeros = (zeros >> places.to(zeros.device)[:, None] & (2 * offset - 1)) - offset
        zeros = zeros.to(torch.float32)
    if "group" in parts:
        groups = parts["group"][columns.start : columns.stop].long()
        if bool((groups == -1).all()):  # the package's word for no order
            groups = torch.arange(columns.start, columns.stop, device=groups.device) // (across or shape[-1])
        if int(groups.min()) < 0 or int(groups.max()) >= scales.shape[-1]:
            raise CheckpointFormatError(f"{name + '_g_idx'!r} names groups that have no scale")
        scales, zeros, across = scales[:, groups], None if zeros is None else zeros[:, groups], 1
    if zeros is not None:
        values = shift(values, zeros, across)
    return scale(values, scales, across)
