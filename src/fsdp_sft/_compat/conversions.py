"""transformers' conversions between a checkpoint's tensors and the model's."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn


def revert_weight_conversion(
    model: nn.Module, state_dict: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The model's names and tensors converted to those of a checkpoint on the Hub.

    ``save_pretrained`` does this between gathering and writing, and offers no public way to do it for a part
    of the model.

    Args:
        model: Unsharded model; transformers looks conversions up by its class, which FSDP2 replaces.
        state_dict: Tensors by their names in the model; they may be on the meta device.

    Returns:
        Tensors by their names in the checkpoint; ``state_dict`` itself if the architecture has no
        conversions.
    """
    from transformers.core_model_loading import revert_weight_conversion as revert

    return revert(model, state_dict)  # type: ignore[arg-type,no-any-return]


def copy_weight_conversions(source: nn.Module, target: nn.Module) -> None:
    """Have ``target`` saved in the format that ``source`` was loaded from.

    ``from_pretrained`` keeps the conversions it used in ``_weight_conversions``, and only saving reads them.
    """
    conversions = getattr(source, "_weight_conversions", None)
    if conversions is not None and is_dequantised(source):
        conversions = _without_quantiser(target, conversions)
    if conversions is not None:
        target._weight_conversions = conversions


def is_dequantised(model: nn.Module) -> bool:
    """Whether transformers dequantised the model while loading, so that a save would quantise it again.

    The quantiser's operations stay in ``_weight_conversions``, and saving reverts them:
    https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/core_model_loading.py, in
    ``revert_weight_conversion``. ``save_pretrained(save_original_format=False)`` leaves all of them out.
    """
    used = getattr(model, "_weight_conversions", None) or []
    operations = [operation for entry in used for operation in getattr(entry, "operations", ())]
    is_quantised = getattr(model, "is_quantized", False)
    return not is_quantised and any(hasattr(operation, "hf_quantizer") for operation in operations)


def _without_quantiser(twin: nn.Module, used: list[Any]) -> list[Any]:
    """The conversions of the class itself, without a quantiser's operations.

    Changes of a prefix are kept only if they were used: only loading can tell whether the prefix was there.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    def place(entry: Any) -> tuple[Any, ...]:
        return tuple(entry.source_patterns), tuple(entry.target_patterns), entry.scope_prefix

    prefixes = {place(entry) for entry in used if isinstance(entry, PrefixChange)}
    own = get_model_conversion_mapping(twin, add_legacy=False)  # type: ignore[arg-type]
    return [entry for entry in own if not isinstance(entry, PrefixChange) or place(entry) in prefixes]


def names_left_out_on_save(model: nn.Module) -> tuple[set[str], set[str]]:
    """(names that ``save_pretrained`` never writes, patterns of tied names that it leaves out).

    ``_keys_to_ignore_on_save`` and ``_tied_weights_keys`` are class attributes that no public function reads;
    see ``remove_tied_weights_from_state_dict`` in transformers' ``modeling_utils.py``.
    """
    ignored: Any = getattr(model, "_keys_to_ignore_on_save", None) or ()
    tied: set[str] = set()
    for prefix, module in model.named_modules():
        keys: Any = getattr(module, "_tied_weights_keys", None) or ()
        tied.update(f"{prefix}.{key}" if prefix else key for key in keys)
    return set(ignored), tied


def match_checkpoint_keys(
    twin: nn.Module, keys: list[str], conversions: list[Any]
) -> tuple[dict[str, tuple[Any, dict[str, list[str]]]], dict[str, str]]:
    """Match checkpoint keys with tensors of the model: the first half of transformers' loading.

    transformers does this in the loop of ``convert_and_load_state_dict_in_model``, which cannot be called for
    the matching alone. The order matters: keys are visited in transformers' natural order, which is the order
    in which experts are stacked.

    Args:
        twin: Unsharded copy of the model on the meta device, untied.
        keys: Names in the checkpoint.
        conversions: The list of ``weight_conversions``; conversions that match are marked as used.

    Returns:
        ({first target: (WeightConverter or None for a renaming, {source pattern: keys})},
        {unexpected name: checkpoint key}).
    """
    from transformers import WeightConverter
    from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

    state: dict[str, Any] = twin.state_dict()
    prefix: Any = twin.base_model_prefix
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    matched: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    unexpected: dict[str, str] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name in state:
            fresh = deepcopy(by_pattern[pattern]) if pattern is not None and name not in matched else None
            _, sources = matched.setdefault(name, (fresh, {}))
            sources.setdefault(key if pattern is None else pattern, []).append(key)
        elif pattern is not None:
            first, *_ = targets = by_pattern[pattern].target_patterns
            unexpected.update({name.replace(first, target): key for target in targets})
        else:
            unexpected[name] = key
    return matched, unexpected


def weight_conversions(twin: nn.Module) -> list[Any]:
    """The renamings and conversions that transformers has for a model's class and its sub-models; a new list.

    ``get_model_conversion_mapping`` is what loading calls; there is no public form.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(twin))  # type: ignore[arg-type]


def run_conversion(
    twin: nn.Module, first_target: str, converter: Any, tensors: dict[str, list[torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Run one ``WeightConverter`` of transformers over tensors, as loading does; see its ``convert``.

    Args:
        twin: Unsharded copy of the model.
        first_target: Name of the first tensor that the conversion makes.
        converter: The converter, which is copied.
        tensors: Tensors of the checkpoint by the source pattern that they match.

    Returns:
        Target name to converted tensor.
    """
    fresh = deepcopy(converter)
    for pattern, collected in tensors.items():
        fresh.collected_tensors[pattern].extend(collected)
    converted = fresh.convert(first_target, model=twin, config=twin.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def keep_used_conversions(model: nn.Module, conversions: list[Any]) -> None:
    """Keep the conversions that matched in ``_weight_conversions``, where ``save_pretrained`` reads them."""
    model._weight_conversions = [entry for entry in conversions if entry.was_used()]  # type: ignore[assignment]


def ignored_on_load(twin: nn.Module) -> tuple[list[str], list[str]]:
    """(patterns of keys that may be missing, patterns of keys that may be unexpected).

    ``_keys_to_ignore_on_load_missing`` and ``_keys_to_ignore_on_load_unexpected`` are class attributes that
    no public function reads. The two added patterns are those of transformers'
    ``_adjust_missing_and_unexpected_keys``, for buffers that older versions saved.
    """
    buffers = [name for name, _ in twin.named_buffers()]
    unexpected: list[str] = list(getattr(twin, "_keys_to_ignore_on_load_unexpected", None) or ())
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        unexpected.append(r"(^|\.)position_ids$")
    return list(getattr(twin, "_keys_to_ignore_on_load_missing", None) or ()), unexpected
