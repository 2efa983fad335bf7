"""A model as it is published: its tensors under their own names, and those that belong in a file.

Adapters of peft wrap layers, and copies of modules are trained beside them. The other rooms ask here for the
model below, for what a file of it holds, and for the layer that computes, and need not know of adapters. peft
is not imported: its classes are known by their names.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from fsdp_sft._model.view import (
    base_of,
    clean_name,
    is_a,
    named_tensors,
    plain_names,
    slot,
    unwrapped,
    with_tensors,
)
from fsdp_sft._ranks.agree import this_rank
from fsdp_sft._tensors.boxes import memory_key
from fsdp_sft.errors import UnstorableStateError, UnsupportedModelError, abridged


@contextmanager
def published(model: nn.Module, *, trained: bool = False) -> Iterator[Any]:
    """The transformers model with the names it is published with, as it was before adapters were added.

    Inside the context, layers with adapters are replaced by the layers that they wrap.

    Args:
        model: Any model; one without adapters is returned as it is.
        trained: Whether to take the trained copies of ``modules_to_save`` instead of the modules from which
            they were copied.

    Raises:
        UnsupportedModelError: For adapters that wrap no layer that could replace them.
    """
    base = base_of(model)
    with plain_names(base):
        wrappers = {**tuner_layers(model), **_saved_modules(model)}
        inner = {fqn: _inside(fqn, wrapper, trained) for fqn, wrapper in wrappers.items()}
        try:
            for fqn, module in inner.items():
                setattr(*slot(base, fqn), module)
            yield base
        finally:
            for fqn, wrapper in wrappers.items():
                setattr(*slot(base, fqn), wrapper)


def trained_copies(model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
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


def computing(module: nn.Module) -> Any:
    """The layer that computes: the copy or original that peft's wrapper calls now, or the module itself."""
    wrapper: Any = module
    if not is_a(module, "ModulesToSaveWrapper", "peft"):
        return module
    active = [] if wrapper.disable_adapters else wrapper.active_adapters
    if not active or any(name not in wrapper.modules_to_save for name in active):
        return wrapper.original_module
    return wrapper.modules_to_save[active[0]]


def tuner_layers(model: nn.Module) -> dict[str, Any]:
    """The outermost layers that hold adapters by FQN in the base model, as peft made them one by one."""
    found: dict[str, Any] = {}
    for name, module in base_of(model).named_modules():
        fqn = clean_name(name).removesuffix(".token_adapter")  # within peft's wrapper of an embedding
        if is_a(module, "BaseTunerLayer", "peft") and not fqn.startswith(f"{next(reversed(found), None)}."):
            found[fqn] = module
    return found


def _saved_modules(model: nn.Module) -> dict[str, Any]:
    """Peft's wrappers around modules that are trained as copies, or in part, by FQN in the base model."""
    return {
        fqn: module
        for fqn, module in base_of(model).named_modules()
        if is_a(module, "AuxiliaryTrainingWrapper", "peft")
    }


def nested(layer: Any) -> list[Any]:
    """A layer with adapters, and those within it: peft nests one around each parameter of a module."""
    found = [layer]
    while is_a(inner := getattr(found[-1], "base_layer", None), "BaseTunerLayer", "peft"):
        found.append(inner)
    return found


def _inside(fqn: str, wrapper: Any, trained: bool) -> nn.Module:
    """The module inside a wrapper of peft."""
    if is_a(wrapper, "ModulesToSaveWrapper", "peft"):
        return cast(nn.Module, computing(wrapper) if trained else wrapper.original_module)
    if is_a(wrapper, "TrainableTokensWrapper", "peft"):
        return cast(nn.Module, wrapper.original_module)
    if is_a(wrapper, "BaseTunerLayer", "peft") and getattr(wrapper, "base_layer", None) is not None:
        layer = wrapper.get_base_layer()
        if layer is wrapper.base_layer or all(is_a(one, "ParamWrapper", "peft") for one in nested(wrapper)):
            return cast(nn.Module, layer)
    raise UnsupportedModelError(
        f"{fqn} is a {type(wrapper).__name__} of peft, whose base weights cannot be told apart here; load "
        "the base model with from_pretrained, and export with export_adapter"
    )


# The tensors that belong in a file, matched with stored ones.


@dataclass(frozen=True)
class ModelTensors:
    """Everything of a model that belongs in a file.

    Attributes:
        tensors: Parameters and persistent buffers by FQN; tied ones under their first name only.
        names: Each name to the first name of its tensor, in the order of the model's state dict.
        settings: What the tensors do not show of what they compute: JSON values, as a step records them.
    """

    tensors: dict[str, torch.Tensor]
    names: dict[str, str]
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def ties(self) -> dict[str, str]:
        """Every further name of a tied tensor, to its first name."""
        return {name: first for name, first in self.names.items() if name != first}


