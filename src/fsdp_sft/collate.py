"""Chat rows to input_ids and labels: what is trained, padding, truncation, and a way to look at it.

Labels are aligned with input_ids, as in Hugging Face; the shift by one happens once, in the loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from fsdp_sft._chat_rows import ROLES, Conversation, is_encoded, read_encoded, read_row
from fsdp_sft._chat_template import ChatTemplate, ChatTemplateError, common_length, describe_tokenizer
from fsdp_sft._spans import Turn, find_turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "IGNORE_INDEX",
    "ChatTemplateError",
    "EncodedChat",
    "SFTCollator",
    "encode_chat",
    "filter_rows",
    "render_labels",
]

IGNORE_INDEX = -100
"""The label of a position that is not trained; the default of `torch.nn.functional.cross_entropy`."""

TrainOn = Literal["assistant", "last", "all"] | Iterable[str]
Row = TypeVar("Row")


@dataclass(frozen=True)
class EncodedChat:
    """A tokenised conversation.

    Attributes:
        input_ids: Token ids of the whole conversation, (S,).
        labels: The same ids where trained and -100 elsewhere, (S,), not shifted.
    """

    input_ids: list[int]
    labels: list[int]

    @property
    def num_targets(self) -> int:
        """Trained positions after the shift; the first token has nothing before it to be told from."""
        return sum(label != IGNORE_INDEX for label in self.labels[1:])


@dataclass(frozen=True)
class _Options:
    train_on: str | frozenset[str]
    train_eot: bool
    max_length: int | None
    truncation: str
    chat_template: str | None

    @classmethod
    def check(
        cls,
        train_on: TrainOn,
        train_eot: bool,
        max_length: int | None,
        truncation: str,
        chat_template: str | None,
    ) -> _Options:
        if not isinstance(train_on, str | Iterable):
            raise ValueError(f"train_on must be a str or a set of roles, got {train_on!r}")
        roles = train_on if isinstance(train_on, str) else frozenset(train_on)
        if isinstance(roles, str):
            _check_choice("train_on", roles, ("assistant", "last", "all"), hint="; give roles as a set")
        elif not roles or roles - set(ROLES):
            raise ValueError(f"train_on must be a set of roles out of {ROLES}, got {sorted(map(str, roles))}")
        if not isinstance(train_eot, bool):
            raise ValueError(f"train_eot must be True or False, got {train_eot!r}")
        if max_length is not None:
            _check_count("max_length", max_length)
        _check_choice("truncation", truncation, ("right", "left", "error"))
        if chat_template is not None and not isinstance(chat_template, str):
            raise ValueError(
                f"chat_template must be a Jinja template as a str, got {type(chat_template).__name__}"
            )
        return cls(roles, train_eot, max_length, truncation, chat_template)


def _check_choice(name: str, value: Any, allowed: tuple[str, ...], hint: str = "") -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def encode_chat(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn = "assistant",
    train_eot: bool = True,
    max_length: int | None = None,
    truncation: str = "right",
    chat_template: str | None = None,
) -> EncodedChat:
    """Tokenise a chat row and label what the model is to learn.

    The conversation is rendered with the chat template and tokenised once, without adding special tokens
    (the template writes its own). An assistant turn is trained from the end of the generation prompt through
    the token on which generation stops, if the template writes one. A token that reaches over the start is
    not trained.

    Args:
        row: `messages`, `conversations` (ShareGPT), `instruction`/`output` (Alpaca), `prompt`/`completion`,
            or `input_ids`/`labels`, which pass through with truncation only. `tools` may be a list or JSON.
            `train`, `weight` or `loss_weight` of 0 switches a message off; 1 leaves it to `train_on`.
        tokenizer: A fast tokenizer.
        train_on: "assistant": every assistant turn, tool calls included and tool results not; "last": the
            last assistant turn; "all": every token; or a set of roles, of which all but the assistant's are
            trained without white space in front.
        train_eot: Whether the end-of-turn token is trained.
        max_length: Most tokens to keep; None keeps all.
        truncation: "right" drops the end, "left" the beginning, "error" raises.
        chat_template: Takes the place of the tokenizer's template.

    Returns:
        Ids and labels of equal length. Without a trained turn all labels are -100.

    Raises:
        ChatTemplateError: If the trained tokens cannot be told for sure, or the template refuses the row.
        ValueError: For a malformed row or option, a missing template, a slow tokenizer, or a row over
            max_length with truncation="error".
    """
    options = _Options.check(train_on, train_eot, max_length, truncation, chat_template)
    return _truncate(_encode(row, tokenizer, options), options)


def _encode(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, options: _Options) -> EncodedChat:
    if is_encoded(row):
        return EncodedChat(*read_encoded(row))
    conversation = read_row(row)
    if not tokenizer.is_fast:
        raise ValueError(
            f"{describe_tokenizer(tokenizer)} gives no character offsets, which labels need; "
            "load the fast version (AutoTokenizer does, where a tokenizer.json exists)"
        )
    template = ChatTemplate(tokenizer, options.chat_template, conversation.tools)
    everything = options.train_on == "all"
    wanted = _off(conversation) if everything else _selected(conversation, options)
    text, turns = find_turns(template, conversation, wanted)
    ids, offsets = _tokenise(tokenizer, text)
    if everything:
        trained = [not off for off in _mark_tokens(offsets, turns, with_stop=True)]
    else:
        trained = _mark_tokens(offsets, turns, with_stop=options.train_eot)
    return EncodedChat(ids, [token if on else IGNORE_INDEX for token, on in zip(ids, trained, strict=True)])


def _off(conversation: Conversation) -> list[int]:
    return [index for index, on in enumerate(conversation.trainable) if not on]


def _of_roles(conversation: Conversation, options: _Options) -> list[int]:
    roles = options.train_on if isinstance(options.train_on, frozenset) else {"assistant"}
    indices = [i for i, message in enumerate(conversation.messages) if message["role"] in roles]
    return indices[-1:] if options.train_on == "last" else indices


def _selected(conversation: Conversation, options: _Options) -> list[int]:
    return [index for index in _of_roles(conversation, options) if conversation.trainable[index]]


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids: list[int] = encoding["input_ids"]
    offsets: list[tuple[int, int]] = encoding["offset_mapping"]
    # Byte-level tokenizers with trim_offsets leave the space of "Ġword" out of its offsets.
    position = 0
    for index, (start, end) in enumerate(offsets):
        if start > position and text[position:start].isspace():
            token = str(tokenizer.convert_ids_to_tokens(ids[index]))
            spaces = len(token) - len(token.lstrip("Ġ"))
            offsets[index] = (max(position, start - spaces), end)
        position = end if end > position else position
    return ids, offsets


def _mark_tokens(offsets: Sequence[tuple[int, int]], turns: Sequence[Turn], *, with_stop: bool) -> list[bool]:
    """Tell for each token whether it starts inside a turn; offsets and turns in the order of the text."""
    marks, waiting = [], iter(turns)
    turn = next(waiting, None)
    for start, end in offsets:
        while turn is not None and turn.end <= start:
            turn = next(waiting, None)
        inside = turn is not None and turn.start <= start < end
        if inside and turn is not None and not with_stop and turn.stop_start < turn.end:
            # A token that strips the white space around it may start before the end-of-turn token does.
            inside = end <= turn.stop_start
        marks.append(inside)
    return marks


def _truncate(chat: EncodedChat, options: _Options) -> EncodedChat:
    limit, length = options.max_length, len(chat.input_ids)
    if limit is None or length <= limit:
        return chat
    if options.truncation == "error":
        raise ValueError(
            f"the row has {length} tokens, max_length is {limit}; raise max_length, drop the row, "
            'or truncate with "right" or "left"'
        )
    keep = slice(limit) if options.truncation == "right" else slice(length - limit, None)
    return EncodedChat(chat.input_ids[keep], chat.labels[keep])


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
        truncation: "right", "left" or "error".
        chat_template: Takes the place of the tokenizer's template.

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
        truncation: str = "right",
        chat_template: str | None = None,
    ) -> None:
        _check_count("max_length", max_length)
        _check_choice("padding", padding, ("longest", "max_length"))
        _check_choice("padding_side", padding_side, ("right", "left"))
        if pad_to_multiple_of is not None:
            _check_count("pad_to_multiple_of", pad_to_multiple_of)
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
        self._options = _Options.check(train_on, train_eot, max_length, truncation, chat_template)

    def __call__(self, rows: Sequence[Mapping[str, Any] | EncodedChat]) -> dict[str, torch.Tensor]:
        """Encode what is not encoded yet, and pad.

        Args:
            rows: Chat rows, rows with input_ids and labels, or `EncodedChat`s, B of them.

        Returns:
            `input_ids`, `attention_mask` and `labels`, each int64 (B, S).

        Raises:
            ValueError: Without rows, and as `encode_chat` does.
        """
        if not rows:
            raise ValueError("a batch needs at least one row, got none; check the sampler's batch size")
        chats = [
            _truncate(
                row if isinstance(row, EncodedChat) else _encode(row, self.tokenizer, self._options),
                self._options,
            )
            for row in rows
        ]
        longest = max(len(chat.input_ids) for chat in chats)
        length = self.max_length if self.padding == "max_length" else longest
        length += -length % self.pad_to_multiple_of
        pad_token_id = int(self.tokenizer.pad_token_id)
        return {
            "input_ids": self._pad([chat.input_ids for chat in chats], length, pad_token_id),
            "attention_mask": self._pad([[1] * len(chat.input_ids) for chat in chats], length, 0),
            "labels": self._pad([chat.labels for chat in chats], length, IGNORE_INDEX),
        }

    def _pad(self, rows: list[list[int]], length: int, filler: int) -> torch.Tensor:
        fill = [[filler] * (length - len(row)) for row in rows]
        left = self.padding_side == "left"
        padded = [pad + row if left else row + pad for row, pad in zip(rows, fill, strict=True)]
        return torch.tensor(padded, dtype=torch.int64)


def filter_rows(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn = "assistant",
    train_eot: bool = True,
    max_length: int | None = None,
    truncation: str = "right",
    chat_template: str | None = None,
) -> tuple[list[Row], dict[str, int]]:
    """Drop the rows that would train nothing, before the sampler deals them out.

    Args:
        rows: Rows as `encode_chat` takes them, and `EncodedChat`s.
        tokenizer: A fast tokenizer.
        train_on: As in `encode_chat`, like all that follow; give what the collator gets.
        train_eot: Whether the end-of-turn token is trained.
        max_length: Most tokens to keep; None keeps all.
        truncation: "right", "left" or "error".
        chat_template: Takes the place of the tokenizer's template.

    Returns:
        (the rows with a target after truncation and shift, counts). The counts have "kept", and those that
        occur of "no_assistant_turn" (or "no_turn_of_the_roles"), "switched_off" (a weight of 0 on every
        turn), "truncated_away", and "no_trained_token" (such as an empty answer without an
        end-of-turn token).

    Raises:
        ValueError: For a malformed row, with its index, or if no row is left, with the counts.
    """
    options = _Options.check(train_on, train_eot, max_length, truncation, chat_template)
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


def _why_empty(row: Any, tokenizer: PreTrainedTokenizerBase, options: _Options) -> str | None:
    whole = row if isinstance(row, EncodedChat) else _encode(row, tokenizer, options)
    if _truncate(whole, options).num_targets:
        return None
    if whole.num_targets:
        return "truncated_away"
    if isinstance(row, EncodedChat) or is_encoded(row):
        return "no_trained_token"
    conversation = read_row(row)
    if options.train_on != "all" and not _of_roles(conversation, options):
        return "no_assistant_turn" if isinstance(options.train_on, str) else "no_turn_of_the_roles"
    if options.train_on != "all" and not _selected(conversation, options):
        return "switched_off"
    return "no_trained_token"


def render_labels(
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Sequence[int] | torch.Tensor,
    labels: Sequence[int] | torch.Tensor,
    *,
    color: bool = True,
) -> str:
    """Show which tokens are trained, for a terminal.

    Args:
        tokenizer: Decodes the ids.
        input_ids: Ids of one row, (S,).
        labels: Labels of the row, aligned with the ids, (S,).
        color: Trained text green and underlined and the rest dim; False puts trained text in ⟦ and ⟧.

    Returns:
        The whole text, special tokens included.

    Raises:
        ValueError: If a label is neither -100 nor the id at its position.
    """
    ids, marks = (
        [int(item) for item in (values.tolist() if isinstance(values, torch.Tensor) else values)]
        for values in (input_ids, labels)
    )
    expected = [token if mark != IGNORE_INDEX else mark for token, mark in zip(ids, marks, strict=False)]
    if len(ids) != len(marks) or marks != expected:
        raise ValueError(
            f"each label must be {IGNORE_INDEX} or the id at its position, got other labels; "
            "pass the labels of one row as encode_chat returns them, not shifted"
        )
    styles = {True: ("\x1b[32;4m", "\x1b[0m"), False: ("\x1b[2m", "\x1b[0m")}
    pieces, shown, position = [], "", 0
    for trained, run in groupby(marks, key=lambda mark: mark != IGNORE_INDEX):
        position += len(list(run))
        # Decoding from the beginning keeps spaces, and characters whose bytes lie on both sides of an edge.
        text = str(tokenizer.decode(ids[:position], clean_up_tokenization_spaces=False))
        text = text if position == len(ids) else text.rstrip("\ufffd")
        before, after = styles[trained] if color else ("⟦", "⟧") if trained else ("", "")
        pieces.append(before + text[common_length(shown, text) :].replace("\x1b", "␛") + after)
        shown = text
    return "".join(pieces)
