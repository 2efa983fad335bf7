"""Recognise packs: several rows in one sequence, whose position_ids restart with each row."""

from collections.abc import Mapping
from typing import Any

import torch

from fsdp_sft.errors import PackingError
from fsdp_sft.targets import IGNORE_INDEX


def pack_size(batch: Any) -> tuple[int, int]:
    """(tokens of a pack, tokens of its longest row); zeros for a batch without a sequence of several rows."""
    positions = _positions(batch)
    if positions is None or positions.shape[-1] < 2 or not bool((positions.diff() != 1).any()):
        return 0, 0
    # A row starts wherever the position is not the previous one plus 1, and with each sequence of the batch.
    starts = torch.nn.functional.pad(positions.diff() != 1, (1, 0), value=True).flatten().nonzero().flatten()
    lengths = torch.cat([starts, starts.new_tensor([positions.numel()])]).diff()
    return positions.shape[-1], int(lengths.max())


def refuse_masked_pack(batch: Any) -> None:
    """Refuse a pack with an attention mask ``(B, S)``, with which transformers ignores where rows begin.

    Raises:
        PackingError: If positions restart among the tokens that the mask does not hide, or are those of three
            axes alone, from which no model tells rows apart.
    """
    positions = _positions(batch)
    axes = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if (
        isinstance(axes, torch.Tensor)
        and axes.ndim == 3
        and len(axes) == 3
        and batch.get("attention_mask") is None
        and bool((axes[..., 1:].amax(0) == 0).any())
    ):
        raise PackingError(
            "a batch has position_ids (3, B, S) that begin anew on all axes, as packed rows have: models "
            "tell rows apart by positions in the text. Give (4, B, S), with those in front of the three axes"
        )
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


def filler_of(batch: Any, targets: torch.Tensor) -> torch.Tensor | None:
    """Padding of a pack: its last row, if that repeats one id and has no target, as no real row does.

    ``PackedCollator`` pads in this way. Computed on the device of the batch.

    Args:
        batch: A batch with ``input_ids``.
        targets: Target of each position, ``(B, S)``.

    Returns:
        Mask of the padding, bool ``(B, S)``; None for a batch that is no pack, because it has no positions or
        has an attention mask.
    """
    positions, ids = _positions(batch), batch.get("input_ids")
    if (
        positions is None
        or batch.get("attention_mask") is not None
        or not isinstance(ids, torch.Tensor)
        or ids.ndim != 2
        or positions.shape[-1] != ids.shape[1]
        or len(positions) not in (1, len(ids))
    ):
        return None
    row = torch.nn.functional.pad(positions.expand(ids.shape).diff(dim=-1) != 1, (1, 0)).cumsum(-1)
    last = row == row[:, -1:]
    alike = ((ids == ids[:, -1:]) | ~last).all(-1, keepdim=True)
    return last & alike & ~(last & (targets != IGNORE_INDEX)).any(-1, keepdim=True)


def _positions(batch: Any) -> torch.Tensor | None:
    """Positions in the text, ``(B, S)``; None if the batch has none."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(positions, torch.Tensor) or positions.is_nested:  # rows of a nested tensor are apart
        return None
    if positions.ndim == 3 and positions.shape[0] == 4:
        positions = positions[0]  # M-RoPE: positions in the text, then temporal, height and width
    if positions.ndim == 1:
        positions = positions[None]
    return positions if positions.ndim == 2 else None
