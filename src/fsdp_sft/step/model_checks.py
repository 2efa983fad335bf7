"""Checks on the host, before the first forward, that the model can take a batch."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_sft._compat.attention import attention_of
from fsdp_sft._compat.models import original_class
from fsdp_sft._model.twin import text_config
from fsdp_sft._model.vocabulary import vocabulary_of
from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft._process.callers import warn_caller
from fsdp_sft._ranks.mesh import copies_of_rows
from fsdp_sft.collate import refuse_masked_pack
from fsdp_sft.errors import BatchError, UnsupportedModelError
from fsdp_sft.loss import LABEL_KEYS
from fsdp_sft.sac import draws_random_numbers
from fsdp_sft.step.once import first_time
from fsdp_sft.targets import IGNORE_INDEX

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OFFSET = 8  # some tables have a few rows more than positions


def check_of(model: nn.Module, *, own_loss: bool) -> Callable[[Any], None]:
    """A function that raises for a batch that the model cannot take.

    With an ``own_loss`` labels are not checked, because they mean what the caller wants; nor are positions,
    unless the attention is transformers'.
    """
    vocabulary = vocabulary_of(model)
    knows_packs = not own_loss or attention_of(unwrapped(model)) != "its own"

    def check(batch: Any) -> None:
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, torch.Tensor):
            _refuse_numbers_that_are_no_ids(ids)
            if not own_loss:
                _refuse_other_shapes(batch, ids)
        vocabulary.check_ids(batch)
        _check_length(model, batch)
        if knows_packs:
            refuse_masked_pack(batch)
        if not own_loss:
            vocabulary.check_labels(batch, LABEL_KEYS, IGNORE_INDEX)

    return check


def _refuse_numbers_that_are_no_ids(ids: torch.Tensor) -> None:
    """Refuse ids that are not integers."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise BatchError(
            f"input_ids are {ids.dtype}, and ids are integers: make them torch.long (vectors go into "
            "inputs_embeds)"
        )


def _refuse_other_shapes(batch: Any, ids: torch.Tensor) -> None:
    """Refuse a mask or positions for other tokens than those that the batch has."""
    for name in ("attention_mask", "position_ids"):
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.ndim == ids.ndim == 2 and value.shape[1] != ids.shape[1]:
            raise BatchError(
                f"{name} is {tuple(value.shape)} and input_ids are {tuple(ids.shape)}: it has an entry a "
                "token"
            )


def refuse_noise_on_same_rows(model: nn.Module, mesh: "DeviceMesh | None") -> None:
    """Refuse a model that draws random numbers on ranks that compute the same rows: they would differ.

    Raises:
        UnsupportedModelError: If ranks share rows (tensor parallelism) and the model has dropout or other
            noise.
    """
    if copies_of_rows(mesh) > 1 and draws_random_numbers(model):
        raise UnsupportedModelError(
            f"{original_class(unwrapped(model)).__name__} has dropout, or other noise, and is cut by tensor "
            "parallelism: ranks with the same rows would draw different random numbers. Build it with its "
            "dropout at 0 in the config"
        )


def _check_length(model: nn.Module, batch: Any) -> None:
    """Warn once of a row that is longer than the model was trained for.

    Raises:
        BatchError: For a row that is longer than the model's table of positions.
    """
    known = getattr(text_config(model), "max_position_embeddings", None)
    if not isinstance(known, int) or known < 1:
        return
    length, name = _longest(batch), type(unwrapped(model)).__name__.removeprefix("FSDP")
    if length <= known:
        return
    if _has_a_table(model, known):
        raise BatchError(
            f"a row has {length:,} tokens, and {name} has {known:,} positions: pass max_length={known} or "
            "less where rows are encoded"
        )
    if not first_time(model, "length"):
        return
    warn_caller(
        f"a row has {length:,} tokens, and {name} was made for {known:,} (max_position_embeddings): "
        "positions beyond that were never trained. Pass max_length= where rows are encoded, or load the "
        "model with a larger max_position_embeddings= and rope_parameters= that extend it (yarn)"
    )


def _has_a_table(model: nn.Module, known: int) -> bool:
    """Whether positions are rows of a table and not computed (rotary, ALiBi)."""
    return any(
        isinstance(module, nn.Embedding)
        and ("pos" in name or name.endswith("wpe"))
        and 0 <= module.num_embeddings - known <= _OFFSET  # and not the patches of an image
        for name, module in model.named_modules()
    )


def _longest(batch: Any) -> int:
    """Tokens of the longest row of a batch or of its packs; 0 if unknown."""
    if not isinstance(batch, Mapping):
        return 0
    ids, positions = batch.get("input_ids"), batch.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.ndim == 2 and positions.numel():
        return int(positions.max()) + 1 if positions.device.type == "cpu" else 0
    return ids.shape[-1] if isinstance(ids, torch.Tensor) and ids.ndim == 2 else 0
