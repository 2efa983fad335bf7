"""Refusal of quantised checkpoints, with the way that transformers has to dequantise their format.

A way is named only if the folder that it writes has exactly the values of the quantised one; tests run it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_sft.errors import CheckpointFormatError, UnsupportedModelError, abridged

WITHOUT_A_WORD = "take the model's checkpoint in 16 bits, or write one with the tool that quantised this one"

_PACKED = (torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2)
_SAVE = ".save_pretrained(out, save_original_format=False)"
# By quant_method: what to pass to from_pretrained, and what to call on the model that it returns.
_WAYS = {
    "fp8": ("FineGrainedFP8Config(dequantize=True)", _SAVE),
    "mxfp4": ("Mxfp4Config(dequantize=True)", _SAVE),
    "compressed-tensors": ("CompressedTensorsConfig(run_compressed=False)", ".save_pretrained(out)"),
    "bitsandbytes": ("", f".dequantize(){_SAVE}"),
}
# transformers takes rows // rows of the scale as the block size: an error, or wrong values, if that is wrong.
_ONLY = {
    "fp8": (
        "; right only where the rows and columns of every quantised matrix are multiples of "
        "weight_block_size, which those of DeepSeek-V3 are not"
    )
}


def refuse_quantised(folder: str, config: Any) -> None:
    """Refuse a checkpoint that is quantised according to its config, or to that of a part of it.

    Raises:
        CheckpointFormatError: The message names the format, and the way to write it in 16 bits.
    """
    for settings in _settings_in(config):
        method = _method_of(settings)
        raise CheckpointFormatError(f"{folder} is quantised ({method}): {_way_out(folder, config, method)}")


def refuse_quantised_model(model: nn.Module) -> None:
    """Refuse a model whose weights transformers holds packed, beside the scales that they need.

    Raises:
        UnsupportedModelError: If the model or one within it is quantised; the message names the format, and
            the way to weights in 16 bits.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or not getattr(module, "is_quantized", False):
            continue
        method = _method_of(next(_settings_in(config), {}))
        folder = str(getattr(config, "name_or_path", "") or "folder")
        raise UnsupportedModelError(
            f"the weights of this {type(module).__name__} are quantised ({method}), and cannot be cut, "
            f"trained or exported as they are: {_way_out(folder, config, method)}"
        )


def refuse_packed(missing: list[str], left_over: Mapping[str, torch.dtype]) -> None:
    """Refuse a checkpoint whose missing values are stored packed, under names of a quantised format.

    Args:
        missing: Names of the model's tensors that the checkpoint lacks.
        left_over: Dtypes of the checkpoint's tensors that the model lacks, by name.

    Raises:
        CheckpointFormatError: If the module of a missing value, or one within it, has packed values instead.
    """
    packed = sorted(name for name, dtype in left_over.items() if dtype in _PACKED)
    for name in missing:
        module = name.rpartition(".")[0]
        beside = [key for key in packed if module and key.startswith(f"{module}.")]
        if beside:
            raise CheckpointFormatError(
                f"the checkpoint has no values for {name!r}, but packed ones ({abridged(beside)}): it is "
                f"quantised, and its config does not say how: {WITHOUT_A_WORD}"
            )


def is_scaled(dtype: torch.dtype) -> bool:
    """Whether weights of that dtype need scales that are stored beside them."""
    return dtype.itemsize == 1 or not dtype.is_floating_point


def _settings_in(config: Any) -> Iterator[Any]:
    """The quantisation settings of a config and of the configs within it, as objects or dicts."""
    own = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    # compression_config is of compressed-tensors' first releases.
    for key in ("quantization_config", "compression_config"):
        if own.get(key) is not None:
            yield own[key]
    for name, value in own.items():
        if name.endswith("_config") and (isinstance(value, dict) or hasattr(value, "to_dict")):
            yield from _settings_in(value)


def _method_of(settings: Any) -> str:
    """The format's name in ``quant_method``."""
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    return str(getattr(method, "value", method) or "of a format without quant_method")


def _way_out(folder: str, config: Any, method: str) -> str:
    """How to write a folder of that format in 16 bits."""
    if method not in _WAYS:
        return WITHOUT_A_WORD
    cls = (getattr(config, "architectures", None) or ["AutoModelForCausalLM"])[0]
    settings, calls = _WAYS[method]
    settings = settings and f", quantization_config={settings}"
    return (
        "write it in 16 bits once, with transformers, and load that: "
        f"{cls}.from_pretrained({folder!r}{settings}, dtype=torch.bfloat16){calls}{_ONLY.get(method, '')}"
    )
