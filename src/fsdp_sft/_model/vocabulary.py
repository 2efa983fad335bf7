"""The token ids for which a model has rows. Batches with others are refused: a GPU would end the process."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.view import unwrapped
from fsdp_sft.errors import BatchError

# Names in a config of ids for images and the like, which a multimodal model replaces before it looks up
# embeddings.
_PLACEHOLDER = re.compile(r"(image|video|audio|vision|speech)\w*token\w*(id|index)$|^(boi|eoi)_token")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True)
class Vocabulary:
    """The ids that a model can take.

    Attributes:
        owner: Name of the model, for messages.
        embedding: Number of rows of the embedding; None if unknown.
        head: Number of rows of the head, which labels index; None if unknown.
        config: transformers' config, whose ids for images and the like are never looked up; None for other
            models.
    """

    owner: str
    embedding: int | None
    head: int | None = None
    config: Any = None

    def check_ids(self, batch: Any) -> None:
        """Refuse ``input_ids`` for which the embedding has no row.

        Raises:
            BatchError: For the first such id; the message names it, its place and the ids that exist.
        """
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if self.embedding is not None:
            _check("input_ids", ids, self.embedding, self.owner, lambda: _placeholders(self.config))

    def check_labels(self, batch: Any, keys: Collection[str], ignored: int) -> None:
        """Refuse labels that are neither ``ignored`` nor the index of one of the head's rows.

        Raises:
            BatchError: For the first such label; the message names it, its place and the ids that exist.
        """
        for key in keys if self.head is not None and isinstance(batch, Mapping) else ():
            _check(key, batch.get(key), self.head or 0, self.owner, lambda: {ignored})


def vocabulary_of(model: nn.Module) -> Vocabulary:
    """The ids that a transformers model takes; for other models they are unknown.

    Nothing is computed: layers with adapters would merge their weights when asked for them, so only the
    layers inside are read.
    """
    inner = unwrapped(model)
    return Vocabulary(
        type(inner).__name__.removeprefix("FSDP"),
        _rows(inner, "get_input_embeddings", nn.Embedding),
        _rows(inner, "get_output_embeddings", nn.Linear),
        getattr(inner, "config", None),
    )


def check_row(ids: Any, vocab_size: int) -> None:
    """Refuse a row of plain integers with an id outside a vocabulary.

    Raises:
        BatchError: For the first such id; the message names it and its place.
    """
    if len(ids) and not 0 <= min(ids) <= max(ids) < vocab_size:
        _check("input_ids", torch.tensor(list(ids), dtype=torch.int64), vocab_size, "the model", set)


def _rows(model: Any, getter: str, kind: type[nn.Module]) -> int | None:
    """Rows of the layer that ``getter`` returns, without adapters around it; None if it has none."""
    get = getattr(model, getter, None)
    try:
        layer = get() if callable(get) else None
    except (NotImplementedError, AttributeError):
        return None
    while isinstance(layer, nn.Module) and not isinstance(layer, kind):
        within = (layer._modules.get(name) for name in ("original_module", "token_adapter", "base_layer"))
        layer = next((module for module in within if module is not None), None)
    weight: Any = layer.weight if layer is not None else None
    return int(weight.shape[0]) if weight is not None else None


def _placeholders(config: Any) -> set[int]:
    """Ids of images and the like in a config."""
    fields = config.to_dict() if hasattr(config, "to_dict") else {}
    return {value for key, value in fields.items() if isinstance(value, int) and _PLACEHOLDER.search(key)}


def _check(name: str, ids: Any, rows: int, owner: str, allowed: Callable[[], Collection[int]]) -> None:
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
    advice = (
        "is the tokenizer that of this model? For tokens added to it load with new_vocab_size=len(tokenizer)"
        if name == "input_ids"
        else "a label is an id, or -100 where nothing is trained; for another one pass loss_fn and count_fn"
    )
    raise BatchError(
        f"{name} has {int(ids[tuple(place)])} ({where}), and {owner} has rows for the ids 0 to {rows - 1}: "
        f"{advice}"
    )
