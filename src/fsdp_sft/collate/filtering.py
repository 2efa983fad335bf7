"""Leave out the rows that must not reach the sampler, and count them by reason."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from typing_extensions import Unpack

from fsdp_sft._model.view import tokenizer_of
from fsdp_sft.collate.encode import EncodedChat, encode_rows, selected_turns, truncate, turns_of_roles
from fsdp_sft.collate.notes import NOTES, WARNED_OF_ROWS, warn
from fsdp_sft.collate.options import EncodeKeywords, EncodeOptions, check_choice, options_of
from fsdp_sft.collate.rows import check_encoded, is_encoded, read_row
from fsdp_sft.errors import RowError, printable, row_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = TypeVar("Row")

_EXAMPLES = 20

REFUSALS = {
    "no_assistant_turn": "no message is the assistant's",
    "no_turn_of_the_roles": "no message has a role that is trained",
    "switched_off": "each message that would be trained has the weight 0",
    "truncated_away": "max_length leaves no trained token",
    "no_trained_token": "such as an empty answer without an end of turn",
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
        """The counts as JSON holds them, for `of`."""
        indices = {reason: list(values) for reason, values in self.indices.items()}
        return {"counts": dict(self), "indices": indices, "examples": self.examples}

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> FilterCounts:
        """The counts that `described` has returned."""
        made = cls()
        made.update(described["counts"])
        made.indices = {reason: array("q", values) for reason, values in described["indices"].items()}
        made.examples = {reason: list(texts) for reason, texts in described["examples"].items()}
        return made

    def join(self, others: FilterCounts) -> None:
        """Add the counts of further rows, which come after those counted so far."""
        for reason, number in others.items():
            self[reason] = self.get(reason, 0) + number
        for reason, indices in others.indices.items():
            self.indices.setdefault(reason, array("q")).extend(indices)
        for reason, texts in others.examples.items():
            mine = self.examples.setdefault(reason, [])
            mine += texts[: _EXAMPLES - len(mine)]

    def add(self, reason: str, index: int, text: str = "") -> None:
        """Count a row under a reason or note, with ``text`` as its example if that is not empty."""
        self[reason] = self.get(reason, 0) + 1
        if reason == "kept":
            return
        self.indices.setdefault(reason, array("q")).append(index)
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(f"row {index}: {text or REFUSALS.get(reason) or NOTES[reason]}")

    def first_examples(self) -> str:
        """The first example of each reason, a line each."""
        return "".join(f"\n  {texts[0]}" for texts in self.examples.values())


def warn_of_notes(counts: FilterCounts, names: Iterable[str]) -> None:
    """Warn of the notes `names` that were counted; of some only if over half of the kept rows have them."""
    for name in names:
        # A few such rows do no harm: some templates end answers only if a question follows, and some answers
        # begin with white space that any tokenizer joins with the prompt's.
        is_common = name in ("no_end_of_turn", "start_in_a_token")
        if counts.get(name, 0) > (counts["kept"] / 2 if is_common else 0):
            warn(f"{counts[name]} of {counts['kept']} rows are counted as {name}: {NOTES[name]}")


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
        rank 0 reports the notes "end_of_answer_alone", "longer_than_model" and "special_tokens" and, if more
        than half of the kept rows have them, "no_end_of_turn" and "start_in_a_token".

    Raises:
        RowError: For a row that is malformed, too long or more than text; it has the row's index.
        ChatTemplateError: For a row that the template refuses, or of which it does not print a text. Also,
            whatever `on_error` is, if there is no template or it does not parse.
        ValueError: If no row is left, with the counts.

    Example:
        >>> silent = {"messages": [{"role": "user", "content": "Hello?"}]}
        >>> kept, counts = fs.filter_rows([*rows, silent], tokenizer, max_length=64)
        >>> dict(counts)
        {'kept': 8, 'no_assistant_turn': 1}
    """
    tokenizer = tokenizer_of(tokenizer)
    wanted = options_of("filter_rows", options, max_length=max_length, on_dropped=on_dropped)
    check_choice("on_error", on_error, ("raise", "count"))
    kept: list[Row] = []
    counts = FilterCounts()
    for index, row in enumerate(rows):
        reason, chat = judge_row(row, index, tokenizer, wanted, counts, on_error)
        if reason == "kept" and chat is not None:
            kept.append(row)
    if not kept:
        raise ValueError(
            f"no row has a target, counted {dict(counts)}; look at some with render_labels, and check "
            f"train_on, max_length and the weights of the messages{counts.first_examples()}"
        )
    warn_of_notes(counts, WARNED_OF_ROWS)
    return kept, counts


def judge_row(
    row: Any,
    index: int,
    tokenizer: PreTrainedTokenizerBase,
    options: EncodeOptions,
    counts: FilterCounts,
    on_error: str,
    encoded: EncodedChat | None = None,
) -> tuple[str, EncodedChat | None]:
    """Decide whether a row is kept, and count it.

    Args:
        row: The row.
        index: Index of the row, for counts and errors.
        tokenizer: A fast tokenizer.
        options: Options of `encode_chat`.
        counts: Counts so far, to which this row is added.
        on_error: "raise" or "count", as for `filter_rows`.
        encoded: The row as `encode_rows` returned it, if it has been encoded already.

    Returns:
        ("kept" or the reason why the row is not kept; the encoded and truncated row, or None if refused).

    Raises:
        ChatTemplateError: If there is no template, or it does not parse.
        RowError: For a row that is refused, with on_error="raise".
    """
    try:
        if isinstance(row, EncodedChat):
            check_encoded(row.input_ids, row.labels)
            encoded = row
        whole = encode_rows([row], tokenizer, options)[0] if encoded is None else encoded
        chat = truncate(whole, options)
    except Exception as unexpected:
        # A row may hold anything, so any exception is possible.
        error = unexpected
        if not isinstance(error, ValueError):
            error = ValueError(f"the row cannot be read: {type(unexpected).__name__}: {unexpected}")
        reason = error.reason if isinstance(error, RowError) else "malformed"
        if reason == "no_template":  # which is no row's fault
            raise
        if on_error == "raise":
            raise row_error(f"row {index}: {error}", reason) from unexpected
        counts.add(reason, index, printable(str(error)))
        return reason, None
    reason = "kept" if chat.num_targets else _why_empty(row, whole, options)
    counts.add(reason, index)
    for note in chat.notes if reason == "kept" else ():
        counts.add(note, index)
    return reason, chat


def _why_empty(row: Any, whole: EncodedChat, options: EncodeOptions) -> str:
    """Name in `REFUSALS` of the reason why an encoded row has no target."""
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
