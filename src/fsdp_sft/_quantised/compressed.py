"""Checkpoints of compressed-tensors: each group of modules has a scheme, and the tensors show whose it is.

Source: compressed_tensors/quantization (``quant_args.py``, ``quant_config.py``).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fsdp_sft._quantised import elements, fp4, packs
from fsdp_sft._quantised.method import Entries, Method
from fsdp_sft._quantised.settings import IN_16_BITS, Settings
from fsdp_sft._quantised.tensors import Tensors
from fsdp_sft._tensors.pieces import Ints

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
        packs.Scheme(
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
            packs.find(tensors, name, integers)
        elif name != key and dtype == torch.uint8:
            scales, whole = f"{name}_scale", f"{name}_global_scale"
            if tensors.is_free(whole) or tensors.is_of(scales, torch.float8_e4m3fn):
                fp4.find_nv(tensors, name, key, scales, whole, divide=True)
            else:
                fp4.find_mx(tensors, name, key, scales)
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
            return fp4.nv_row(width, names["packed"], names["scale"], names["global_scale"])
        return fp4.mx_row(width, names["packed"], names["scale"])
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
    words = (1, packs.num_words(width, number))
    return {names["packed"]: (torch.int32, words), **scales, names["shape"]: (torch.int64, (2,))}


METHOD = Method(
    check,
    find,
    r"_packed$|weight_(scale|global_scale|zero_point|shape|g_idx)$",
    bits,
    stored_as=stored_as,
    skips=("ignore",),
)
