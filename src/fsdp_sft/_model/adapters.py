"""LoRA through peft: add adapters to a model before it is sharded, the same on every rank."""

import copy
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from fsdp_sft._model.blocks import not_prepared
from fsdp_sft._model.published import nested, tuner_layers
from fsdp_sft._model.view import is_a
from fsdp_sft._process.generators import unmoved
from fsdp_sft.errors import UnsupportedModelError

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


def add_adapters(model: nn.Module, peft_config: "PeftConfig", *, seed: int = 0) -> "PeftModel":
    """``peft.get_peft_model``, with adapters that are the same on every rank and at every world size.

    Call it before ``apply_sac``, ``compile_blocks`` and ``shard_model``. On a model from
    ``build_meta_model`` the adapters get memory and the base model does not: ``load_weights``, after
    ``shard_model``, fills the base model and the copies of ``modules_to_save``.

    Args:
        model: A transformers model, materialised or on the meta device; not sharded. It is changed.
        peft_config: Configuration of peft, such as
            ``LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")``. On the meta device it must be
            a ``LoraConfig`` whose initialisation does not depend on the base weights.
        seed: Seed of the initialisation. The values are those of plain ``get_peft_model`` on a float32 model
            after ``torch.manual_seed(seed)``; the caller's random number generators do not change.

    Returns:
        The peft model around ``model``. Adapters require gradients, and nothing else does unless the
        config says so.

    Raises:
        UnsupportedModelError: If an adapter on the meta device can only be initialised from the base weights.

    Memory: The adapters, on the CPU if the base model is on the meta device.

    Example:
        >>> from peft import LoraConfig
        >>> lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        >>> adapted = fs.add_adapters(fs.build_meta_model(path), lora)
        >>> adapted = fs.shard_model(adapted, mesh=mesh)
        >>> report = fs.load_weights(adapted, path)
    """
    from peft import get_peft_model

    if any(p.is_meta for p in model.parameters()):
        refuse_initialised_from_base([peft_config])
    peft_config = _excluding(peft_config, not_prepared(model))
    with unmoved(seed=seed):  # peft draws on the CPU
        adapted = cast("PeftModel", get_peft_model(model, peft_config))
        torch.default_generator.manual_seed(seed)
        layers = tuner_layers(adapted)
        # peft makes adapters of parameters, such as those of experts, after all others.
        for fqn in sorted(layers, key=lambda fqn: is_a(layers[fqn], "ParamWrapper", "peft")):
            for wrapper in reversed(nested(layers[fqn])):
                _initialise(wrapper, peft_config)
    return adapted


def _excluding(peft_config: "PeftConfig", pattern: str) -> "PeftConfig":
    """A configuration that puts no adapters into modules of this pattern; the same one if it is empty."""
    if not pattern or not hasattr(peft_config, "exclude_modules"):
        return peft_config
    given = peft_config.exclude_modules or []
    patterns = [given] if isinstance(given, str) else [rf"(.*\.)?{re.escape(name)}" for name in given]
    changed = copy.copy(peft_config)
    changed.exclude_modules = "|".join(f"(?:{each})" for each in (pattern, *patterns))
    return changed


def refuse_initialised_from_base(configs: Iterable[Any]) -> None:
    """Refuse adapters that depend on the base weights they are made with, where these are to be loaded.

    Args:
        configs: Configurations of the adapters.

    Raises:
        UnsupportedModelError: For adapters that are initialised from the base weights (DoRA, PiSSA, ...).
    """
    for config in configs:
        given = getattr(config, "init_lora_weights", True)
        ways = {
            "use_dora": getattr(config, "use_dora", False),
            "trainable_token_indices": getattr(config, "trainable_token_indices", None),
            f"init_lora_weights={given!r}": not isinstance(given, bool) and given != "gaussian",
        }
        for how in (way for way, is_used in ways.items() if is_used):
            raise UnsupportedModelError(
                f"{how} initialises adapters from the base weights, and these are loaded afterwards: load "
                "the base model first, with from_pretrained, and then call add_adapters and shard_model"
            )


def _initialise(layer: Any, peft_config: Any) -> None:
    """Give the adapters of a layer on the meta device memory, and values drawn in the same order as by peft.

    peft makes adapters on the device of the base layer, so without values if that is the meta device.
    """
    for name, first in getattr(layer, "lora_A", {}).items():
        if hasattr(first, "weight") and first.weight.is_meta:  # AdaLoRA's are parameters
            for module in (first, layer.lora_B[name]):
                module.to_empty(device="cpu")
                module.reset_parameters()
            layer.reset_lora_parameters(name, peft_config.init_lora_weights)
