"""Rows to padded batches, and the rows that must not reach the sampler."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fsdp_sft._vocabulary import check_row
from fsdp_sft.collate.encode import (
    IGNORE_INDEX,
    EncodedChat,
    EncodeOptions,
    TrainOn,
    check_choice,
    check_count,
    encode_row,
    encode_rows,
    selected_turns,
    truncate,
    turns_of_roles,
)
from fsdp_sft.collate.rows import is_encoded, read_row
from fsdp_sft.collate.template import describe_tokenizer
from fsdp_sft.errors import ChatTemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = TypeVar("Row")


class SFTCollator:
    """Turns rows into a padded batch; for the `collate_fn` of a DataLoader.

    Padding is told by length and never by token id, since the end-of-sequence token is often the padding
    token. Every row stays a row, also one without a target: see `filter_rows`.

    Args:
        tokenizer: A fast tokenizer with a padding token.
        max_length: Most tokens of a row.
        padding: "longest" pads to the longest row of the batch, "max_length" to max_length.
        padding_side: "right" or "left".
        pad_to_multiple_of: Rounds the padded length up to a multiple, beyond max_length if need be.
        train_on: As in `encode_chat`, like all that follow.
        train_eot: Whether the end-of-turn token is trained.
        train_reasoning: Whether reasoning is trained.
        truncation: "right", "left" or "error".
        chat_template: Takes the place of the tokenizer's template.
        row_format: Named, or None to detect it.
        vocab_size: Number of ids that the model has rows for, such as `model.config.vocab_size`; a row with
            another id raises. None leaves that to `train_step`.

    Raises:
        ValueError: For an option that is not allowed, or a tokenizer without a padding token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        padding: str = "longest",
        padding_side: str = "right",
        pad_to_multiple_of: int | None = None,
        train_on: TrainOn = "assistant",
        train_eot: bool = True,
        train_reasoning: bool = True,
        truncation: str = "right",
        chat_template: str | None = None,
        row_format: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
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
        self._options = EncodeOptions.check(
            train_on, train_eot, train_reasoning, max_length, truncation, chat_template, row_format
        )

    def __call__(self, rows: Sequence[Mapping[str, Any] | EncodedChat]) -> dict[str, torch.Tensor]:
        """Encode what is not encoded yet, and pad.

        Args:
            rows: Chat rows, rows with input_ids and labels, or `EncodedChat`s, B of them.

        Returns:
            `input_ids`, `attention_mask` and `labels`, each int64 (B, S). Where a row has weights other than
            0 and 1 also `loss_weights`, float32 (B, S), which are 1 for other rows.

        Raises:
            VocabularyError: For an id beyond `vocab_size`.
            ValueError: Without rows, and as `encode_chat` does.
        """
        if not rows:
            raise ValueError("a batch needs at least one row, got none; check the sampler's batch size")
        fresh = iter(
            encode_rows(
                [row for row in rows if not isinstance(row, EncodedChat)], self.tokenizer, self._options
            )
        )
        chats = [
            truncate(row if isinstance(row, EncodedChat) else next(fresh), self._options) for row in rows
        ]
        if self.vocab_size is not None:
            for chat in chats:
                check_row(chat.input_ids, self.vocab_size)
        longest = max(len(chat.input_ids) for chat in chats)
        length = self.max_length if self.padding == "max_length" else longest
        length += -length % self.pad_to_multiple_of
        pad_token_id = int(self.tokenizer.pad_token_id)
        ones = array("q", [1])
        batch = {
            "input_ids": self._pad([chat.input_ids for chat in chats], length, pad_token_id),
            "attention_mask": self._pad([ones * len(chat.input_ids) for chat in chats], length, 0),
            "labels": self._pad([chat.labels for chat in chats], length, IGNORE_INDEX),
        }
        if any(chat.loss_weights is not None for chat in chats):
            weights = [chat.loss_weights or [1.0] * len(chat.input_ids) for chat in chats]
            batch["loss_weights"] = self._pad(weights, length, 0.0, "f")
        return batch

    def _pad(
        self, rows: Sequence[Sequence[float]], length: int, filler: float, code: str = "q"
    ) -> torch.Tensor:
        # One buffer: torch.tensor(lists) looks at every item by itself and takes several times as long.
        flat: array[Any] = array(code)
        for row in rows:
            padding = array(code, [filler]) * (length - len(row))
            for part in (padding, row) if self.padding_side == "left" else (row, padding):
                flat.extend(part)
        dtype = torch.int64 if code == "q" else torch.float32
        if not flat:
            return torch.empty(len(rows), 0, dtype=dtype)
        return torch.frombuffer(flat, dtype=dtype).view(len(rows), length)


def filter_rows(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn = "assistant",
    train_eot: bool = True,
    train_reasoning: bool = True,
    max_length: int | None = None,
    truncation: str = "right",
    chat_template: str | None = None,
    row_format: str | None = None,
) -> tuple[list[Row], dict[str, int]]:
    """Drop the rows that would train nothing, before the sampler deals them out.

    Args:
        rows: Rows as `encode_chat` takes them, and `EncodedChat`s.
        tokenizer: A fast tokenizer.
        train_on: As in `encode_chat`, like all that follow; give what the collator gets.
        train_eot: Whether the end-of-turn token is trained.
        train_reasoning: Whether reasoning is trained.
        max_length: Most tokens to keep; None keeps all.
        truncation: "right", "left" or "error".
        chat_template: Takes the place of the tokenizer's template.
        row_format: Named, or None to detect it.

    Returns:
        (the rows with a target after truncation and shift, counts). The counts have "kept", and those that
        occur of "no_assistant_turn" (or "no_turn_of_the_roles"), "switched_off" (a weight of 0 on every
        turn), "truncated_away", and "no_trained_token" (such as an empty answer without an
        end-of-turn token).

    Raises:
        ValueError: For a malformed row, with its index, or if no row is left, with the counts.
    """
    options = EncodeOptions.check(
        train_on, train_eot, train_reasoning, max_length, truncation, chat_template, row_format
    )
    kept: list[Row] = []
    counts = Counter(kept=0)
    for index, row in enumerate(rows):
        try:
            reason = _why_empty(row, tokenizer, options)
        except ValueError as error:
            kind = ChatTemplateError if isinstance(error, ChatTemplateError) else ValueError
            raise kind(f"row {index}: {error}") from error
        counts[reason or "kept"] += 1
        if reason is None:
            kept.append(row)
    if not kept:
        raise ValueError(
            f"no row has a target, counted {dict(counts)}; look at some with render_labels, and check "
            "train_on, max_length and the weights of the messages"
        )
    return kept, dict(counts)


def _why_empty(row: Any, tokenizer: PreTrainedTokenizerBase, options: EncodeOptions) -> str | None:
    whole = row if isinstance(row, EncodedChat) else encode_row(row, tokenizer, options)
    if truncate(whole, options).num_targets:
        return None
    if whole.num_targets:
        return "truncated_away"
    if isinstance(row, EncodedChat) or is_encoded(row, options.row_format):
        return "no_trained_token"
    conversation = read_row(row, options.row_format)
    if options.train_on != "all" and not turns_of_roles(conversation, options):
        return "no_assistant_turn" if isinstance(options.train_on, str) else "no_turn_of_the_roles"
    if options.train_on != "all" and not selected_turns(conversation, options):
        return "switched_off"
    return "no_trained_token"
