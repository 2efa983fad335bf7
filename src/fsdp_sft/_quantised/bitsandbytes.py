"""Weights of bitsandbytes in 4 bits (NF4, FP4): codes of a table in the file, the high half of a byte first.

The matrix is flattened: a scale (``absmax``) belongs to 64 values in a row, and where scales are packed too,
one of float32 to 256 of these. value = table[q] * a, where a = nested_table[absmax] * nested_absmax +
nested_offset, all in float32 and in this order.

Source: bitsandbytes/functional.py (``QuantState``, ``dequantize_4bit``, ``dequantize_blockwise``).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fsdp_sft._process.bounds import check_sizes, parse_json
from fsdp_sft._quantised.settings import IN_16_BITS, Settings
from fsdp_sft._quantised.tensors import Method, Tensors
from fsdp_sft._quantised.values import of_nibbles, scale
from fsdp_sft._tensors.packed import StoredPart

_STATE = ".quant_state.bitsandbytes__"
_FLOAT = (torch.float32,)
_STORAGE = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)  # bnb_4bit_quant_storage
_MAX_OFFSET = 3e38


def check(settings: Settings) -> None:
    """Refuse what is not read, by the config alone."""
    if not (settings.fields.get("load_in_4bit") or settings.fields.get("_load_in_4bit")):
        raise settings.refused(f"load_in_4bit is not set, and 8 bits are not read: {IN_16_BITS}")


def find(tensors: Tensors, keys: Iterable[str]) -> None:
    """Add all weights that have scales."""
    for key in keys:
        if tensors.is_free(f"{key}.absmax"):
            _add(tensors, key)


def _add(tensors: Tensors, key: str) -> None:
    """Add one such weight: the tensor ``key`` of bytes, and those whose names begin with its name."""
    settings = tensors.settings
    stated = tensors.first(f"{key}{_STATE}{kind}" for kind in ("nf4", "fp4"))
    if stated is None:
        raise settings.refused(f"{key!r} is packed, and {key + _STATE!r}nf4, which it needs, is not there")
    codes = tensors.take(key, key, _STORAGE)
    # The same bytes, whichever dtype names them: FSDP1 wanted that of the other weights.
    size, item = codes.entry.num_bytes, codes.entry.dtype.itemsize
    codes = replace(codes, entry=replace(codes.entry, dtype=torch.uint8, shape=(size, 1)))
    tensors.take(stated, key, (torch.uint8,))
    state = _state(tensors, stated)
    shape, block = state["shape"], settings.block(state.get("blocksize"), f"blocksize of {stated}")
    count = math.prod(shape)
    if len(shape) < 2 or not -(-count // 2) <= size < -(-count // 2) + item or block % 2:
        raise settings.refused(
            f"{key!r} has {size} bytes, which does not hold the {shape} values that {stated!r} "
            f"names, in blocks of {block}"
        )
    blocks = -(-count // block)
    parts = {
        "codes": StoredPart(codes, (1, 2), -(-count // 2)),
        "table": StoredPart(tensors.shaped(f"{key}.quant_map", (16,), key, _FLOAT)),
    }
    nested = 0
    if tensors.is_free(f"{key}.nested_absmax"):
        nested = settings.block(state.get("nested_blocksize"), f"nested_blocksize of {stated}")
        absmax = tensors.shaped(f"{key}.absmax", (blocks,), key, (torch.uint8,))
        outer = tensors.shaped(f"{key}.nested_absmax", (-(-blocks // nested),), key, _FLOAT)
        parts["outer"] = StoredPart(outer, (1, block * nested), -(-blocks // nested))
        parts["outer_table"] = StoredPart(tensors.shaped(f"{key}.nested_quant_map", (256,), key, _FLOAT))
    else:
        if tensors.stored[f"{key}.absmax"].entry.dtype == torch.bfloat16:
            raise settings.refused(
                f"the scales of {key!r} are bfloat16 and in another order: bitsandbytes 0.50 changes them in "
                "the first forward on a CPU, and its own reader then gives other weights. Quantise the "
                "checkpoint again, and save it before any forward"
            )
        absmax = tensors.shaped(f"{key}.absmax", (blocks,), key, _FLOAT)
    parts["absmax"] = StoredPart(absmax, (1, block), blocks)
    offset: Any = state.get("nested_offset") if nested else 0.0
    if type(offset) not in (int, float) or not abs(offset) < _MAX_OFFSET:
        raise settings.refused(f"nested_offset={offset!s:.80} of {stated!r} is no number")
    decode = partial(_decode, block, nested, float(offset))
    tensors.add(key, key, stated.rpartition("__")[2], shape, parts, decode, rows=(1, count))


def _state(tensors: Tensors, key: str) -> dict[str, Any]:
    """What the JSON in a tensor says of another one."""
    try:
        state = parse_json(bytes(tensors.read(key).reshape(-1).tolist()), "it")
        return {**state, "shape": check_sizes(state["shape"], "shape")}
    except (KeyError, TypeError, ValueError) as error:
        raise tensors.settings.refused(f"{key!r} does not say how values are packed: {error}") from None


def _decode(
    block: int, nested: int, offset: float, parts: Mapping[str, torch.Tensor], rows: range, columns: range
) -> torch.Tensor:
    absmax = parts["absmax"]
    if nested:
        absmax = torch.nn.functional.embedding(absmax.int(), parts["outer_table"][:, None])[..., 0]
        absmax = scale(absmax, parts["outer"], nested) + offset
    values = of_nibbles(parts["codes"], parts["table"], low_first=False)
    return scale(values[:, : len(columns)], absmax, block)


METHOD = Method(
    check,
    find,
    r"\.(absmax|quant_map|nested_absmax|nested_quant_map|SCB)$|\.quant_state\.",
    skips=("llm_int8_skip_modules",),
)
