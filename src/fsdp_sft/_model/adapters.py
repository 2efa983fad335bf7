"""LoRA through peft: add adapters to a model before it is sharded, and see the base model without them.

Only ``add_adapters`` imports peft; others know its classes by their names.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from fsdp_sft._compat.models import original_class
from fsdp_sft._model.blocks import not_prepared
from fsdp_sft._model.view import base_of, is_a, named_tensors, slot
from fsdp_sft._process.generators import unmoved
from fsdp_sft.errors import UnsupportedModelError, abridged

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
        layers = _tuner_layers(adapted)
        # peft makes adapters of parameters, such as those of experts, after all others.
        for fqn in sorted(layers, key=lambda fqn: is_a(layers[fqn], "ParamWrapper", "peft")):
            for wrapper in reversed(_nested(layers[fqn])):
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


@contextmanager
def without_adapters(model: nn.Module, *, trained: bool = False) -> Iterator[Any]:
    """The base model with its own parameter names, as it was before adapters were added.

    Inside the context, layers with adapters are replaced by the layers that they wrap.

    Args:
        model: Any model; one without adapters is returned as it is.
        trained: Whether to take the trained copies of ``modules_to_save`` instead of the modules from which
            they were copied.

    Raises:
        UnsupportedModelError: For adapters that wrap no layer that could replace them.
    """
    wrappers, base = {**_tuner_layers(model), **_saved_modules(model)}, base_of(model)
    inner = {fqn: _inside(fqn, wrapper, trained) for fqn, wrapper in wrappers.items()}
    try:
        for fqn, module in inner.items():
            setattr(*slot(base, fqn), module)
        yield base
    finally:
        for fqn, wrapper in wrappers.items():
            setattr(*slot(base, fqn), wrapper)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters by their FQNs in the base model; empty if there are none.

    Raises:
        UnsupportedModelError: For prompt tuning and the like, which cannot become part of the base's weights.
    """
    config: Any = getattr(model, "active_peft_config", None)
    kind = getattr(config, "peft_type", None)
    is_mixed = kind == "XLORA"  # by what it reads, of several adapters
    if kind is not None and (config.is_prompt_learning or config.is_adaption_prompt or is_mixed):
        raise UnsupportedModelError(
            f"{kind} computes beside the base's weights and cannot be merged into them; "
            + ("save_full_state_dict writes it" if is_mixed else "export_adapter writes it in peft's format")
        )
    return _tuner_layers(model)


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


def saved_copies(model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(original, copy) for each parameter and buffer of the copies of ``modules_to_save``."""
    for wrapper in _saved_modules(model).values():
        original = named_tensors(wrapper.original_module)
        for copied in getattr(wrapper, "modules_to_save", {}).values():
            for name, tensor in named_tensors(copied).items():
                yield original[name], tensor


def copied_modules(model: nn.Module) -> set[nn.Module]:
    """The frozen modules from which the copies of ``modules_to_save`` were made."""
    return {
        wrapper.original_module
        for wrapper in _saved_modules(model).values()
        if getattr(wrapper, "modules_to_save", None)
    }


@torch.no_grad()
def merged_weights(layer: Any, full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a base layer after peft has merged the active adapters into them.

    Args:
        layer: Layer with adapters; left as it was.
        full: Full tensors of all its parameters and buffers by name; those of the base layer are changed.

    Returns:
        The base layer's parameters and buffers by their names in it.
    """
    # peft merges within a layer, and may swap its parts, so it gets a copy of the layer.
    layers = _nested(with_tensors(layer, full))
    for wrapper in layers:
        if not wrapper.disable_adapters:
            wrapper.merge()
    return {name: tensor.detach() for name, tensor in named_tensors(layers[0].get_base_layer()).items()}


def with_tensors(module: nn.Module, full: Mapping[str, torch.Tensor], prefix: str = "") -> Any:
    """A copy of a module, without its hooks, that holds other tensors; the module stays as it is.

    Args:
        module: The module, sharded or not.
        full: Parameters and buffers of the copy by their names, after ``prefix``; others are the module's.
        prefix: Name of the module with a dot at its end, or nothing.
    """
    made: Any = object.__new__(original_class(module))
    for key, value in vars(module).items():
        own = copy.copy(value) if isinstance(value, (dict, list)) else value
        made.__dict__[key] = type(value)() if "_hooks" in key else own
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else with_tensors(child, full, f"{prefix}{name}.")
    for tensors in (made._parameters, made._buffers):
        for name in tensors.keys() & {key.removeprefix(prefix) for key in full}:
            is_parameter = isinstance(tensors[name], nn.Parameter)
            tensors[name] = nn.Parameter(full[prefix + name], False) if is_parameter else full[prefix + name]
    return made


def refuse_merged(model: nn.Module, doing: str) -> None:
    """Refuse a model whose adapters are merged into its base weights and still there.

    Args:
        model: Model, with adapters or without.
        doing: What is refused, for the message.

    Raises:
        UnsupportedModelError: If adapters are merged.
    """
    merged = [fqn for fqn, layer in _tuner_layers(model).items() if getattr(layer, "merged", False)]
    if merged:
        raise UnsupportedModelError(
            f"{doing} while adapters are merged into their base layers ({abridged(merged)}): these hold the "
            "sum, in which the adapters would count twice, or be taken off what is loaded. Call "
            "model.unmerge_adapter() before; export_hf writes a merged model by itself"
        )


def _tuner_layers(model: nn.Module) -> dict[str, Any]:
    """The outermost layers that hold adapters by FQN in the base model, as peft made them one by one."""
    found: dict[str, Any] = {}
    for fqn, module in base_of(model).named_modules():
        if is_a(module, "BaseTunerLayer", "peft") and not fqn.startswith(f"{next(reversed(found), None)}."):
            found[fqn] = module
    return found


def _saved_modules(model: nn.Module) -> dict[str, Any]:
    """Peft's wrappers around modules that are trained as copies, or in part, by FQN in the base model."""
    modules = base_of(model).named_modules()
    return {fqn: module for fqn, module in modules if is_a(module, "AuxiliaryTrainingWrapper", "peft")}


def _nested(layer: Any) -> list[Any]:
    """A layer with adapters, and those within it: peft nests one around each parameter of a module."""
    found = [layer]
    while is_a(inner := getattr(found[-1], "base_layer", None), "BaseTunerLayer", "peft"):
        found.append(inner)
    return found


def _inside(fqn: str, wrapper: Any, trained: bool) -> nn.Module:
    """The module inside a wrapper of peft."""
    if is_a(wrapper, "ModulesToSaveWrapper", "peft"):
        if not trained or wrapper.disable_adapters:
            return cast(nn.Module, wrapper.original_module)
        return cast(nn.Module, wrapper.modules_to_save[wrapper.active_adapters[0]])
    if is_a(wrapper, "BaseTunerLayer", "peft") and getattr(wrapper, "base_layer", None) is not None:
        layer = wrapper.get_base_layer()
        if layer is wrapper.base_layer or all(is_a(one, "ParamWrapper", "peft") for one in _nested(wrapper)):
            return cast(nn.Module, layer)
    raise UnsupportedModelError(
        f"{fqn} is a {type(wrapper).__name__} of peft, whose base weights cannot be told apart here; load "
        "the base model with from_pretrained, and export with export_adapter"
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
