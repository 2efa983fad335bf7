"""Collate rows into padded batches."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import Unpack

from fsdp_sft._model.view import tokenizer_of
from fsdp_sft._model.vocabulary import check_row
from fsdp_sft._process.words import answered
from fsdp_sft.collate.encode import EncodedChat, encode_all
from fsdp_sft.collate.filtering import warn_of_notes
from fsdp_sft.collate.options import EncodeKeywords, check_choice, check_count, options_of
from fsdp_sft.collate.template import describe_tokenizer
from fsdp_sft.targets import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WARNED_OF = {"answer_cut_off", "no_end_of_turn"}


class SFTCollator:
    """Turns rows into a padded batch; for the `collate_fn` of a DataLoader.

    Padding is masked by row length and never by token id, since the end-of-sequence token is often the
    padding token. Rows without a target are kept; `filter_rows` removes them beforehand.

    Args:
        tokenizer: A fast tokenizer with a padding token.
        max_length: Most tokens of a row; longer ones are truncated.
        padding: "longest" pads to the longest row of the batch, "max_length" to max_length.
        padding_side: "right" or "left". Models that count positions from the first column, or carry a state
            over the padding, are refused by `train_step` where rows are padded on the left.
        pad_to_multiple_of: Rounds the padded length up to a multiple, beyond max_length if need be.
        on_dropped: What to do if the template does not print a text of a trained message: "error" raises,
            "count" and "ignore" both keep the row; give what `filter_rows` was given.
        vocab_size: Number of embeddings of the model, such as `model.config.vocab_size`; a row with an id
            outside of them raises. None leaves that check to `train_step`.
        **options: Further options of `encode_chat`. Without `truncation` among them, the first row of which
            `max_length` leaves nothing of an answer is warned of; so is, once, a template that writes
            nothing after the last answer, on which generation could stop.

    Raises:
        ValueError: For an option that is not allowed, or a tokenizer without a padding token.

    Example:
        >>> collate = fs.SFTCollator(tokenizer, max_length=64, pad_to_multiple_of=8)
        >>> batch = collate(rows[:2])
        >>> sorted(batch)
        ['attention_mask', 'input_ids', 'labels']
        >>> batch["labels"].shape[1] % 8
        0
    """

    @answered
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        padding: str = "longest",
        padding_side: str = "right",
        pad_to_multiple_of: int | None = None,
        on_dropped: Literal["error", "count", "ignore"] = "error",
        vocab_size: int | None = None,
        **options: Unpack[EncodeKeywords],
    ) -> None:
        tokenizer = tokenizer_of(tokenizer)
        check_count("max_length", max_length)
        if vocab_size is not None:
            check_count("vocab_size", vocab_size)
        check_choice("padding", padding, ("longest", "max_length"))
        check_choice("padding_side", padding_side, ("right", "left"))
        if pad_to_multiple_of is not None:
            check_count("pad_to_multiple_of", pad_to_multiple_of)
        if tokenizer.pad_token_id is None:
            raise ValueError(
                f"{describe_tokenizer(tokenizer)} has no padding token; set one, for instance "
                "tokenizer.pad_token = tokenizer.eos_token (padding is masked by length, so sharing is safe)"
            )
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.padding = padding
        self.padding_side = padding_side
        self.pad_to_multiple_of = pad_to_multiple_of or 1
        self.vocab_size = vocab_size
        self._told: set[str] = {"answer_cut_off"} if "truncation" in options else set()
        self._options = options_of("SFTCollator", options, max_length=max_length, on_dropped=on_dropped)

    def __repr__(self) -> str:
        tokenizer = describe_tokenizer(self.tokenizer)
        return f"<{type(self).__name__}: {tokenizer}, max_length {self.max_length}, padding {self.padding}>"

    def __call__(self, rows: Sequence[Mapping[str, Any] | EncodedChat]) -> dict[str, torch.Tensor]:
        """Encode the chat rows, and pad all rows.

        Args:
            rows: B chat rows, rows with input_ids and labels, or `EncodedChat`s.

        Returns:
            `input_ids`, `attention_mask` and `labels`, each int64 (B, S).

        Raises:
            BatchError: For an id outside of `vocab_size`.
            ValueError: Without rows, and for a row that `encode_chat` refuses.
        """
        if not rows:
            raise ValueError("a batch needs at least one row, got none; check the sampler's batch size")
        chats = encode_all(rows, self.tokenizer, self._options)
        counts = Counter(note for chat in chats for note in chat.notes)
        self._told.update(warn_of_notes({**counts, "kept": len(chats)}, _WARNED_OF - self._told))
        if self.vocab_size is not None:
            for chat in chats:
                check_row(chat.input_ids, self.vocab_size)
        longest = max(len(chat.input_ids) for chat in chats)
        length = self.max_length if self.padding == "max_length" else longest
        length += -length % self.pad_to_multiple_of
        pad_token_id = int(self.tokenizer.pad_token_id)
        ones = array("q", [1])
        labels: list[Sequence[int]] = [chat.labels for chat in chats]
        if self.padding_side == "left":  # a row's first token has no target; here padding would predict it
            labels = [[IGNORE_INDEX, *row[1:]] if row else row for row in labels]
        return {
            "input_ids": self._pad([chat.input_ids for chat in chats], length, pad_token_id),
            "attention_mask": self._pad([ones * len(chat.input_ids) for chat in chats], length, 0),
            "labels": self._pad(labels, length, IGNORE_INDEX),
        }

    def _pad(self, rows: Sequence[Sequence[int]], length: int, filler: int) -> torch.Tensor:
        """Rows as one tensor ``(B, length)``, padded with ``filler`` on ``padding_side``."""
        # Through one buffer, since torch.tensor(lists) converts item by item and takes several times as long.
        flat = array("q")
        for row in rows:
            padding = array("q", [filler]) * (length - len(row))
            for part in (padding, row) if self.padding_side == "left" else (row, padding):
                flat.extend(part)
        return torch.frombuffer(flat, dtype=torch.int64).view(len(rows), length)
