"""What a step says of the adapters that it holds, so that a resume with others is refused by name."""

from pathlib import Path
from typing import Any

from torch import nn

from fsdp_sft._codec import MALFORMED, dumps, loads
from fsdp_sft._disk import read_bytes
from fsdp_sft._wrappers import unwrapped
from fsdp_sft.dcp_io.manifest import MAX_JSON_BYTES, Manifest
from fsdp_sft.errors import CheckpointCorruptError, CheckpointMismatchError

NAME = "adapters.json"  # below settings/
# Of peft's config, what decides on the product that a layer adds; dropout, for instance, may change.
_OF_THE_PRODUCT = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")


def adapter_settings(model: nn.Module) -> dict[str, bytes]:
    """The file of the model's adapters, by its name; none if it has no adapters."""
    told = _told(model)
    return {NAME: dumps(told)} if told else {}


def check_adapters(folder: Path, manifest: Manifest, model: nn.Module) -> None:
    """Refuse a model whose adapters compute something else with the weights of a step than those it was of.

    Raises:
        CheckpointMismatchError: If a number or a flag of an adapter differs.
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
            for key in _OF_THE_PRODUCT
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
    """By adapter what decides on its product, as JSON holds it."""
    configs: Any = getattr(unwrapped(model), "peft_config", None)
    if not isinstance(configs, dict):
        return {}
    found: dict[str, dict[str, Any]] = {}
    for name, config in configs.items():
        values = {key: getattr(config, key, None) for key in _OF_THE_PRODUCT}
        values["peft_type"] = str(getattr(values["peft_type"], "value", values["peft_type"]))
        plain = {key: value for key, value in values.items() if isinstance(value, (str, int, float, dict))}
        found[str(name)] = {key: value for key, value in plain.items() if value not in ({}, False)}
    return found
