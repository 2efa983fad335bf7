"""Checkpoints of compressed-tensors: each group of modules has a scheme, and the tensors show whose it is.

Source: compressed_tensors/quantization (``quant_args.py``, ``quant_config.py``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fsdp_sft._quantised import elements
from fsdp_sft._quantised.settings import IN_16_BITS, Settings
from fsdp_sft._quantised.tensors import Entries, Method, Tensors
from fsdp_sft._quantised.values import as_scales, of_nibbles, scale, shift
from fsdp_sft._tensors.packed import StoredPart
from fsdp_sft._tensors.stored import Ints
from fsdp_sft.errors import CheckpointFormatError

_PACKED = "_packed"
_ORDERED = (True, "group", "dynamic")  # values of actorder that are stored with an index of groups
_FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)


def check(settings: Settings) -> None:
    """Refuse what no reader reads, by the config alone."""
    settings.one_of("format", _FORMATS, "mixed-precision")
    sparse = settings.fields.get("sparsity_config") or {}
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        raise settings.refused(f"sparsity_config.format={sparse['format']!r:.80} is not read: {IN_16_BITS}")
    transform = settings.fields.get("transform_config") or {}
    if not isinstance(transform, Mapping) or transform.get("config_groups"):
        raise settings.refused(f"transform_config rotates weights and activations: {IN_16_BITS}")
    for scheme in _schemes(settings):
        if type(scheme.get("num_bits")) is not int or not 0 < scheme["num_bits"] <= 16:
            raise settings.refused(f"num_bits={scheme.get('num_bits')!r:.80} is no number of bits")
        _block(settings, scheme)


def find(tensors: Tensors, keys: Iterable[str]) -> None:
    """Add all weights that are packed, or have scales."""
    schemes = _schemes(tensors.settings)
    integers = [
        Scheme(
            s["num_bits"],
            _block(tensors.settings, s),
            symmetric=bool(s.get("symmetric", True)),
            ordered=s.get("actorder") in _ORDERED,
        )
        for s in schemes
        if s.get("type", "int") == "int" and s.get("num_bits") in (4, 8)
    ]
    for key in keys:
        if not tensors.is_free(key):
            continue
        dtype, name = tensors.entry(key).dtype, key.removesuffix(_PACKED)
        if name != key and dtype == torch.int32:
            _find_packed(tensors, name, integers)
        elif name != key and dtype == torch.uint8:
            scales, whole = f"{name}_scale", f"{name}_global_scale"
            if tensors.is_free(whole) or tensors.is_of(scales, torch.float8_e4m3fn):
                elements.find_nv(tensors, name, key, scales, whole, divide=True)
            else:
                elements.find_mx(tensors, name, key, scales)
        elif dtype in (*elements.FLOATS, torch.int8) and tensors.is_free(f"{key}_scale"):
            # Of 4 bits too: W4A8 and W4AFP8 have them in whole bytes.
            kind, zeros = "float" if dtype in elements.FLOATS else "int", f"{key}_zero_point"
            stored = [s for s in schemes if s.get("type", "int") == kind and s["num_bits"] <= 8]
            blocks = [_block(tensors.settings, s) for s in stored]
            elements.find(tensors, key, f"{key}_scale", blocks, zeros if tensors.is_free(zeros) else None)


def bits(settings: Settings) -> float:
    """Bits of a packed value with its share of the scales, by the first scheme."""
    scheme = next(iter(_schemes(settings)), {"num_bits": 8})
    block, width = _block(settings, scheme), 8 if _is_in_bytes(settings) else scheme.get("num_bits", 8)
    shared = block[0] * block[1] if block else 0
    return float(width + (8 if scheme.get("type") == "float" else 16) / shared) if shared else float(width)


def _is_in_bytes(settings: Settings) -> bool:
    """Whether integers have a byte each, however few bits they use."""
    return settings.fields.get("format") == "int-quantized"


def _schemes(settings: Settings) -> list[Mapping[str, Any]]:
    """How the weights of each group of modules are quantised."""
    groups = settings.fields.get("config_groups") or {}
    found = (
        [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    return [weights for weights in found if isinstance(weights, Mapping)]


def _block(settings: Settings, scheme: Mapping[str, Any]) -> Ints | None:
    """Number of (rows, columns) that share a scale; see ``Tensors.grid``."""
    strategy = getattr(scheme.get("strategy"), "value", scheme.get("strategy"))
    group = scheme.get("group_size")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if strategy == "tensor":
        return None
    if strategy in ("channel", "token"):
        return (1, 0)
    if strategy in ("group", "tensor_group"):
        return (1, settings.block(group, "group_size"))
    if strategy == "block":
        structure = scheme.get("block_structure")
        if isinstance(structure, (list, tuple)) and len(structure) == 2:
            down, across = (settings.block(each, "block_structure") for each in structure)
            return (down, across)
    raise settings.refused(f"the strategy {strategy!r:.80} of a group of weights is not known: {IN_16_BITS}")


def stored_as(settings: Settings, shape: Ints) -> Entries | None:
    """One row by the first scheme; scales of 16 bits where a format does not say their dtype."""
    schemes, width = _schemes(settings), shape[-1]
    if not schemes:
        return None
    scheme, block = schemes[0], _block(settings, schemes[0])
    is_float, number = scheme.get("type", "int") == "float", scheme["num_bits"]
    names = {part: f"w.weight_{part}" for part in ("packed", "scale", "global_scale", "shape")}
    if is_float and number == 4:
        if block is not None and block[1] == 16:
            return elements.nv_row(width, names["packed"], names["scale"], names["global_scale"])
        return elements.mx_row(width, names["packed"], names["scale"])
    across = block[1] or width if block is not None else 0
    grid = (1, -(-width // across)) if across else (1,)
    of_scales = torch.uint8 if settings.fields.get("format") == "mxfp8-quantized" else torch.bfloat16
    scales = {names["scale"]: (of_scales, grid)}
    if _is_in_bytes(settings) or (
        number == 8 and (is_float or settings.fields.get("format") != "pack-quantized")
    ):
        return {"w.weight": (torch.float8_e4m3fn if is_float else torch.int8, (1, width)), **scales}
    if is_float or number not in (4, 8) or not scheme.get("symmetric", True):
        return None
    if scheme.get("actorder") in _ORDERED or block is None or not block[1]:
        return None  # scales of whole rows do not say how many columns there are: a stored tensor does
    words = (1, num_words(width, number))
    return {names["packed"]: (torch.int32, words), **scales, names["shape"]: (torch.int64, (2,))}


METHOD = Method(
    check,
    find,
    r"_packed$|weight_(scale|global_scale|zero_point|shape|g_idx)$",
    bits,
    stored_as=stored_as,
    skips=("ignore",),
)


# Weights that compressed-tensors packs as integers of 4 or 8 bits, along the columns.
#
# value = (q - z) * s, in float32, which is exact where the scales have 16 bits; the package itself rounds to
# the scales' dtype. q and z are stored with 2^(bits - 1) added, in words of 32 bits, the lowest first. Zero
# points z, of asymmetric schemes alone, are packed along the rows. ``weight_g_idx`` assigns columns to
# groups.
#
# Source: compressed_tensors/compressors/pack_quantized (``helpers.py``, ``base.py``).

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


def _find_packed(tensors: Tensors, name: str, schemes: Sequence[Scheme]) -> None:
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
