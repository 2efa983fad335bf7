"""Which stored tensors of a quantised checkpoint belong together, by what there is and what the config says.

Skip lists are not looked at: whether a weight is packed is seen by its dtype and the tensors beside it. Every
scale must belong to a weight, and every packed weight must have its scales, or the checkpoint is refused.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from fsdp_sft._quantised import awq, bitsandbytes, compressed, finegrained, fp4, gptq, modelopt
from fsdp_sft._quantised.settings import IN_16_BITS, Settings
from fsdp_sft._quantised.tensors import Tensors
from fsdp_sft._tensors.stored import InFile, Stored
from fsdp_sft.errors import abridged


@dataclass(frozen=True)
class Method:
    """A way to quantise, under the name that configs have for it.

    Attributes:
        check: Refuses what is not read, by the config alone.
        find: Adds the weights among some stored tensors.
        parts: Pattern of the names that tensors of packed weights have, and no others.
        bits: Bits that a packed value takes with its share of the scales, by the config.
        only_experts: Whether none but the weights of experts are packed.
    """

    check: Callable[[Settings], None]
    find: Callable[[Tensors, Iterable[str]], None]
    parts: str
    bits: Callable[[Settings], float]
    only_experts: bool = False


def _gpt_oss(tensors: Tensors, keys: Iterable[str]) -> None:
    for key in keys:
        name = key.removesuffix("_blocks")
        if name != key and tensors.is_free(key) and tensors.entry(key).dtype == torch.uint8:
            fp4.find_experts(tensors, name, key, f"{name}_scales")


def _bitsandbytes(tensors: Tensors, keys: Iterable[str]) -> None:
    for key in keys:
        if tensors.is_free(f"{key}.absmax"):
            bitsandbytes.find(tensors, key)


def _awq(tensors: Tensors, keys: Iterable[str]) -> None:
    for key in keys:
        if key.endswith(".qweight"):
            awq.find(tensors, key.removesuffix(".qweight"))


def _gptq(tensors: Tensors, keys: Iterable[str]) -> None:
    for key in keys:
        if key.endswith(".qweight"):
            gptq.find(tensors, key.removesuffix(".qweight"))


def _check_awq(settings: Settings) -> None:
    settings.one_of("version", ("gemm",), "gemm")
    settings.one_of("bits" if "bits" in settings.fields else "w_bit", (4,), 4)


def _check_gptq(settings: Settings) -> None:
    gptq.form_of(settings)
    settings.one_of("bits", (2, 4, 8))
    if settings.fields.get("dynamic"):
        raise settings.refused(f"its field dynamic gives modules other bits or groups: {IN_16_BITS}")


def _check_bitsandbytes(settings: Settings) -> None:
    if not (settings.fields.get("load_in_4bit") or settings.fields.get("_load_in_4bit")):
        raise settings.refused(f"load_in_4bit is not set, and 8 bits are not read: {IN_16_BITS}")


def _bits_of_groups(settings: Settings) -> float:
    """With a scale of 16 bits and a zero point for each group."""
    bits, group = settings.fields.get("bits") or 4, settings.group_size
    return float(bits) if group == -1 else bits + (16 + bits) / settings.block(group, "group_size")


_FP8 = r"weight_scale(_inv)?$|_scale_inv$"
METHODS = {
    "awq": Method(_check_awq, _awq, r"\.(qweight|qzeros|scales)$", _bits_of_groups),
    "bitsandbytes": Method(
        _check_bitsandbytes,
        _bitsandbytes,
        r"\.(absmax|quant_map|nested_absmax|nested_quant_map|SCB)$|\.quant_state\.",
        lambda settings: 4 + 8 / 64 + 32 / (64 * 256),
    ),
    "compressed-tensors": Method(
        compressed.check,
        compressed.find,
        r"_packed$|weight_(scale|global_scale|zero_point|shape|g_idx)$",
        compressed.bits,
    ),
    "fbgemm_fp8": Method(finegrained.check, finegrained.find, _FP8, lambda settings: 8),
    "fp8": Method(finegrained.check, finegrained.find, _FP8, lambda settings: 8),
    "gptq": Method(_check_gptq, _gptq, r"\.(qweight|qzeros|scales|g_idx)$", _bits_of_groups),
    "modelopt": Method(
        modelopt.check, modelopt.find, r"weight_scale(_2)?$|\.pre_quant_scale$|svdquant_", modelopt.bits
    ),
    "mxfp4": Method(
        lambda settings: None, _gpt_oss, r"_(blocks|scales)$", lambda settings: 4.25, only_experts=True
    ),
}

# What belongs to activations: training does not use it.
_OF_ACTIVATIONS = re.compile(
    r"[._]((input|output|activation|input_activation)_(scale(_inv)?|zero_point|global_scale)"
    r"|[qkv]_(scale|zero_point)|kv_scale)$"
)
_OF_CACHES = re.compile(r"[._]([qkv]_(scale|zero_point)|kv_scale|[kv]_proj\.output_scale)$")
# What some tool leaves beside a weight, whatever the method.
_OF_ANY = r"weight_(scale|scale_inv|scale_2|packed)$|\.(qweight|weight\.absmax)$"
_ONE_BYTE = (torch.uint8, torch.int8, torch.int32)


def check(settings: Settings) -> None:
    """Refuse a way to quantise that is not read, by the config alone.

    Raises:
        CheckpointFormatError: If it is not; the message names it.
    """
    if settings.method not in METHODS:
        raise settings.refused(
            f"it is not among the methods that are read ({abridged(METHODS, most=len(METHODS))}): "
            f"{IN_16_BITS}"
        )
    METHODS[settings.method].check(settings)


def published(stored: Mapping[str, InFile], settings: Settings) -> dict[str, Stored]:
    """The tensors of a quantised checkpoint by the names, and in the shapes, of one in 16 bits.

    Args:
        stored: Its tensors as they are stored, by name.
        settings: How it is quantised, according to its config.

    Raises:
        CheckpointFormatError: If it is quantised in a way that is not read, or a tensor is missing, left
            over, or of a shape that does not go with the others; the message names it.
    """
    check(settings)
    tensors = Tensors(stored, settings)
    METHODS[settings.method].find(tensors, list(stored))
    _drop_activations(tensors, stored)
    left = [key for key in stored if key not in tensors.used]
    parts = re.compile(f"{METHODS[settings.method].parts}|{_OF_ANY}")
    scales = [key for key in left if parts.search(key)]
    if scales:
        raise settings.refused(f"{abridged(scales)} belong to no weight that is packed: {IN_16_BITS}")
    for key in left:
        dtype = stored[key].entry.dtype
        small = dtype.is_floating_point and dtype.itemsize == 1
        if small or (dtype in _ONE_BYTE and key.endswith(".weight")):
            raise settings.refused(f"{key!r} is stored as {dtype}, and there are no scales for it")
    return {**{key: stored[key] for key in left}, **tensors.packed}


def _drop_activations(tensors: Tensors, stored: Mapping[str, InFile]) -> None:
    """Leave out what belongs to the activations of a module that has packed weights."""
    modules = {name[:at] for name in tensors.packed for at in _dots(name)}
    fields = tensors.settings.fields
    caches = any(fields.get(name) for name in ("kv_cache_scheme", "kv_cache_quant_algo"))
    for key in stored:
        if caches and _OF_CACHES.search(key) and tensors.is_free(key):
            tensors.used[key] = "the cache"
        found = _OF_ACTIVATIONS.search(key)
        if (
            found
            and key not in tensors.used
            and (key[: found.start()] in modules or key[: found.start()] in tensors.packed)
        ):
            tensors.used[key] = "activations"


def _dots(name: str) -> list[int]:
    return [at for at, character in enumerate(name) if character == "."]
