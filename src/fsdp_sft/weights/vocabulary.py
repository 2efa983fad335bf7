"""Adding tokens: a model with more rows than the checkpoint, and the values of the new rows."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_sft._compat.models import build_like_from_pretrained
from fsdp_sft._model.named import named_tensors
from fsdp_sft._ranks.agree import all_reduce_sum
from fsdp_sft._tensors.boxes import Box, box_of, local_of, part_of
from fsdp_sft._tensors.sharding import own_part
from fsdp_sft.errors import UnsupportedModelError, abridged

_PIECE_ELEMENTS = 1 << 20  # widened to float64 at once
_SHORT = "_fsdp_sft_shapes_before_new_tokens"  # attribute of a model that has rows for new tokens

Shape = tuple[int, ...]


def check_vocab_size(size: Any) -> int:
    """The size.

    Raises:
        ValueError: If it is not a positive integer.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"new_vocab_size must be a positive integer or None, got {size!r}")
    return size


def build_with_vocabulary(cls: Any, config: Any, dtype: torch.dtype, new_vocab_size: int) -> Any:
    """A model on the meta device whose embedding and head have rows for ``new_vocab_size`` tokens.

    A second model, built with the old size, shows which tensors have a row for each token. The new size is
    written into ``config``, or into its text config. A size that is not above the old one changes nothing:
    many checkpoints have spare rows, and rows are never taken away.

    Raises:
        UnsupportedModelError: If the class has tensors that depend on the size in another way than by a row
            for each token.
    """
    before = build_like_from_pretrained(cls, copy.deepcopy(config), dtype)
    old = _set_vocab_size(config, new_vocab_size)
    model = build_like_from_pretrained(cls, config, dtype)
    if old < new_vocab_size:
        shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(before).items()}
        _check_rows(cls, model, shapes, old, new_vocab_size)
        new_shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
        setattr(model, _SHORT, {name: s for name, s in shapes.items() if s != new_shapes[name]})
    return model


def shapes_before_new_tokens(model: nn.Module) -> Mapping[str, Shape]:
    """Shapes in the checkpoint of the tensors that have rows for new tokens, by name; empty if none has."""
    return getattr(model, _SHORT, {})


@torch.no_grad()
def fill_new_rows(base: nn.Module, shapes: Mapping[str, Shape]) -> None:
    """Set the rows of new tokens to the mean of the old ones, taken in float64 and the same on all ranks.

    Args:
        base: The model, with its old rows loaded.
        shapes: Old shapes by name.

    Collective: all ranks.
    """
    tensors = named_tensors(base)
    for name, shape in shapes.items():
        tensor = tensors[name]
        old, box, local = shape[0], box_of(tensor), local_of(tensor)
        sums = torch.zeros(shape[1:], dtype=torch.float64)
        # This rank's share of the old rows. Of replicas only the owner adds it, so that no row counts twice.
        held = Box((0, *box.offset[1:]), (old, *box.shape[1:])).intersect(box)
        if held is not None and own_part(tensor) is not None:
            rows = part_of(local, held.relative_to(box))
            sums[held.slices[1:]] = _sum_of_rows(rows).cpu()
        mean = torch.tensor(all_reduce_sum(sums.reshape(-1).tolist()), dtype=torch.float64) / old
        added = Box((old, *box.offset[1:]), (tensor.shape[0] - old, *box.shape[1:])).intersect(box)
        if added is not None:
            own = mean.reshape(shape[1:])[added.slices[1:]].to(tensor.dtype)
            part_of(local, added.relative_to(box)).copy_(own.to(local.device).expand(added.shape))


def _sum_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """The sum of rows in float64, a piece at a time, since torch widens everything that it sums at once."""
    total = torch.zeros(rows.shape[1:], dtype=torch.float64, device=rows.device)
    for piece in rows.split(max(1, _PIECE_ELEMENTS // max(1, rows[:1].numel()))):
        total += piece.sum(0, dtype=torch.float64)
    return total


def _set_vocab_size(config: Any, new: int) -> int:
    """Write a larger vocabulary size into a config; return the old one."""
    try:
        text = config.get_text_config()
    except ValueError as error:
        raise UnsupportedModelError(
            f"new_vocab_size cannot tell which part of the config describes the text model: {error}"
        ) from None
    old = getattr(text, "vocab_size", None)
    if not isinstance(old, int):
        raise UnsupportedModelError(
            f"new_vocab_size needs a config with a vocab_size, {type(text).__name__} has none"
        )
    if new <= old:
        return old
    for part in {id(part): part for part in (text, config)}.values():
        if getattr(part, "vocab_size", None) == old:
            part.vocab_size = new
    return old


def _check_rows(cls: Any, model: Any, before: Mapping[str, Shape], old: int, new: int) -> None:
    """Refuse a class in which the new size has changed anything but the number of rows."""
    after = named_tensors(model)
    strange = [
        name
        for name in {**before, **after}
        if name not in before
        or name not in after
        or (before[name] != tuple(after[name].shape) and not _is_grown(before[name], after[name], old, new))
    ]
    if strange:
        raise UnsupportedModelError(
            f"new_vocab_size cannot add tokens to {cls.__name__}: {abridged(strange)} depend on the size in "
            "another way than by a row for each token; resize it with transformers, save it, and load that"
        )
    for what, layer in (
        ("embedding", model.get_input_embeddings()),
        ("head", model.get_output_embeddings()),
    ):
        weight = getattr(layer, "weight", None)
        if weight is not None and weight.shape[0] != new:
            raise UnsupportedModelError(
                f"new_vocab_size cannot add tokens to {cls.__name__}: its {what} keeps {weight.shape[0]} "
                "rows; resize it with transformers, save it, and load that"
            )


def _is_grown(before: Shape, tensor: torch.Tensor, old: int, new: int) -> bool:
    """Whether a tensor is a floating-point parameter that differs by the new rows alone."""
    return (
        isinstance(tensor, nn.Parameter)
        and before[:1] == (old,)
        and tuple(tensor.shape) == (new, *before[1:])
        and tensor.is_floating_point()
    )
