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

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_sft._process.streams import host_copies, travelling
from fsdp_sft.attention.context_parallel import (
    SequenceGroup,
    WholeRows,
    part_of_rows,
    sequence_group_of,
)
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

    def in_forward(self) -> AbstractContextManager[None]:
        """Context of a forward that takes the part."""
        return part_of_rows(self.whole)

    def on_device(self, device: torch.device) -> "BatchPart":
        """A copy of this part, which is on the host, with its tensors on ``device``."""
        if device.type == "cpu":
            return self
        whole = self.whole
        moved = replace(
            whole,
            position_ids=travelling(whole.position_ids, device),
            rows=None if whole.rows is None else travelling(whole.rows, device),
            padding=None if whole.padding is None else travelling(whole.padding, device),
        )
        return BatchPart(
            {
                name: travelling(value, device) if isinstance(value, torch.Tensor) else value
                for name, value in self.items()
            },
            moved,
            counted=travelling(self.counted, device),
            targets=facts_of(self["shift_labels"].reshape(-1), device),
        )


class Rows:
    """How ranks have the rows of batches: each its own, or each of a group a part of the same.

    Attributes:
        ranks: Number of ranks that have the same rows.
        rank: Index of this rank among them. What is asked of whole rows, the first counts.
    """

    def __init__(self, group: SequenceGroup | None = None) -> None:
        self.group = group
        self.ranks, self.rank = (1, 0) if group is None else (group.size, group.rank)

    def part(self, batch: Batch) -> Batch:
        """What this rank computes of a batch: all, or a part, for which the host waits if it is on a device.

        A batch without a mask or without positions is read as transformers reads it: all tokens count, and
        positions ascend from 0. Filler at the end, a separate packed row, makes the length a multiple of the
        number of ranks.

        Raises:
            BatchError: If the batch has no labels or ids, or a tensor that cannot be cut along the tokens.
            PackingError: If a pack has an attention mask.
        """
        if self.group is None:
            return batch
        refuse_masked_pack(batch)
        targets, weights = targets_of(batch), weights_of(batch)
        ids: torch.Tensor = batch["input_ids"]
        size, width = ids.shape
        each = -(-width // self.ranks)
        filler = each * self.ranks - width
        own = slice(self.rank * each, (self.rank + 1) * each)
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
            group=self.group,
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
        fields["attention_mask"] = (
            torch.ones_like(whole.position_ids) if whole.padding is None else whole.padding
        )
        fields["shift_labels"] = F.pad(targets, (0, filler), value=IGNORE_INDEX)[:, own]
        if weights is not None:
            fields[WEIGHTS_KEY] = F.pad(weights, (0, filler))[:, own]
        return BatchPart(fields, whole, counted)

    def whole(self, values: torch.Tensor, length: int) -> torch.Tensor:
        """Values of all tokens ``(..., length)`` from those of what each rank computes, in their order.

        Each rank of a group may go on with its own copy of a computation: the backward sums the gradients of
        all ranks' copies, and each rank takes those of its part.

        Collective: all ranks of the group; its backward too.
        """
        if self.group is None:
            return values
        each = values.unsqueeze(0).expand(self.ranks, *values.shape).contiguous()
        return self.group.exchange(each).movedim(0, -2).flatten(-2)[..., :length]

    def share(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's share of what all ranks that have its rows have computed alike."""
        return value if self.group is None else value / self.ranks


def rows_of(model: nn.Module) -> Rows:
    """How ranks have the rows of a model's batches.

    Raises:
        UnsupportedModelError: If they share them and the model is not prepared for it.
    """
    return Rows(sequence_group_of(model))


# Whether a caller's loss is computed: of whole rows, the same on all ranks that share them.
OF_WHOLE_ROWS: ContextVar[bool] = ContextVar("fsdp_sft_whole_rows_of_a_loss", default=False)


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
