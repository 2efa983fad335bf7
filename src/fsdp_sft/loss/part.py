"""A batch cut to the part that one rank computes under context parallelism, where ranks share each row.

Targets are shifted before the cut, so that the last token of a part has its target on the same rank. A row
of 10 tokens on 3 ranks ("." is filler, "-" a position without a target)::

    tokens of the row   a b c d e f g h i j . .
    targets             b c d e f g h i j - - -

                        tokens      targets
    rank 0              a b c d     b c d e
    rank 1              e f g h     f g h i
    rank 2              i j . .     j - - -
"""

from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from fsdp_sft._process.streams import host_copies, travelling
from fsdp_sft.attention.context_parallel import SequenceGroup, WholeRows
from fsdp_sft.collate.packs import filler_of, refuse_masked_pack
from fsdp_sft.errors import BatchError
from fsdp_sft.loss.counting import (
    LOSS_KEYS,
    WEIGHTS_KEY,
    Batch,
    CheckedBatch,
    Targets,
    facts_of,
    targets_of,
    weights_of,
)
from fsdp_sft.targets import IGNORE_INDEX

_OF_ALL_ROWS = ("position_ids", "attention_mask")


class BatchPart(CheckedBatch):
    """This rank's part of a batch, with its targets in ``shift_labels``; the mask is that of the whole rows.

    Attributes:
        whole: Facts about the whole rows that every rank of the group knows.
        counted: Mask of the part's tokens that are neither padding nor filler, bool.
    """

    def __init__(
        self,
        fields: Batch,
        whole: WholeRows,
        counted: torch.Tensor,
        targets: Targets | None = None,
    ) -> None:
        super().__init__(fields, targets)
        self.whole = whole
        self.counted: torch.Tensor = counted


def part_of(batch: Batch, group: SequenceGroup) -> BatchPart:
    """Cut a batch to this rank's part; the host waits for the device if the batch is there.

    A batch without a mask or without positions is read as transformers reads it: all tokens count, and
    positions ascend from 0. Filler at the end, a separate packed row, makes the length a multiple of the
    number of ranks.

    Raises:
        BatchError: If the batch has no labels or ids, or has a tensor that cannot be cut along the tokens.
        PackingError: If a pack has an attention mask.
    """
    refuse_masked_pack(batch)
    targets, weights = targets_of(batch), weights_of(batch)
    ids: torch.Tensor = batch["input_ids"]
    size, width = ids.shape
    each = -(-width // group.size)
    filler = each * group.size - width
    own = slice(group.rank * each, (group.rank + 1) * each)
    values = {name: _of_each_token(batch, name, (size, width)) for name in batch if name not in LOSS_KEYS}
    positions, given_mask = (values.pop(name, None) for name in _OF_ALL_ROWS)
    if positions is None:
        positions = torch.arange(width, device=ids.device).expand(ids.shape)
    mask = torch.ones_like(ids, dtype=torch.bool) if given_mask is None else given_mask != 0
    begins = F.pad(positions.diff(dim=-1) != 1, (1, 0))
    filled = filler_of(batch, targets)
    counted = F.pad(mask if filled is None else mask & ~filled, (0, filler))[:, own]
    seen_begins, seen_mask = host_copies([begins, mask])
    rows = None
    # Positions that restart mark packed rows. transformers heeds them only where there is no mask.
    if bool(seen_begins.any()) and given_mask is None:
        last = (torch.arange(filler, device=ids.device) == 0).expand(size, -1)
        rows = torch.cat([begins, last], 1).cumsum(-1)
    whole = WholeRows(
        group=group,
        length=width + filler,
        # Positions of the filler begin at 0 again, so that none exceeds the positions that the model has.
        position_ids=torch.cat([positions, torch.arange(filler, device=ids.device).expand(size, -1)], 1),
        rows=rows,
        padding=None if bool(seen_mask.all()) else F.pad(mask, (0, filler)),
        filler=filler,
    )
    fields = {
        name: F.pad(value, (*[0, 0] * (value.ndim - 2), 0, filler))[:, own]
        if isinstance(value, torch.Tensor)
        else value
        for name, value in values.items()
        if value is not None
    }
    fields["position_ids"] = whole.position_ids[:, own]
    # A mask is given also where no token is padding. Without one transformers would take this rank's
    # positions, which are a part of the row's, for those of packed rows.
    fields["attention_mask"] = torch.ones_like(whole.position_ids) if whole.padding is None else whole.padding
    fields["shift_labels"] = F.pad(targets, (0, filler), value=IGNORE_INDEX)[:, own]
    if weights is not None:
        fields[WEIGHTS_KEY] = F.pad(weights, (0, filler))[:, own]
    return BatchPart(fields, whole, counted)


# Whether a caller's loss is computed: of whole rows, the same on all ranks that share them.
OF_WHOLE_ROWS: ContextVar[bool] = ContextVar("fsdp_sft_whole_rows_of_a_loss", default=False)


def whole_rows(values: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Values of all tokens ``(..., n * S)`` from those of each rank's part ``(..., S)``, in their order.

    Each rank of the group may go on with its own copy of a computation: the backward sums the gradients of
    all ranks' copies, and each rank takes those of its part.

    Collective: all ranks of the group; its backward too.
    """
    each = values.unsqueeze(0).expand(group.size, *values.shape).contiguous()
    return group.exchange(each).movedim(0, -2).flatten(-2)


def part_on_device(part: BatchPart, device: torch.device) -> BatchPart:
    """A copy of ``part``, which is on the host, with its tensors on ``device``."""
    if device.type == "cpu":
        return part
    whole = part.whole
    fields = {
        name: travelling(value, device) if isinstance(value, torch.Tensor) else value
        for name, value in part.items()
    }
    moved = replace(
        whole,
        position_ids=travelling(whole.position_ids, device),
        rows=None if whole.rows is None else travelling(whole.rows, device),
        padding=None if whole.padding is None else travelling(whole.padding, device),
    )
    return BatchPart(
        fields,
        moved,
        counted=travelling(part.counted, device),
        targets=facts_of(part["shift_labels"].reshape(-1), device),
    )


def _of_each_token(batch: Batch, name: str, shape: tuple[int, ...]) -> Any:
    """A tensor with one entry a token, ``(B, S, ...)``; other values are returned as they are.

    Positions and a mask may be one row for all, ``(S,)`` or ``(1, S)``.
    """
    value, of_rows = batch.get(name), name in _OF_ALL_ROWS
    if value is None or not (of_rows or isinstance(value, torch.Tensor)):
        return value
    found = tuple(getattr(value, "shape", ()))
    if of_rows and found in (shape[1:], (1, *shape[1:])):
        return value.expand(shape)
    if found[:2] != shape or (of_rows and len(found) > 2):
        raise BatchError(
            f"context parallelism cuts what has one entry a token, {shape}; {name!r} has "
            f"{found or type(value).__name__}. {'Give it so' if of_rows else 'Leave it out of the batch'}, "
            "or train without context parallelism"
        )
    return value
