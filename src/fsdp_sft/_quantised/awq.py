"""Weights of AWQ: integers of 4 bits in a transposed matrix, eight columns to a word in an order of its own.

value = (q - z) * s, in float32, which is exact: the scales have 16 bits.

Source: AutoAWQ 0.2.9, awq/modules/linear/gemm.py (``from_linear``) and awq/utils/packing_utils.py.
"""

from collections.abc import Iterable, Mapping

import torch

from fsdp_sft._quantised.method import Method, bits_of_groups
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._quantised.tensors import Tensors
from fsdp_sft._quantised.values import of_nibbles
from fsdp_sft._tensors.packed import StoredPart

_WORDS = (torch.int32,)
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of columns 0, 1, 2, ... in a word


def check(settings: Settings) -> None:
    """Refuse what is not read, by the config alone."""
    settings.one_of("version", ("gemm",), "gemm")
    settings.one_of("bits" if "bits" in settings.fields else "w_bit", (4,), 4)


def find(tensors: Tensors, keys: Iterable[str]) -> None:
    """Add all weights: ``qweight``, ``qzeros`` and ``scales`` of modules."""
    for key in keys:
        if key.endswith(".qweight"):
            _add(tensors, key.removesuffix(".qweight"))


def _add(tensors: Tensors, module: str) -> None:
    key = f"{module}.qweight"
    codes = tensors.take(key, key, _WORDS)
    if len(tensors.matrix(key)) != 2:
        raise tensors.settings.refused(f"{key!r} of shape {codes.entry.shape} is no matrix")
    height, words = codes.entry.shape
    width = words * 8
    group = tensors.settings.group_size
    group = height if group == -1 else tensors.settings.block(group, "group_size")
    groups = -(-height // group)
    zeros = tensors.shaped(f"{module}.qzeros", (groups, words), key, _WORDS)
    scales = tensors.shaped(f"{module}.scales", (groups, width), key)
    parts = {
        "codes": StoredPart(codes, (1, 8), words),
        "zero": StoredPart(zeros, (group, 8), words),
        "scale": StoredPart(scales, (group, 1), width),
    }
    shape, stored = (width, height), (height, width)
    tensors.add(f"{module}.weight", key, "awq int4", shape, parts, _decode, rows=stored, stride=(1, width))


def _decode(parts: Mapping[str, torch.Tensor], rows: range, columns: range) -> torch.Tensor:
    values, zeros = _numbers(parts["codes"]), _numbers(parts["zero"])
    return values.sub_(zeros).mul_(parts["scale"].to(torch.float32))


def _numbers(words: torch.Tensor) -> torch.Tensor:
    """The numbers of each word in the order of their columns."""
    ordered = torch.zeros_like(words)
    for column, place in enumerate(_PLACES):
        ordered |= (words >> 4 * place & 15) << 4 * column
    return of_nibbles(ordered, range(16))


METHOD = Method(check, find, r"\.(qweight|qzeros|scales)$", bits_of_groups, skips=("modules_to_not_convert",))
