"""Checkpoints of NVIDIA's ModelOpt: FP8 and NVFP4, told apart by the tensors.

Source: modelopt/torch/export (``convert_hf_config.py``, ``unified_export_hf.py``).
"""

from collections.abc import Iterable

import torch

from fsdp_sft._quantised import elements
from fsdp_sft._quantised.settings import Settings
from fsdp_sft._quantised.tensors import Method, Tensors

_ALGORITHMS = ("fp8", "fp8_per_channel_per_token", "mixed_precision", "mxfp8", "nvfp4", "w4a16_nvfp4")


def check(settings: Settings) -> None:
    """Refuse what no reader reads, by the config alone."""
    settings.one_of("quant_algo", _ALGORITHMS)


def find(tensors: Tensors, keys: Iterable[str]) -> None:
    """Add all weights that have scales."""
    for key in keys:
        if not (tensors.is_free(key) and tensors.is_free(f"{key}_scale")):
            continue
        dtype = tensors.stored[key].entry.dtype
        if dtype == torch.uint8:
            elements.find_nv(tensors, key, key, f"{key}_scale", f"{key}_scale_2", divide=False)
        elif dtype in elements.FLOATS:
            elements.find(tensors, key, f"{key}_scale", [None, (1, 0), (1, 32)])


def bits(settings: Settings, dims: int) -> float:
    """Bits of a value in a row, of the only algorithm that the config names."""
    algorithm = str(settings.fields.get("quant_algo")).lower()
    return 4.5 if "nvfp4" in algorithm else 8.25 if algorithm == "mxfp8" else 8


METHOD = Method(
    check,
    find,
    r"weight_scale(_2)?$|\.pre_quant_scale$|svdquant_",
    bits,
    skips=("ignore", "exclude_modules"),
)
