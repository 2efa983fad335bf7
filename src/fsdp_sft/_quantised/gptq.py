"""Weights of GPTQ: integers of 2, 4 or 8 bits in a transposed matrix, packed along its rows.

value = (q - z) * s, in float32, which is exact: the scales have 16 bits. Zero points lie along the columns,
and are stored as z - 1 unless the checkpoint's format is gptq_v2. ``g_idx`` assigns rows to groups, in
sequence unless activations gave them an order (``desc_act``).

z - 1 of a zero point 0 is where tools differ. GPTQModel subtracts 1 from all numbers of a word at once, and
so it is added here for its checkpoints. Those of AutoGPTQ have z + 1 for each number, as the kernels of
ExLlama have it: 16 for a stored 15.

Sources: AutoGPTQ 0.7, nn_modules/qlinear/qlinear_cuda_old.py (``pack``, ``forward``); GPTQModel 7.7,
utils/model.py (``convert_gptq_v1_to_v2_format`` and its inverse).
"""

from collections.abc import Iterable, Mapping
from functools import partial

import torch

from fsdp_sft._quantised.method import Method, bits_of_groups
from fsdp_sft._quantised.settings import IN_16_BITS, Settings
from fsdp_sft._quantised.tensors import Tensors
from fsdp_sft._quantised.values import of_words
from fsdp_sft._tensors.packed import StoredPart
from fsdp_sft.errors import CheckpointFormatError

_WORDS = (torch.int32,)


def check(settings: Settings) -> None:
    """Refuse what is not read, by the config alone."""
    _form_of(settings)
    settings.one_of("bits", (2, 4, 8))
    if settings.fields.get("dynamic"):
        raise settings.refused(f"its field dynamic gives modules other bits or groups: {IN_16_BITS}")


def find(tensors: Tensors, keys: Iterable[str]) -> None:
    """Add all weights: ``qweight``, ``qzeros``, ``scales`` and ``g_idx`` of modules."""
    for key in keys:
        if key.endswith(".qweight"):
            _add(tensors, key.removesuffix(".qweight"))


def _add(tensors: Tensors, module: str) -> None:
    key, order = f"{module}.qweight", f"{module}.g_idx"
    settings = tensors.settings
    bits = settings.one_of("bits", (2, 4, 8))
    in_word = 32 // bits
    codes = tensors.take(key, key, _WORDS)
    if len(tensors.matrix(key)) != 2:
        raise settings.refused(f"{key!r} of shape {codes.entry.shape} is no matrix")
    words, width = codes.entry.shape
    height = words * in_word
    if width % in_word:
        raise settings.refused(f"{key!r} has {width} columns, which are not packed in words of {bits} bits")
    ordered = bool(settings.fields.get("desc_act", False))
    group = settings.group_size
    group = height if group == -1 else settings.block(group, "group_size")
    groups = -(-height // group)
    # In an order of their own, rows may belong to any group: the scales of all are read.
    down = 0 if ordered else group
    zeros = tensors.shaped(f"{module}.qzeros", (groups, width // in_word), key, _WORDS)
    scales = tensors.shaped(f"{module}.scales", (groups, width), key)
    parts = {
        "codes": StoredPart(codes, (in_word, 1), width),
        "zero": StoredPart(zeros, (down, in_word), width // in_word),
        "scale": StoredPart(scales, (down, 1), width),
    }
    if ordered or tensors.is_free(order):
        parts["group"] = StoredPart(tensors.shaped(order, (height,), key, (torch.int32, torch.int64)), (1, 0))
    added = 0 if _form_of(settings) == "gptq_v2" else 1
    decode = partial(_decode, order, bits, 0 if ordered else group, groups, added, _is_by_words(settings))
    shape, stored = (width, height), (height, width)
    tensors.add(
        f"{module}.weight", key, f"gptq int{bits}", shape, parts, decode, rows=stored, stride=(1, width)
    )


def _form_of(settings: Settings) -> str:
    """The form in which zero points are stored.

    Raises:
        CheckpointFormatError: If it is none that is read, or two fields differ.
    """
    known = ("gptq", "gptq_v2")
    form = settings.one_of("checkpoint_format", known, settings.fields.get("format") or "gptq")
    if settings.fields.get("format") is not None and settings.one_of("format", known) != form:
        raise settings.refused("its checkpoint_format and its format differ")
    return str(form)


def _is_by_words(settings: Settings) -> bool:
    """Whether 1 was subtracted from all zero points of a word at once, as GPTQModel does."""
    about = settings.fields.get("meta")
    return isinstance(about, Mapping) and "gptqmodel" in str(about.get("quantizer")).lower()


def _decode(
    order: str,
    bits: int,
    group: int,
    groups: int,
    added: int,
    by_words: bool,
    parts: Mapping[str, torch.Tensor],
    rows: range,
    columns: range,
) -> torch.Tensor:
    words = parts["codes"]
    places = torch.tensor([row * bits % 32 for row in rows], dtype=torch.int32, device=words.device)
    values = (words >> places[:, None] & ((1 << bits) - 1)).to(torch.float32)
    scales, zeros = parts["scale"].to(torch.float32), parts["zero"]
    if by_words and added:
        ones = sum(1 << at for at in range(0, 32, bits))
        zeros = of_words(zeros + ones, bits)  # int32 wraps at the end of the word
    else:
        zeros = of_words(zeros, bits).add_(added)
    if "group" in parts:
        of_row = parts["group"][:, 0].long()
        if group:
            in_sequence = torch.arange(rows.start, rows.stop, device=of_row.device) // group
            if of_row.any() and not torch.equal(of_row, in_sequence):  # all zeros stand for no order
                raise CheckpointFormatError(
                    f"{order!r} gives rows an order, and the config says desc_act=false"
                )
        else:
            if int(of_row.min()) < 0 or int(of_row.max()) >= groups:
                raise CheckpointFormatError(f"{order!r} names groups that have no scale")
            scales, zeros = scales[of_row], zeros[of_row]
    return values.sub_(zeros).mul_(scales)


METHOD = Method(check, find, r"\.(qweight|qzeros|scales|g_idx)$", bits_of_groups)
