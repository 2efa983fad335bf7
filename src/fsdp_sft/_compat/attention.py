"""Attention functions and masks."""

import sys
from typing import Any

import torch
from torch import nn


def attention_of(model: nn.Module) -> str:
    """Name of the attention that a transformers model runs: its config's ``_attn_implementation``."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", None) or "its own")


def attention_asked_for(config: Any) -> Any:
    """The attention that a config names, ``_attn_implementation``; None if it names none."""
    return getattr(config, "_attn_implementation", None)


def ask_for_attention(config: Any, name: str) -> None:
    """Let a config name an attention, also where the folder's file sets the private field itself."""
    config._attn_implementation = name


def keep_rows_apart(mask_function: Any, position_ids: torch.Tensor, rows: torch.Tensor) -> Any:
    """A mask function of transformers restricted to the rows of a pack: each row sees itself alone.

    transformers does this where positions start again, but only for masks that it makes itself.
    ``packed_sequence_compatibility_function`` and ``packed_sequence_mask_function`` are its own functions for
    that; transformers 5.24 has the second alone.

    Args:
        mask_function: Function of (sequence, head, query, key).
        position_ids: Positions, ``(B, S)``.
        rows: Number of the row that each token belongs to, ``(B, S)``.
    """
    from transformers import masking_utils

    by_row = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if by_row is not None:
        return by_row(mask_function, position_ids, rows)
    return masking_utils.and_masks(mask_function, masking_utils.packed_sequence_mask_function(rows))


def eager_attention_of(module: nn.Module) -> Any | None:
    """The function that a model's own file has for ``attn_implementation="eager"``; None if it has none.

    Model files hand ``eager_attention_forward`` to transformers' attention interface at each call; no table
    lists these functions.
    """
    for cls in type(module).__mro__:
        found = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    return None
