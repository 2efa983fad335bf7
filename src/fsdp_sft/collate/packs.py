"""What of a batch says that it is a pack: rows joined into one, told apart by positions that begin anew."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_sft.errors import PackingError


@dataclass(frozen=True)
class PackSize:
    """Of a pack, or the largest of several.

    Attributes:
        width: Tokens of the pack; 0 where there is none.
        longest: Tokens of its longest row.
    """

    width: int = 0
    longest: int = 0


def pack_size(batch: Any) -> PackSize:
    """The size of a pack; zeros for a batch in which no sequence has several rows."""
    positions = _positions(batch)
    if positions is None or positions.shape[-1] < 2 or not bool((positions.diff() != 1).any()):
        return PackSize()
    starts = torch.nn.functional.pad(positions.diff() != 1, (1, 0), value=True)
    index = torch.arange(positions.shape[-1], device=positions.device)
    row_start = torch.where(starts, index, 0).cummax(-1).values
    return PackSize(positions.shape[-1], int((index - row_start).max()) + 1)


def refuse_masked_pack(batch: Any) -> None:
    """Raise for a pack that also has an attention mask of one value a token.

    transformers keeps rows apart by their positions only where it is given no mask.

    Raises:
        PackingError: If positions begin anew among the tokens that the mask lets through.
    """
    positions = _positions(batch)
    mask = batch.get("attention_mask") if positions is not None else None
    if positions is None or not isinstance(mask, torch.Tensor) or mask.shape != positions.shape:
        return
    for seen, places in zip(mask.to(positions.device) != 0, positions, strict=True):
        if bool((places[seen].diff() != 1).any()):
            raise PackingError(
                "a batch has position_ids that begin anew, as packed rows have, and an attention_mask: "
                "models heed such positions only without a mask, and would let the rows see each other. "
                "Leave attention_mask out (PackedCollator makes none), or position_ids if these are no packs"
            )


def _positions(batch: Any) -> torch.Tensor | None:
    """``(B, S)``: positions in the text."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(positions, torch.Tensor):
        return None
    if positions.ndim == 3 and positions.shape[0] == 4:
        positions = positions[0]  # those of the text, before three of M-RoPE
    if positions.ndim == 1:
        positions = positions[None]
    return positions if positions.ndim == 2 else None
