"""A model's config: twins on the meta device, what it says of text, its changes, and what is quantised."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.models import build_like_from_pretrained
from fsdp_sft._model.view import original_class, record_of, unwrapped
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._quantised.find import METHODS
from fsdp_sft._quantised.settings import IN_16_BITS, settings_of
from fsdp_sft.errors import UnsupportedModelError, abridged

# Fields that change no logits, or that modules read whenever they compute.
_AT_WILL = re.compile(
    r"^_|token_id|dtype|drop|loss|_coef$|label|^(output|return|tie)_|^(use_cache|architectures|auto_map"
    r"|transformers_version|problem_type|task_specific_params|quantization_config|vocab_size)$"
)


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
    of_config = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return build_like_from_pretrained(original_class(model), config, dtype or of_config)


def tied_meta_twin(model: Any, config: Any = None) -> nn.Module:
    """A second model of the same class on the meta device, with weights tied as the config says.

    Args:
        model: A transformers model.
        config: Config of the twin; None takes that of the model.
    """
    with torch.device("meta"):
        return original_class(model)(copy.deepcopy(model.config if config is None else config))


# Fields of configs that count the layers behind the last one, which predict further tokens (MTP).
MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def text_config(model: nn.Module) -> Any:
    """The config of the part of a model that reads text; None for a model without a config."""
    config: Any = getattr(unwrapped(model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def rotations_by_length(model: nn.Module) -> dict[str, nn.Module]:
    """Rotary embeddings that depend on the longest row of a batch (dynamic NTK, LongRoPE), by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if re.search("dynamic|longrope", str(getattr(module, "rope_type", "")))
    }


def keep_config(base: Any) -> None:
    """Keep the fields of a model's config at the first call, and at later ones warn of what has changed.

    Modules take their numbers out of a config when they are made, and files are written from it.

    Args:
        base: The model, without wrappers and adapters around it.
    """
    if not hasattr(getattr(base, "config", None), "to_dict"):
        return
    fields, record = base.config.to_dict(), record_of(base)
    if record.config is None:
        record.config = fields
    elif changed := list(_changed(record.config, fields)):
        warn_caller(
            f"{abridged(changed)} of the model's config changed after the model was built, and it goes on "
            "with what it was built with: an export would say the new values, and compute another thing than "
            "was trained. Pass them where the model is built, as build_meta_model(path, "
            "rope_parameters=...), or set them back"
        )


def _changed(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Names of fields, also of configs within, that are not what they were, unless they may change."""
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if name.endswith("_config") and isinstance(before, dict) and isinstance(after, dict):
            yield from (f"{name}.{inner}" for inner in _changed(before, after))
        elif before != after and not _AT_WILL.search(name):
            yield name


def refuse_quantised_model(model: nn.Module) -> None:
    """Refuse a model whose weights transformers holds packed, beside the scales that they need.

    Raises:
        UnsupportedModelError: If the model or one within it is quantised; the message names the format, and
            how to have its weights in 16 or 32 bits.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or not getattr(module, "is_quantized", False):
            continue
        folder = str(getattr(config, "name_or_path", "") or "folder")
        settings = settings_of(folder, config)
        method = settings.method if settings is not None else "of a format without quant_method"
        if method == "gguf" and all(p.is_floating_point() for p in module.parameters()):
            continue  # transformers says so of any model that it read from a GGUF, and dequantised
        way = (
            f"load it with load_pretrained({folder!r}, mesh=mesh), which computes the values of each shard "
            "while it reads, or with build_meta_model, shard_model and load_weights"
        )
        raise UnsupportedModelError(
            f"the weights of this {type(module).__name__} are quantised ({method}), and cannot be cut, "
            f"trained or exported as they are: {way if method in METHODS else IN_16_BITS}"
        )
