"""Models of the same class and config on the meta device."""

import copy
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.models import build_like_from_pretrained, original_class
from fsdp_sft._model.wrappers import unwrapped


def meta_twin(model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """A second model of the same class and config: unsharded, untied, on the meta device.

    A sharded model will not do: transformers finds conversions by the name of the class, which FSDP2
    replaces; and computed buffers come from the model's own initialisation, which would overwrite sharded
    parameters.

    Args:
        model: A transformers model.
        dtype: Dtype of the twin; None takes that of the config.
    """
    config: Any = copy.deepcopy(model.config)
    if dtype is None:
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return build_like_from_pretrained(original_class(model), config, dtype)


def tied_meta_twin(model: Any, config: Any = None) -> nn.Module:
    """A second model of the same class on the meta device, with weights tied as the config says.

    Args:
        model: A transformers model.
        config: Config of the twin; None takes that of the model.
    """
    with torch.device("meta"):
        return original_class(model)(copy.deepcopy(model.config if config is None else config))


def text_config(model: nn.Module) -> Any:
    """The config of the part of a model that reads text; None for a model without a config."""
    config: Any = getattr(unwrapped(model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def rotations_by_length(model: nn.Module) -> dict[str, nn.Module]:
    """Rotary embeddings that depend on the longest row of a batch (dynamic NTK, LongRoPE), by name."""
    found = {}
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                found[name] = module
    return found