def match_tensors(
    live: ModelTensors,
    stored: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    *,
    casts: bool,
) -> tuple[dict[str, list[str]], list[str]]:
    """Find the stored tensor for each tensor of a model.

    Args:
        live: The model's tensors; for a tied one, one stored name is enough.
        stored: Dtype and shape of each stored tensor, by its name.
        casts: Whether numbers of another floating-point dtype may be read into the model's.

    Returns:
        (the stored names of each tensor, by its first name; how the two differ, in words).
    """
    found: dict[str, list[str]] = {first: [] for first in live.tensors}
    unexpected, apart = [], []
    for name, (dtype, shape) in stored.items():
        if name not in live.names:
            unexpected.append(name)
            continue
        found[live.names[name]].append(name)
        own = live.tensors[live.names[name]]
        if tuple(shape) != tuple(own.shape) or not (
            dtype == own.dtype or (casts and dtype.is_floating_point and own.dtype.is_floating_point)
        ):
            apart.append(f"{name} is {dtype} {tuple(shape)}, the model's is {own.dtype} {tuple(own.shape)}")
    missing = [first for first, names in found.items() if not names]
    problems = [
        f"{len(names)} {what} ({abridged(names, ', ', 4)})"
        for what, names in (("of the model's are not in it", missing), ("are not the model's", unexpected))
        if names
    ]
    return found, problems + apart


def model_tensors(model: nn.Module, doing: str = "") -> ModelTensors:
    """Collect every parameter and persistent buffer of a model, which is resharded, by name.

    Args:
        model: The model, wrapped or not.
        doing: What is done with them, such as ``"saving a checkpoint"``, which is refused while adapters are
            merged into their base layers. Empty if that makes no difference.

    Raises:
        UnsupportedModelError: If adapters are merged.
        ValueError: If a tensor is still on the meta device.
        UnstorableStateError: If a module has state that a file cannot hold, or the state dict has copies in
            place of parameters and buffers, or lacks trained parameters: what is read into its tensors would
            not change the model.
    """
    if doing:
        refuse_merged(model, doing)
    tensors: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    first_names: dict[int, str] = {}
    model = unwrapped(model)
    settings, live = recorded_settings(model), named_tensors(model)
    for key, value in model.state_dict(keep_vars=True).items():
        name = clean_name(key)
        if not isinstance(value, torch.Tensor) or not (value.is_meta or memory_key(value)):
            raise UnstorableStateError(
                f"{name} of {type(model).__name__} is a {type(value).__name__}, and a file holds plain "
                "tensors: keep it in train_state or rank_state"
            )
        names[name] = first_names.setdefault(id(value), name)
        tensors.setdefault(names[name], value)
    on_meta = [name for name, tensor in tensors.items() if tensor.device.type == "meta"]
    if on_meta:
        raise ValueError(
            f"{len(on_meta)} tensors of {type(model).__name__} are on the meta device ({on_meta[0]}, ...) "
            "and have no values: load_weights, load_checkpoint or load_full_state_dict gives them some"
        )
    own = {memory_key(tensor) for tensor in live.values()}
    saved = {memory_key(tensor) for tensor in tensors.values()}
    made = [name for name, tensor in tensors.items() if memory_key(tensor) not in own]
    lost = [
        clean_name(name)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and memory_key(parameter) not in saved
    ]
    if made or lost:
        raise UnstorableStateError(
            f"the state_dict() of {type(model).__name__} does not have the model's own tensors, which would "
            f"not come back: copies ({abridged(made)}), trained parameters left out ({abridged(lost)})"
        )
    return ModelTensors(tensors, names, settings)


# What a step records beside tensors, by which a resume with other adapters is refused.

_ADAPTERS = "adapters"
# Fields of peft's config that do not change an adapter's product (what it contributes to a layer): names,
# training, initialisation, and the layers, which tensor names show. AdaLora changes its ranks by itself.
_NOT_OF_THE_PRODUCT = re.compile(
    r"base_model_name_or_path|revision|inference_mode|task_type|auto_mapping|peft_version|.*dropout.*|init_.*"
    r"|.*_init|(ex|in)?clude_modules|target_.*|modules_to_save|layers_.*|.*_layers|bias|save_projection"
    r"|trainable_.*|ensure_.*|monteclora_.*|runtime_config|loftq_.*|eva_.*|corda_.*|lora_ga_.*|megatron_.*"
    r"|total_step|tinit|tfinal|delta[tT]|beta\d|orth_reg_weight|fan_in_fan_out"
)
_OF_ADALORA = ("rank_pattern", "r")


