"""Leave out the rows that must not reach the sampler, and count them by reason."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch.utils.data import get_worker_info
from typing_extensions import Unpack

from fsdp_sft._model.view import tokenizer_of
from fsdp_sft.collate.encode import EncodedChat, encode_rows, reason_of
from fsdp_sft.collate.notes import NOTES, WARNED_OF_ROWS, warn
from fsdp_sft.collate.options import EncodeKeywords, EncodeOptions, check_choice, options_of
from fsdp_sft.errors import printable, row_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = TypeVar("Row")

_EXAMPLES = 20
_BLOCK_ROWS = 256  # encoded together

REFUSALS = {
    "no_target": "no message is to be trained, or it is empty",
    "truncated_away": "max_length leaves no trained token",
    "malformed": "not a row, or not a text",
    "media": "it has an image, a video or a sound, and text alone is encoded",
    "too_long": 'over max_length with truncation="error"',
    "refused_by_template": "the template does not take the conversation, or does not show what is trained",
    "no_reasoning": "an answer has no reasoning, with empty_reasoning='error'",
    "dropped_text": "the template leaves out a text of an answer",
}
"""Reasons why a row is not kept, by their names in `FilterCounts`."""


class FilterCounts(dict[str, int]):
    """Numbers of rows by outcome: a dict of "kept" and of the reasons and notes that occur.

    "kept" and the reasons in `fsdp_sft.collate.REFUSALS` add up to the number of rows. The notes in
    `fsdp_sft.collate.NOTES` are about kept rows, and are counted in addition.

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

    def described(self) -> dict[str, Any]:
        """The counts as JSON holds them, for `join`."""
        indices = {reason: list(values) for reason, values in self.indices.items()}
        return {"kept": self["kept"], "indices": indices, "examples": self.examples}

    def join(self, described: Mapping[str, Any]) -> None:
        """Add the counts of further rows, as their `described` has returned them."""
        self["kept"] += described["kept"]
        for reason, indices in described["indices"].items():
            self[reason] = self.get(reason, 0) + len(indices)
            self.indices.setdefault(reason, array("q")).extend(indices)
            mine = self.examples.setdefault(reason, [])
            mine += described["examples"][reason][: _EXAMPLES - len(mine)]

    def add(self, reason: str, index: int, text: str = "") -> None:
        """Count a row under a reason or note, with ``text`` as its example if that is not empty."""
        self[reason] = self.get(reason, 0) + 1
        if reason == "kept":
            return
        self.indices.setdefault(reason, array("q")).append(index)
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(f"row {index}: {text or REFUSALS.get(reason) or NOTES.get(reason, reason)}")

    def first_examples(self) -> str:
        """The first example of each reason, a line each."""
        return "".join(f"\n  {texts[0]}" for texts in self.examples.values())


def warn_of_notes(counts: Mapping[str, int], names: Iterable[str]) -> list[str]:
    """Warn of those of the notes `names` that were counted, and return them."""
    warned = []
    for name in names:
        # A few such rows do no harm: some templates end answers only if a question follows, and some answers
        # begin with white space that any tokenizer joins with the prompt's.
        is_common = name in ("no_end_of_turn", "start_in_a_token")
        # Of those nearly all rows of a template have one or none, so the first of a loader's workers tells.
        worker = get_worker_info()
        if is_common and worker is not None and worker.id > 0:
            continue
        if counts.get(name, 0) > (counts["kept"] / 2 if is_common else 0):
            warn(f"{counts[name]} of {counts['kept']} rows are counted as {name}: {NOTES[name]}")
            warned.append(name)
    return warned


def filter_rows(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    on_error: Literal["raise", "count"] = "raise",
    on_dropped: Literal["error", "count", "ignore"] = "error",
    **options: Unpack[EncodeKeywords],
) -> tuple[list[Row], FilterCounts]:
    """Leave out the rows that would train nothing, before the sampler distributes rows to ranks.

    Args:
        rows: Rows as `encode_chat` takes them, and `EncodedChat`s.
        tokenizer: A fast tokenizer.
        max_length: Most tokens to keep; None keeps all.
        on_error: What to do with a row that `encode_chat` would refuse: "raise", or drop and "count" it.
        on_dropped: What to do with a row if the template leaves out a text of an answer: "error" treats it as
            a refused row, "count" keeps and counts it, "ignore" keeps it.
        **options: Further options of `encode_chat`; give the same to the collator.

    Returns:
        (the rows that have a target after truncation and shift, unchanged; a `FilterCounts`). A warning on
        rank 0 reports the notes "longer_than_model" and "special_tokens" and, if more than half of the kept
        rows have them, "no_end_of_turn" and "start_in_a_token".

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
            f"no row has a target, counted {dict(counts)}; look at some with render_labels, and check "
            f"train_on, max_length and the weights of the messages{counts.first_examples()}"
        )
    warn_of_notes(counts, WARNED_OF_ROWS)
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
            if isinstance(chat, ValueError):
                if on_error == "raise":
                    raise row_error(f"row {index}: {chat}", reason_of(chat)) from chat
                counts.add(reason_of(chat), index, printable(str(chat)))
            elif not chat.num_targets:
                counts.add("truncated_away" if "truncated_away" in chat.notes else "no_target", index)
            else:
                counts.add("kept", index)
                for note in chat.notes:
                    counts.add(note, index)
                yield row, chat
        first += len(block)
