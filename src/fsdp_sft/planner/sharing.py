"""One rank's part of a row on the meta device: the library's own context parallelism, without other ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_sft._compat.attention import attention_of
from fsdp_sft.attention.context_parallel import SequenceGroup, WholeRows, part_of_rows, share_attention
from fsdp_sft.planner.ledger import EXCHANGE, Event, Ledger


@dataclass(frozen=True)
class PaperGroup(SequenceGroup):
    """The first of several ranks that share rows; its exchanges return new tensors of the right size.

    Attributes:
        ledger: The ledger that records the exchanges.
    """

    ledger: Ledger

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a new tensor like ``rows``, in the forward and in the backward."""
        return exchange_on_paper(rows, self.ledger)


def exchange_on_paper(rows: torch.Tensor, ledger: Ledger) -> torch.Tensor:
    """A new tensor like ``rows``; the forward and the backward each record an exchange."""
    received: torch.Tensor = _Exchange.apply(rows, ledger)
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ledger: Ledger) -> torch.Tensor:
        ctx.ledger = ledger
        return _exchanged(rows, ledger)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(grads[0].contiguous(), ctx.ledger), None


def _exchanged(rows: torch.Tensor, ledger: Ledger) -> torch.Tensor:
    """A new tensor like ``rows``, and a record of the exchange."""
    received = torch.empty_like(rows)
    ledger.note(EXCHANGE, (rows,), (received,))
    return received


def part_of_micro_batch(
    *, batch_size: int, seq_length: int, ranks: int, padded: bool, ledger: Ledger
) -> tuple[WholeRows, dict[str, torch.Tensor]]:
    """The whole rows as a group knows them, and one rank's part of the batch, as ``loss/part.py`` cuts it."""
    each = -(-seq_length // ranks)
    length = each * ranks
    whole = WholeRows(
        group=PaperGroup("on paper", ranks, 0, 0, ledger),
        length=length,
        position_ids=torch.zeros((batch_size, length), dtype=torch.int64, device="meta"),
        rows=None,
        padding=torch.ones((batch_size, length), dtype=torch.bool, device="meta") if padded else None,
        filler=length - seq_length,
    )
    return whole, {
        "input_ids": torch.zeros((batch_size, each), dtype=torch.int64, device="meta"),
        "position_ids": torch.zeros((batch_size, each), dtype=torch.int64, device="meta"),
        "attention_mask": torch.ones_like(whole.position_ids if whole.padding is None else whole.padding),
    }


@contextmanager
def forward_of_part(model: Any, whole: WholeRows) -> Iterator[None]:
    """Context in which the model's forward is that of one rank's part of ``whole``.

    Raises:
        UnsupportedModelError: If the model's attention cannot be run on a part.
    """
    before = attention_of(model)
    try:
        share_attention(model)
        with part_of_rows(whole):
            yield
    finally:
        model.set_attn_implementation(before)


def sent_bytes(events: list[Event], sizes: list[int]) -> int:
    """Bytes that the exchanges among these events send, including what a rank sends to itself."""
    return sum(sizes[number] for event in events if event.op == EXCHANGE for number in event.inputs)
