"""Parameters that plain transformers keeps in float32 in a 16-bit model, and buffers that it does not."""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from fsdp_sft._compat.models import float32_names
from fsdp_sft._model.twin import meta_twin
from fsdp_sft._model.view import clean_name, named_tensors, slot, transformers_models
from fsdp_sft._process.callers import warn_caller
from fsdp_sft.shard.units import without_indices

_ADAPTED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")


def follow_plain_dtypes(model: nn.Module, dtype: torch.dtype | None, *, warn: bool) -> set[int]:
    """Cast computed buffers as plain transformers does in a 16-bit model; find what it keeps in float32.

    A warning names what it keeps in float32 under float16 alone, and what is tied to something else.

    Args:
        model: Model that is not sharded yet.
        dtype: Dtype in which it will compute.
        warn: Whether to warn.

    Returns:
        The ids of the parameters that are to compute in float32.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return set()
    dtypes, float32 = _plain_dtypes(model, dtype), float32_names(model, dtype)
    for name, tensor in named_tensors(model).items():
        # ``dtypes`` comes from a model that was built. from_pretrained applies the patterns to buffers that
        # it reads too: DeepSeek-V3's e_score_correction_bias is float32 in a plain bfloat16 model.
        is_buffer = not isinstance(tensor, nn.Parameter)
        if is_buffer and dtypes.get(name) == dtype != tensor.dtype and not float32.search(name):
            setattr(*slot(model, name), tensor.to(dtype))
    named = dict(model.named_parameters(remove_duplicate=False))
    names = kept_parameters(model, dtype, named, dtypes)
    others = {id(parameter) for name, parameter in named.items() if name not in names}
    listed = float32_names(model, torch.float16)
    missed = [name for name, parameter in named.items() if id(parameter) in others and listed.search(name)]
    if missed and warn:
        warn_caller(
            f"these modules compute in {dtype}, although transformers lists them in _keep_in_fp32_modules: "
            f"{', '.join(sorted(set(map(without_indices, missed))))} (transformers itself keeps such "
            "modules in float32 under float16 only, or they are tied to others)"
        )
    return {id(named[name]) for name in names} - others


def _plain_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Dtypes in which ``from_pretrained(dtype=dtype)`` leaves floating-point tensors, by name.

    Tensors of a model that cannot be built a second time are left out.
    """
    dtypes: dict[str, torch.dtype] = {}
    for prefix, inner in transformers_models(model):
        try:
            twin = named_tensors(meta_twin(inner, dtype))
        except Exception:  # a class that changes its config, or needs more than the config
            continue
        for name, tensor in named_tensors(inner).items():
            other = twin.get(_ADAPTED.sub("", clean_name(name)))
            if other is not None and other.is_floating_point() and tensor.is_floating_point():
                dtypes[prefix + name] = other.dtype
    return dtypes


def kept_parameters(
    model: nn.Module, dtype: torch.dtype, names: Iterable[str], dtypes: Mapping[str, torch.dtype]
) -> set[str]:
    """Those of the names of parameters that transformers keeps in float32 in a model of a 16-bit dtype.

    The class lists some; others it makes float32 when it is built, which ``dtypes`` (of parameters of a model
    that was built in that dtype, by name) shows.
    """
    listed = float32_names(model, dtype)
    return {name for name in names if dtypes.get(name) == torch.float32 or listed.search(name)}
