"""Which stored tensors of a quantised checkpoint belong together, by what there is and what the config says.

Skip lists are not looked at: whether a weight is packed is seen by its dtype and the tensors beside it. Every
scale must belong to a weight, and every packed weight must have its scales, or the checkpoint is refused.
"""

import fnmatch
import re
from collections.abc import Mapping
from contextlib import suppress

import torch

from fsdp_sft._quantised import bitsandbytes, compressed, finegrained, gpt_oss, modelopt
from fsdp_sft._quantised.recipes import RECIPES
from fsdp_sft._quantised.settings import IN_16_BITS, Settings
from fsdp_sft._quantised.tensors import Tensors
from fsdp_sft._tensors.packed import RowFormat
from fsdp_sft._tensors.stored import InFile, Ints, Stored
from fsdp_sft.errors import abridged

METHODS = {
    "bitsandbytes": bitsandbytes.METHOD,
    "compressed-tensors": compressed.METHOD,
    "fbgemm_fp8": finegrained.METHOD,
    "fp8": finegrained.METHOD,
    "modelopt": modelopt.METHOD,
    "mxfp4": gpt_oss.METHOD,
}

# What belongs to activations: training does not use it.
_CACHES = r"[._]([qkv]_(scale|zero_point)|kv_scale)$"
_OF_CACHES = re.compile(_CACHES)
_OF_ACTIVATIONS = re.compile(
    rf"[._](input|output|activation|input_activation)_(scale(_inv)?|zero_point|global_scale)$|{_CACHES}"
)
# What some tool leaves beside a weight, whatever the method.
_OF_ANY = r"weight_(scale|scale_inv|scale_2|packed)$|\.(qweight|weight\.absmax)$"
_SMALL = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def check(settings: Settings) -> None:
    """Refuse a way to quantise that is not read, by the config alone.

    Raises:
        CheckpointFormatError: If it is not; the message names it.
    """
    if settings.method not in METHODS:
        raise settings.refused(
            f"it is not among the methods that are read ({abridged(METHODS, most=len(METHODS))}): "
            f"{IN_16_BITS}; of AWQ and GPTQ the original is on the Hub, the base_model of their cards"
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
    alone = [key for key in left if parts.search(key) or stored[key].entry.dtype in _SMALL]
    if alone:
        raise settings.refused(
            f"{abridged(alone)} belong to no weight that is packed, or have no scales: {IN_16_BITS}"
        )
    return {**{key: stored[key] for key in left}, **tensors.packed}


def rows_by_config(settings: Settings, shape: Ints) -> tuple[RowFormat, bool] | None:
    """The format of a weight's rows, by the config alone, for where there are no files.

    Rows are those of the recipe with as many bits, of other blocks: as many bytes, and the same work.

    Args:
        settings: How the checkpoint is quantised.
        shape: Shape of the weight in the model.

    Returns:
        (the format, whether the weight is transposed); None if it is not packed, or its rows have no bytes of
        their own.
    """
    method = METHODS[settings.method]
    bits = method.bits(settings, len(shape)) if method.bits is not None else 0
    if not bits:
        return None
    width = shape[-2 if method.transposed else -1]
    recipe, codes, scales = ("nf4", 4, 16) if bits < 8 else ("fp8", 8, 32)
    block = int(scales / (bits - codes)) if bits > codes else width
    return RECIPES[recipe].form(width, block), method.transposed


def is_left_out(settings: Settings, module: str) -> bool:
    """Whether a list of the config says that a module has 16 bits; for where there are no files."""
    lists = (settings.fields.get(name) for name in METHODS[settings.method].skips)
    entries = [str(entry) for each in lists if isinstance(each, (list, tuple)) for entry in each]
    return any(_is_within(module, entry) for entry in entries)


def _is_within(module: str, entry: str) -> bool:
    """Whether a module is what an entry of such a list names, or lies in it."""
    if entry.startswith("re:"):
        with suppress(re.error):
            return re.match(entry[3:], module) is not None
    return fnmatch.fnmatch(module, entry) if "*" in entry else f".{entry}." in f".{module}."


def _drop_activations(tensors: Tensors, stored: Mapping[str, InFile]) -> None:
    """Leave out what belongs to the activations of a module that has packed weights."""
    modules = {name[: dot.start()] for name in tensors.packed for dot in re.finditer(r"\.", name)}
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