def settings_apart(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """What a step holds other than a model: settings with which its weights would compute something else.

    Args:
        saved: The step's settings.
        own: Those of the model's ``ModelTensors``. What either lacks is not compared.

    Returns:
        In words, after "holds"; empty if none differs.
    """
    then, now = saved.get(_ADAPTERS, {}), own.get(_ADAPTERS, {})
    apart = [
        f"{key}={then[name].get(key)!r} in the step and {now[name].get(key)!r} in the model, "
        f"of adapter {name!r}"
        for name in now
        if isinstance(then.get(name), dict)
        for key in sorted({*then[name], *now[name]})
        if then[name].get(key) != now[name].get(key)
    ]
    return (
        f"other adapters than the model has: {'; '.join(apart)}. Put them in with the config of the run that "
        "saved it"
        if apart
        else ""
    )


def recorded_settings(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What each adapter's product may depend on: numbers, strings, flags and patterns, as JSON values."""
    configs, found = getattr(unwrapped(model), "peft_config", None), {}
    for name, config in configs.items() if isinstance(configs, dict) else ():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        left_out = _OF_ADALORA if kind == "ADALORA" else ()
        told = {
            key: value
            for key, value in vars(config).items()
            if isinstance(value, (str, int, float, dict))
            and value not in ({}, False)
            and key not in left_out
            and not _NOT_OF_THE_PRODUCT.fullmatch(key)
        }
        found[str(name)] = {**told, "peft_type": kind}
    return {_ADAPTERS: found} if found else {}


# Layers whose weights are merged: by the export, and never twice.


def refuse_merged(model: nn.Module, doing: str) -> None:
    """Refuse a model whose adapters are merged into its base weights and still there.

    Args:
        model: Model, with adapters or without.
        doing: What is refused, for the message.

    Raises:
        UnsupportedModelError: If adapters are merged.
    """
    merged = [fqn for fqn, layer in tuner_layers(model).items() if getattr(layer, "merged", False)]
    if merged:
        raise UnsupportedModelError(
            f"{doing} while adapters are merged into their base layers ({abridged(merged)}): these hold the "
            "sum, in which the adapters would count twice, or be taken off what is loaded. Call "
            "model.unmerge_adapter() before; export_hf writes a merged model by itself"
        )


def layers_to_merge(model: nn.Module) -> dict[str, Any]:
    """The layers whose weights are merged when they are written, by FQN in the base model; empty without any.

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
    return tuner_layers(model)


def refuse_unmergeable(content: ModelTensors, merges: Mapping[str, Any]) -> None:
    """Refuse adapters that cannot be merged: one layer of each kind is merged, with zeros, by rank 0.

    Args:
        content: The model's tensors.
        merges: Layers with adapters, by name.

    Raises:
        ValueError: If a weight with adapters is tied to another one.
        UnsupportedModelError: If peft does not merge them.
    """
    kinds = set()
    trained = {f"{fqn}.weight": {*layer.parameters()} for fqn, layer in merges.items()}
    for fqn, layer in merges.items():
        weight = f"{fqn}.weight"
        tied = [name for name, first in content.names.items() if first == content.names.get(weight)]
        # Rows of an embedding that are trained are those of the head too: peft wraps both around one delta.
        if any(trained.get(name) != trained[weight] for name in tied):
            raise ValueError(
                f"{fqn} has adapters and its weight is tied to another: merged, both would change. Write the "
                "adapters alone with export_adapter"
            )
        own = layer.state_dict(keep_vars=True)
        kind = (type(layer), *((key, tensor.shape) for key, tensor in own.items()))
        if kind in kinds or this_rank():
            continue
        kinds.add(kind)
        try:
            merged_weights(
                layer, {key: torch.zeros(t.shape, dtype=merging_dtype(t)) for key, t in own.items()}
            )
        except Exception as error:  # whatever peft raises
            raise UnsupportedModelError(
                f"peft does not merge the adapters of {fqn} into its weights ({type(error).__name__}: "
                f"{error}). Write the adapters alone with export_adapter"
            ) from error


def merging_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which adapters are merged."""
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype


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
    layers = nested(with_tensors(layer, full))
    for wrapper in layers:
        if not wrapper.disable_adapters:
            wrapper.merge()
    return {name: tensor.detach() for name, tensor in named_tensors(layers[0].get_base_layer()).items()}
