"""What a loader gets: the rows that train something, and padded batches of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from typing_extensions import Unpack

from fsdp_sft._model.view import tokenizer_of
from fsdp_sft.collate.encode import EncodedChat, encode_all, encode_rows
from fsdp_sft.collate.notes import NOTES, warn_of_notes
from fsdp_sft.collate.options import EncodeKeywords, EncodeOptions, check_choice, check_count, options_of
from fsdp_sft.errors import RowError
from fsdp_sft.targets import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = TypeVar("Row")

_EXAMPLES = 20
_BLOCK_ROWS = 256  # encoded together

REFUSALS = {
    "no_target": "no message is to be trained, or none has a text",
    "truncated_away": "max_length leaves no trained token",
    "malformed": "not a row, or not a text",
    "media": "it has an image, a video or a sound, and text alone is encoded",
    "too_long": 'over max_length with truncation="error"',
    "refused_by_template": "the template does not take the conversation, or does not show what is trained",
    "dropped_text": "the template leaves out a text of an answer",
}
"""Reasons why a row is not kept, by their names in `FilterCounts`."""


class FilterCounts(dict[str, int]):
    """Numbers of rows by outcome: a dict of "kept" and of the reasons and notes that occur.

    "kept" and the reasons in `fsdp_sft.collate.collator.REFUSALS` add up to the number of rows. The notes in
    `fsdp_sft.collate.notes.NOTES` are about kept rows, and are counted in addition.

    Attributes:
        indices: Indices of the rows, by reason or note.
        examples: Descriptions of the first 20 rows, by reason or note, such as "row 7: what is wrong".

    Example:
        >>> broken = {"messages": []}
        >>> kept, counts = fs.filter_rows([*rows, broken], tokenizer, on_error="count")
        >>> dict(counts)
        {'kept': 8, 'malformed': 1}
        >>> list(counts.indices["malformed"])
        [8]
    """

    def __init__(self) -> None:
        super().__init__(kept=0)
        self.indices: dict[str, array[int]] = {}
        self.examples: dict[str, list[str]] = {}

    def add(self, reason: str, indices: Sequence[int], examples: Sequence[str]) -> None:
        """Count rows under a reason or note."""
        self[reason] = self.get(reason, 0) + len(indices)
        self.indices.setdefault(reason, array("q")).extend(indices)
        known = self.examples.setdefault(reason, [])
        known += examples[: _EXAMPLES - len(known)]

    def __str__(self) -> str:
        """The numbers, and the first example of each reason, a line each."""
        return f"{dict(self)}" + "".join(f"\n  {texts[0]}" for texts in self.examples.values())


def filter_rows(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    on_error: Literal["raise", "count"] = "raise",
    on_dropped: Literal["error", "count"] = "error",
    **options: Unpack[EncodeKeywords],
) -> tuple[list[Row], FilterCounts]:
    """Leave out the rows that would train nothing, before the sampler distributes rows to ranks.

    Args:
        rows: Rows as `encode_chat` takes them, and `EncodedChat`s.
        tokenizer: A fast tokenizer.
        max_length: Most tokens to keep; None keeps all.
        on_error: What to do with a row that `encode_chat` would refuse: "raise", or drop and "count" it.
        on_dropped: What to do with a row if the template leaves out a text of an answer: "error" treats it as
            a refused row, "count" keeps and counts it.
        **options: Further options of `encode_chat`; give the same to the collator.

    Returns:
        (the rows that have a target after truncation and shift, unchanged; a `FilterCounts`). A warning on
        rank 0 reports each note but "dropped", "empty_reasoning" and "answer_cut_off"; "no_end_of_turn" and
        "start_in_a_token" if more than half of the kept rows have them.

    Raises:
        RowError: For a row that is malformed, too long or more than text; it has the row's index.
        ChatTemplateError: For a row that the template refuses, or of which it does not print a text. Also,
            whatever `on_error` is, if there is no template or it does not parse.
        ValueError: If no row is left, with the counts.

    Example:
        >>> silent = {"messages": [{"role": "user", "content": "Hello?"}]}
        >>> kept, counts = fs.filter_rows([*rows, silent], tokenizer, max_length=64)
        >>> dict(counts)
        {'kept': 8, 'no_target': 1}
    """
    tokenizer = tokenizer_of(tokenizer)
    wanted = options_of("filter_rows", options, max_length=max_length, on_dropped=on_dropped)
    check_choice("on_error", on_error, ("raise", "count"))
    counts = FilterCounts()
    kept = [row for row, _ in kept_rows(rows, tokenizer, wanted, counts, on_error=on_error)]
    if not kept:
        raise ValueError(
            "no row has a target; look at some with render_labels, and check train_on, max_length and the "
            f"weights of the messages; counted {counts}"
        )
    warn_of_notes(counts, {"answer_cut_off"})
    return kept, counts


def kept_rows(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    options: EncodeOptions,
    counts: FilterCounts,
    *,
    first: int = 0,
    on_error: str = "count",
) -> Iterator[tuple[Row, EncodedChat]]:
    """The rows that have a target, each with its encoding; what becomes of each row is counted.

    Args:
        rows: The rows.
        tokenizer: A fast tokenizer.
        options: Options of `encode_chat`.
        counts: Counts so far, to which the rows are added.
        first: Index of the first row, for counts and errors.
        on_error: "raise" or "count", as for `filter_rows`.

    Raises:
        ChatTemplateError: If there is no template, or it does not parse.
        RowError: For a row that is refused, with on_error="raise".
    """
    remaining = iter(rows)
    while block := list(islice(remaining, _BLOCK_ROWS)):
        for index, (row, chat) in enumerate(
            zip(block, encode_rows(block, tokenizer, options), strict=True), first
        ):
            if isinstance(chat, RowError):
                if on_error == "raise":
                    raise type(chat)(f"row {index}: {chat}", reason=chat.reason) from chat
                counts.add(chat.reason, [index], [f"row {index}: {chat}"])
            elif not chat.num_targets:
                reason = "truncated_away" if "truncated_away" in chat.notes else "no_target"
                counts.add(reason, [index], [f"row {index}: {REFUSALS[reason]}"])
            else:
                counts["kept"] += 1
                for note in chat.notes:
                    counts.add(note, [index], [f"row {index}: {NOTES.get(note, note)}"])
                yield row, chat
        first += len(block)


class SFTCollator:
    """Turns rows into a batch that is padded on the right; for the `collate_fn` of a DataLoader.

    Padding is masked by row length and never by token id, since the end-of-sequence token is often the
    padding token. Rows without a target are kept; `filter_rows` removes them beforehand.

    Args:
        tokenizer: A fast tokenizer.
        max_length: Most tokens of a row; longer ones are truncated.
        pad_to_multiple_of: Rounds the length of the longest row up to a multiple, beyond max_length if need
            be; `max_length` itself gives all batches that length.
        on_dropped: What to do if the template does not print a text of a trained message: "error" raises,
            "count" keeps the row; give what `filter_rows` was given.
        **options: Further options of `encode_chat`. Each note of `fsdp_sft.collate.notes.NOTES` is warned of
            once; with `truncation` among the options not so that `max_length` leaves nothing of an answer.

    Raises:
        ValueError: For an option that is not allowed.

    Example:
        >>> collate = fs.SFTCollator(tokenizer, max_length=64, pad_to_multiple_of=8)
        >>> batch = collate(rows[:2])
        >>> sorted(batch)
        ['attention_mask', 'input_ids', 'labels']
        >>> batch["labels"].shape[1] % 8
        0
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        pad_to_multiple_of: int | None = None,
        on_dropped: Literal["error", "count"] = "error",
        **options: Unpack[EncodeKeywords],
    ) -> None:
        self.tokenizer = tokenizer_of(tokenizer)
        self.pad_to_multiple_of = (
            1 if pad_to_multiple_of is None else check_count("pad_to_multiple_of", pad_to_multiple_of)
        )
        self._told: set[str] = {"answer_cut_off"} if "truncation" in options else set()
        self._options = options_of("SFTCollator", options, max_length=max_length, on_dropped=on_dropped)

    def __call__(self, rows: Sequence[Mapping[str, Any] | EncodedChat]) -> dict[str, torch.Tensor]:
        """Encode the chat rows, and pad all rows.

        Args:
            rows: B chat rows, rows with input_ids and labels, or `EncodedChat`s.

        Returns:
            `input_ids`, `attention_mask` and `labels`, each int64 (B, S).

        Raises:
            ValueError: For a row that `encode_chat` refuses.
        """
        chats = encode_all(rows, self.tokenizer, self._options, self._told)
        length = max(len(chat.input_ids) + -len(chat.input_ids) % self.pad_to_multiple_of for chat in chats)
        return {
            # Any id will do where the mask is 0.
            "input_ids": padded([chat.input_ids for chat in chats], length, self.tokenizer.pad_token_id or 0),
            "attention_mask": padded([[1] * len(chat.input_ids) for chat in chats], length, 0),
            "labels": padded([chat.labels for chat in chats], length, IGNORE_INDEX),
        }


def padded(rows: Iterable[Iterable[int]], length: int, filler: int) -> torch.Tensor:
    """Rows as one tensor ``(B, length)``, filled up with ``filler``."""
    # Through one buffer, since torch.tensor(lists) converts item by item and takes several times as long.
    flat = array("q")
    for row in map(list, rows):
        flat.extend(row + [filler] * (length - len(row)))
    return torch.frombuffer(flat, dtype=torch.int64).view(-1, length)
