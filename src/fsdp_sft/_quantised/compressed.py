"""Checkpoints of compressed-tensors: each group of modules has a scheme, and the tensors show whose it is.

Integers have 4 bits and are packed along the columns: value = q * s, in float32, which is exact where the
scales have 16 bits; the package itself rounds to the scales' dtype. q is stored with 8 added, in words of 32
bits, the lowest first.

Sources: compressed_tensors/quantization (``quant_args.py``, ``quant_config.py``);
compressed_tensors/compressors/pack_quantized (``helpers.py``, ``base.py``).
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from fsdp_sft._quantised import elements
from fsdp_sft._quantised.settings import IN_16_BITS, Settings
from fsdp_sft._quantised.tensors import Method, Tensors
from fsdp_sft._quantised.values import as_scales, of_nibbles, scale
from fsdp_sft._tensors.packed import StoredPart
from fsdp_sft._tensors.stored import Ints

_PACKED = "_packed"
_ORDERED = (True, "group", "dynamic")  # values of actorder by which columns are stored in another order
_FORMATS = (
    "dense",
    "float-quantized",
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
        _block(settings, scheme)
        said = (scheme.get("num_bits"), scheme.get("symmetric", True), scheme.get("actorder") in _ORDERED)
        if _is_integer(scheme) and said != (4, True, False):
            raise settings.refused(
                "of integers only those of 4 bits are read, without zero points and without an order of "
                f"columns, and these have num_bits={said[0]!r:.80}, symmetric={said[1]!r:.80}, "
                f"actorder={scheme.get('actorder')!r:.80}: {IN_16_BITS}"
            )


def find(tensors: Tensors, keys: Iterable[str]) -> None:
    """Add all weights that are packed, or have scales."""
    blocks: dict[bool, list[Ints | None]] = {True: [], False: []}  # by whether values are integers
    for scheme in _schemes(tensors.settings):
        blocks[_is_integer(scheme)].append(_block(tensors.settings, scheme))
    for key in keys:
        if not tensors.is_free(key):
            continue
        dtype, name = tensors.stored[key].entry.dtype, key.removesuffix(_PACKED)
        if name != key and dtype == torch.int32:
            _find_int4(tensors, name, blocks[True])
        elif name != key and dtype == torch.uint8:
            scales, whole = f"{name}_scale", f"{name}_global_scale"
            if tensors.is_free(whole) or tensors.is_of(scales, torch.float8_e4m3fn):
                elements.find_nv(tensors, name, key, scales, whole, divide=True)
            else:
                elements.find_mx(tensors, name, key, scales)
        elif dtype in elements.FLOATS and tensors.is_free(f"{key}_scale"):
            elements.find(tensors, key, f"{key}_scale", blocks[False])


def _find_int4(tensors: Tensors, name: str, blocks: list[Ints | None]) -> None:
    """Add one weight of integers: ``<name>_packed``, ``_scale`` and ``_shape``."""
    key = f"{name}_packed"
    *lead, words = tensors.matrix(key)
    stored = tensors.take(key, key, (torch.int32,))
    # The words say it too: a model with 384 experts has 70,000 shapes, each a read of its own.
    tensors.shaped(f"{name}_shape", (len(lead) + 1,), key, (torch.int64, torch.int32))
    shape = (*lead, 8 * words)
    scales, layout = tensors.grid(f"{name}_scale", shape, blocks, key)
    parts = {"codes": StoredPart(stored, (1, 8), words), "scale": scales}
    decode = partial(_int4, (scales.each or (0, 0))[1])
    tensors.add(name, key, f"int4 {layout}", shape, parts, decode, by_rows=decode)


def _int4(across: int, parts: Mapping[str, torch.Tensor], rows: range, columns: range) -> torch.Tensor:
    return scale(of_nibbles(parts["codes"], range(-8, 8)), as_scales(parts["scale"]), across)


def bits(settings: Settings, dims: int) -> float:
    """Bits of a value in a row, by the first scheme; scales of 16 bits where it does not say their dtype."""
    schemes = _schemes(settings)
    if not schemes:
        return 0
    down, across = _block(settings, schemes[0]) or (0, 0)
    of_scale = 8 if down == 1 and not _is_integer(schemes[0]) else 16
    return float(schemes[0].get("num_bits", 8)) + (of_scale / across if across else 0)


def _is_integer(scheme: Mapping[str, Any]) -> bool:
    return bool(scheme.get("type", "int") == "int")


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


METHOD = Method(
    check,
    find,
    r"_packed$|weight_(scale|global_scale|zero_point|shape|g_idx)$",
    bits,
    skips=("ignore",),
)
