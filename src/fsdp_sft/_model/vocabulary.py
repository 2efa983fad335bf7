"""The token ids for which a model has rows. Batches with others are refused: a GPU would end the process."""

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.view import unwrapped
from fsdp_sft.errors import BatchError

# Names in a config of ids for images and the like, which a multimodal model replaces before it looks up
# embeddings.
_PLACEHOLDER = re.compile(r"(image|video|audio|vision|speech)\w*token\w*(id|index)$|^(boi|eoi)_token")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def check_ids(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Refuse ``input_ids`` for which the embedding of a transformers model has no row.

    Ids of images and the like in the model's config are never looked up.

    Raises:
        BatchError: For the first such id; the message names it, its place and the ids that exist.
    """
    rows = rows_of(model, "get_input_embeddings", nn.Embedding)
    if rows is not None:
        _check("input_ids", batch.get("input_ids"), rows, model, partial(_placeholders, model))


def check_labels(model: nn.Module, batch: Mapping[str, Any], keys: Collection[str], ignored: int) -> None:
    """Refuse labels that are neither ``ignored`` nor the index of one of the rows of a model's head.

    Raises:
        BatchError: For the first such label; the message names it, its place and the ids that exist.
    """
    rows = rows_of(model, "get_output_embeddings", nn.Linear)
    if rows is not None:
        for key in keys:
            _check(key, batch.get(key), rows, model, lambda: {ignored})


def rows_of(model: nn.Module, getter: str, kind: type[nn.Module]) -> int | None:
    """Rows of the layer that ``getter`` of a transformers model returns; None if it has none.

    Nothing is computed: layers with adapters would merge their weights when asked for them, so only the
    layers inside are read.
    """
    inner: Any = unwrapped(model)
    try:
        layer = getattr(inner, getter)()
    except (NotImplementedError, AttributeError):
        return None
    while isinstance(layer, nn.Module) and not isinstance(layer, kind):
        within = (layer._modules.get(name) for name in ("original_module", "token_adapter", "base_layer"))
        layer = next((module for module in within if module is not None), None)
    return int(layer.weight.shape[0]) if layer is not None else None


def _placeholders(model: nn.Module) -> set[int]:
    """Ids of images and the like in a model's config."""
    config: Any = getattr(unwrapped(model), "config", None)
    fields = config.to_dict() if hasattr(config, "to_dict") else {}
    return {value for key, value in fields.items() if isinstance(value, int) and _PLACEHOLDER.search(key)}


def _check(name: str, ids: Any, rows: int, model: nn.Module, allowed: Callable[[], Collection[int]]) -> None:
    """Raise BatchError for the first id that is neither a row nor allowed."""
    if not isinstance(ids, torch.Tensor) or ids.dtype not in _INTEGERS or not ids.numel():
        return
    outside = (ids < 0) | (ids >= rows)
    for value in allowed() if bool(outside.any()) else ():
        outside &= ids != value
    if not bool(outside.any()):
        return
    place = [int(index) for index in outside.nonzero()[0]]
    axes = ["row", *["index"] * (len(place) - 2), "position"][-len(place) :]
    where = ", ".join(f"{axis} {index}" for axis, index in zip(axes, place, strict=True))
    owner = type(unwrapped(model)).__name__.removeprefix("FSDP")
    advice = (
        "is the tokenizer that of this model? For tokens added to it load with new_vocab_size=len(tokenizer)"
        if name == "input_ids"
        else "a label is an id, or -100 where nothing is trained; for another one pass loss_fn and count_fn"
    )
    raise BatchError(
        f"{name} has {int(ids[tuple(place)])} ({where}), and {owner} has rows for the ids 0 to {rows - 1}: "
        f"{advice}"
    )
