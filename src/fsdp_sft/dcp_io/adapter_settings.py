"""A step's record of its adapters, by which a resume with other adapters is refused."""

import re
from pathlib import Path
from typing import Any

from torch import nn

from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft._process.codec import MALFORMED, dumps, loads
from fsdp_sft._tensors.disk import read_bytes
from fsdp_sft.dcp_io.manifest import MAX_JSON_BYTES, Manifest
from fsdp_sft.errors import CheckpointCorruptError, CheckpointMismatchError

NAME = "adapters.json"  # below settings/
# Fields of peft's config that do not change an adapter's product (what it contributes to a layer): names,
# training, initialisation, and the layers, which tensor names show. AdaLora changes its ranks by itself.
_NOT_OF_THE_PRODUCT = re.compile(
    r"base_model_name_or_path|revision|inference_mode|task_type|auto_mapping|peft_version|.*dropout.*|init_.*"
    r"|.*_init|(ex|in)?clude_modules|target_.*|modules_to_save|layers_.*|.*_layers|bias|save_projection"
    r"|trainable_.*|ensure_.*|monteclora_.*|runtime_config|loftq_.*|eva_.*|corda_.*|lora_ga_.*|megatron_.*"
    r"|total_step|tinit|tfinal|delta[tT]|beta\d|orth_reg_weight|fan_in_fan_out"
)
_OF_ADALORA = ("rank_pattern", "r")


def adapter_settings(model: nn.Module) -> dict[str, bytes]:
    """Content of ``adapters.json``, by the file's name; empty if the model has no adapters."""
    told = _told(model)
    return {NAME: dumps(told)} if told else {}


def check_adapters(folder: Path, manifest: Manifest, model: nn.Module) -> None:
    """Refuse a model whose adapters would compute another product from a step's weights.

    Raises:
        CheckpointMismatchError: If a setting of an adapter differs.
        CheckpointCorruptError: If the file is not what was written.
    """
    if f"settings/{NAME}" not in manifest.files:  # without adapters, or of an earlier version
        return
    path = folder / "settings" / NAME
    try:
        saved = loads(read_bytes(path, MAX_JSON_BYTES), NAME)
        own = {name: each for name, each in _told(model).items() if name in saved}
        apart = [
            f"{key}={saved[name].get(key)!r} in the step and {each.get(key)!r} in the model, "
            f"of adapter {name!r}"
            for name, each in own.items()
            for key in sorted({*saved[name], *each})
            if saved[name].get(key) != each.get(key)
        ]
    except MALFORMED as error:
        raise CheckpointCorruptError(f"{path} is not what was written: {error}") from None
    if apart:
        raise CheckpointMismatchError(
            f"{folder} holds other adapters than the model has: {'; '.join(apart)}. Put them in with the "
            "config of the run that saved it"
        )


def _told(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Settings that determine each adapter's product, by adapter, as JSON values."""
    configs: Any = getattr(unwrapped(model), "peft_config", None)
    if not isinstance(configs, dict):
        return {}
    return {str(name): _of_the_product(config) for name, config in configs.items()}


def _of_the_product(config: Any) -> dict[str, Any]:
    """Numbers, strings, flags and patterns of one adapter's config that its product may depend on."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    plain = {
        key: value
        for key, value in vars(config).items()
        if isinstance(value, (str, int, float, dict)) and not _NOT_OF_THE_PRODUCT.fullmatch(key)
    }
    left_out = _OF_ADALORA if kind == "ADALORA" else ()
    told = {key: value for key, value in plain.items() if value not in ({}, False) and key not in left_out}
    return {**told, "peft_type": kind}
