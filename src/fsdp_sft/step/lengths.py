"""Check that no row is longer than the model has positions."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_sft._model.twin import text_config
from fsdp_sft._model.wrappers import unwrapped
from fsdp_sft._process.callers import warn_caller
from fsdp_sft.errors import BatchError
from fsdp_sft.step.once import first_time

_OFFSET = 8  # some tables have a few rows more than positions


def check_length(model: nn.Module, batch: Any) -> None:
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
