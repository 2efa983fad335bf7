"""Encode chat rows as input_ids and labels, and truncate them."""

from __future__ import annotations

import json
import weakref
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from fsdp_sft._model.view import tokenizer_of
from fsdp_sft.collate.notes import notes_of, warn_of_notes
from fsdp_sft.collate.options import EncodeOptions, TrainOn
from fsdp_sft.collate.rows import (
    Conversation,
    as_text,
    read_row,
    refuse_media,
    shape_of,
    shortened,
    template_variables,
)
from fsdp_sft.collate.spans import Found, find_turns
from fsdp_sft.collate.template import ChatTemplate, describe_tokenizer, limited_time
from fsdp_sft.errors import RowError
from fsdp_sft.targets import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Token ids of texts, and the token at a given character.
#
# Labels need that token only at the edges of turns. A tokenizer that reports the offsets of all its tokens
# takes a fifth longer; where the bytes of the tokens are the text, they say the same.

_PIECES: weakref.WeakKeyDictionary[Any, dict[int, list[bytes]]] = weakref.WeakKeyDictionary()


def _pieces_of(tokenizer: PreTrainedTokenizerBase) -> list[bytes]:
    """The bytes of each token, by id; of a tokenizer that is not byte-level, some that are no text's."""
    of_size = _PIECES.setdefault(tokenizer, {})
    if len(tokenizer) not in of_size:  # tokens may have been added since
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        as_bytes = {ord(character): byte for byte, character in bytes_to_unicode().items()}
        tokens = {
            number: token.translate(as_bytes).encode("latin-1", "replace")
            for token, number in tokenizer.get_vocab().items()
        } | {number: token.content.encode() for number, token in tokenizer.added_tokens_decoder.items()}
        of_size[len(tokenizer)] = [tokens.get(number, b"") for number in range(max(tokens) + 1)]
    return of_size[len(tokenizer)]


@dataclass(slots=True)
class Tokens:
    """The tokens of one text, and where they begin.

    Attributes:
        ids: Token ids, (S,).
        text: The tokenised text.
        data: The same, or its bytes.
        begins: Where in `data` each token begins, with the space before its word, and where the last ends.
    """

    ids: list[int]
    text: str
    data: str | bytes
    begins: list[int]

    def first_from(self, position: int) -> int:
        """Index of the first token that starts at character `position` or later; S if none does."""
        return bisect_left(self.begins, self._at(position), hi=len(self.ids))

    def is_cut(self, position: int, first: int) -> bool:
        """Whether text from `position` on lies in a token that begins before it; `first` is the next one."""
        return bool(self.data[self._at(position) : self.begins[first]].strip())

    def _at(self, position: int) -> int:
        return position if isinstance(self.data, str) else len(self.text[:position].encode())


def _by_bytes(ids: list[int], text: str, pieces: list[bytes]) -> Tokens | None:
    """Tokens whose bytes make up the text; None if they do not."""
    parts, data = [pieces[number] for number in ids], text.encode()
    if b"".join(parts) != data:
        return None
    begins = list(accumulate(map(len, parts), initial=0))
    return Tokens(ids, text, text if len(text) == len(data) else data, begins)


def _by_offsets(encoding: Any, text: str, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokens at the characters that the tokenizer reports."""
    begins, before = [], 0
    for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        # Byte-level tokenizers with trim_offsets=True do not count the space of "Ġword" among its characters.
        if text[before:start].isspace():
            token = str(tokenizer.convert_ids_to_tokens(number))
            start = max(before, start - (len(token) - len(token.lstrip("Ġ"))))
        begins.append(start)
        before = end
    return Tokens(encoding.ids, text, text, [*begins, len(text)])


def tokenise(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, verbose: bool = False
) -> Iterator[Tokens]:
    """Tokenise texts in one call, without adding special tokens; with ``verbose`` long ones are warned of."""
    call = partial[Any](
        tokenizer.__call__,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=verbose,
    )
    pieces = _pieces_of(tokenizer)
    # This call gives the backend the tokenizer's own settings, as that for special tokens.
    by_bytes = (
        not verbose
        and (start := "".join(texts[:1])[:64])
        and _by_bytes(call(start)["input_ids"], start, pieces)
    )
    if by_bytes:
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    else:
        encodings = call(texts).encodings if texts else []
    return (
        _by_bytes(encoding.ids, text, pieces)
        or _by_offsets(call([text]).encodings[0] if by_bytes else encoding, text, tokenizer)
        for encoding, text in zip(encodings, texts, strict=True)
    )


@dataclass(frozen=True)
class EncodedChat:
    """A tokenised conversation.

    Attributes:
        input_ids: Token ids of the whole conversation, (S,).
        labels: The same ids where trained and -100 elsewhere, (S,), not shifted.
        notes: Remarks on the row: names of `fsdp_sft.collate.notes.NOTES`.

    Example:
        >>> chat = fs.EncodedChat(input_ids=[5, 6, 7], labels=[-100, 6, 7])
        >>> chat.num_targets
        2
    """

    input_ids: list[int]
    labels: list[int]
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_targets(self) -> int:
        """Targets after the shift; the first token is never one, since no token precedes it."""
        # list.count, since a generator over the labels would take as long as rendering the template.
        return (
            len(self.labels) - self.labels.count(IGNORE_INDEX) - (self.labels[:1] not in ([], [IGNORE_INDEX]))
        )


def read_encoded(row: Any) -> EncodedChat:
    """A row with `input_ids` and `labels`, or an `EncodedChat`.

    Raises:
        ValueError: If ids or labels are missing, belong not together or fit in no tensor, or if the row has
            weights, shifted labels or padding, or is a pack.
    """
    given = vars(row) if isinstance(row, EncodedChat) else row
    if not isinstance(given, Mapping) or any(given.get(key) is None for key in ("input_ids", "labels")):
        raise ValueError(
            f'a tokenised row needs "input_ids" and "labels", got {row!r:.80}; add labels aligned with '
            "input_ids (-100 where nothing is trained), or tokenise a chat row with encode_chat first"
        )
    unread = [key for key in ("loss_weights", "shift_labels") if given.get(key) is not None]
    if unread:
        raise ValueError(
            f"{unread[0]} of a row are not read, and it would be trained without: add loss_weights to the "
            "batch that the collator makes, in a collate_fn of your own, and write shift_labels as "
            "labels=[-100, *shift_labels[:-1]]"
        )
    mask, positions, lengths = (
        [] if values is None else list(values.tolist() if hasattr(values, "tolist") else values)
        for values in map(given.get, ("attention_mask", "position_ids", "seq_lengths"))
    )
    if mask.count(1) != len(mask) or positions != [*range(len(positions))] or len(lengths) > 1:
        raise ValueError(
            'the "attention_mask" of a tokenised row is 0 somewhere, and padding would be taken for text: '
            "rows are padded in a batch, so tokenise without padding="
            if 0 in mask
            else "a tokenised row is one conversation, and this is a pack of several (its position_ids begin "
            "anew, or its mask or seq_lengths number them), which would see each other: give PackedCollator "
            "the rows as they were before, or train_step a batch of your own"
        )
    refuse_media(given)
    ids, labels = (
        given[key].tolist() if hasattr(given[key], "tolist") else given[key]
        for key in ("input_ids", "labels")
    )
    for key, values in (("input_ids", ids), ("labels", labels)):
        try:
            # No loop of Python over the items, which would take as long as the rest of a collator.
            are_ids = (
                isinstance(values, Sequence)  # a set has no order, and of a dict come its keys
                and len(array("i", values)) == len(values)
                and bool not in set(map(type, values))
            )
        except (TypeError, OverflowError):
            are_ids = False
        if not are_ids:
            raise ValueError(f'"{key}" must be a flat list of integers of 32 bits, got {shortened(values)}')
    if len(ids) != len(labels) or not ids:
        raise ValueError(
            "a tokenised row needs input_ids and labels of one length of at least 1, "
            f"got {len(ids)} and {len(labels)}"
        )
    return EncodedChat(list(ids), list(labels), row.notes if isinstance(row, EncodedChat) else ())


def encode_chat(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn = "assistant",
    train_reasoning: bool = True,
    empty_reasoning: Literal["mask", "train"] = "mask",
    max_length: int | None = None,
    truncation: str = "right",
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_dropped: Literal["error", "count"] = "error",
) -> EncodedChat:
    """Tokenise a chat row and label the tokens that the model is to learn.

    The conversation is rendered with the chat template and tokenised once, without adding special tokens (the
    template writes its own). An assistant turn is trained from the end of the generation prompt through the
    token on which generation stops, if the template writes one. What a prompt does not have, the model must
    write: of a template without a generation prompt the header of an answer is trained too. If the tokenizer
    has no such token, the text that ends the turn is trained instead. A token that contains characters from
    both sides of the turn's start is not trained. Notes on the row, but for "dropped", "empty_reasoning" and
    "answer_cut_off", are warned of.

    Args:
        row: `messages`, `conversations` (ShareGPT), `instruction`/`output` (Alpaca), `prompt`/`completion`
            (two texts, or two lists of messages of which the first is not trained), `input_ids`/`labels`,
            which are only truncated, or `text`, of which every token is trained, with the tokenizer's own and
            `eos_token` at its end, whatever `train_on` says and without a chat template. `tools` may be a
            list or JSON. Nulls with which an Arrow table fills calls and tools are removed (a row is of one
            where a null stands beside its contents; arguments as JSON text keep theirs), others stay.
            `chat_template_kwargs` are the row's own variables for the template. A message with `train`,
            `weight` or `loss_weight` of 0 is not trained; 1 leaves it to `train_on`.
        tokenizer: A fast tokenizer.
        train_on: "assistant": every assistant turn, with its tool calls but not their results; "last": the
            last assistant turn; "all": every token; or a set of roles, of which all but the assistant's are
            trained without the white space in front of their texts.
        train_reasoning: Whether reasoning is trained, with the tags around it. Reasoning between ``<think>``
            and ``</think>`` at the beginning of a content is given to the template as the key that it reads
            (`reasoning_content`, `reasoning`, `thinking`), unless it finds it in the content itself.
        empty_reasoning: What to do with the empty block of reasoning, such as ``<think></think>``, that a
            template prints in front of an answer without reasoning, where the generation prompt does not have
            it: "mask" leaves it untrained, so that the model does not unlearn to reason, "train" trains it.
            ``train_on="all"`` trains it always.
        max_length: Most tokens to keep; None keeps all.
        truncation: "right" drops the end, "left" the beginning, "error" raises.
        chat_template: Template to use instead of the tokenizer's.
        chat_template_kwargs: Variables for the template, such as ``{"enable_thinking": False}``; the row's
            own take precedence.
        on_dropped: What to do if the template does not print a text of a trained message: content, reasoning,
            an argument of a call. "error" raises, "count" leaves a note. Reasoning before the last question,
            which templates leave out by design, never raises.

    Returns:
        Ids and labels of equal length. Without a trained turn all labels are -100.

    Raises:
        ChatTemplateError: If there is no template, it does not parse or refuses the row, it does not print a
            text that is trained, or the trained tokens cannot be determined with certainty.
        RowError: For a row over max_length with truncation="error", or with an image, a video or a sound.
        ValueError: For a malformed row or option, or a slow tokenizer.

    Example:
        >>> chat = fs.encode_chat(rows[0], tokenizer)
        >>> len(chat.labels) == len(chat.input_ids), chat.labels[0]
        (True, -100)
        >>> whole = fs.encode_chat(rows[0], tokenizer, train_on="all")
        >>> whole.num_targets > chat.num_targets
        True
    """
    tokenizer = tokenizer_of(tokenizer)
    options = EncodeOptions(
        train_on=train_on,
        train_reasoning=train_reasoning,
        empty_reasoning=empty_reasoning,
        max_length=max_length,
        truncation=truncation,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        on_dropped=on_dropped,
    )
    return encode_all([row], tokenizer, options, {"answer_cut_off"})[0]


def encode_all(
    rows: Sequence[Mapping[str, Any] | EncodedChat],
    tokenizer: PreTrainedTokenizerBase,
    options: EncodeOptions,
    told: set[str],
) -> list[EncodedChat]:
    """Each row encoded and cut to `max_length`, with a warning of each note that is not among those `told`.

    Raises:
        ValueError: For the first row that is refused, with its index if there are several.
    """
    chats = []
    for index, chat in enumerate(encode_rows(rows, tokenizer, options)):
        if isinstance(chat, RowError):
            place = f"row {index} of {len(rows)}: " if len(rows) > 1 else ""
            raise type(chat)(f"{place}{chat}", reason=chat.reason) from chat
        chats.append(chat)
    warn_of_notes(Counter(name for chat in chats for name in ("kept", *chat.notes)), told)
    return chats


def encode_rows(
    rows: Sequence[Any], tokenizer: PreTrainedTokenizerBase, options: EncodeOptions
) -> Iterator[EncodedChat | RowError]:
    """Each row encoded and cut to `max_length`, or the error that refuses it.

    Chats are tokenised in one call, which can use several cores. The ids of each are made as it is asked for:
    whoever writes them away finds them in the processor's cache.

    Raises:
        ChatTemplateError: If there is no chat template, or it does not parse, which is no row's fault.
    """
    templates: dict[Any, ChatTemplate] = {}
    with limited_time():
        read = [_read(row, tokenizer, options, templates) for row in rows]
    tokenised = tokenise(
        tokenizer,
        [one.text for one in read if isinstance(one, Found)],
        # Of rows that stay longer than its model takes the tokenizer warns, once.
        verbose=options.max_length is None or options.max_length > tokenizer.model_max_length,
    )
    labelled = (_labelled(one, next(tokenised), options) if isinstance(one, Found) else one for one in read)
    return (chat if isinstance(chat, RowError) else _cut(chat, options) for chat in labelled)


def _read(
    row: Any,
    tokenizer: PreTrainedTokenizerBase,
    options: EncodeOptions,
    templates: dict[Any, ChatTemplate],
) -> EncodedChat | Found | RowError:
    """A row that is tokenised; or its rendering and the turns that are trained; or the error that refuses it.

    Rows whose templates have equal variables share one of `templates`.
    """
    try:
        shape = "input_ids" if isinstance(row, EncodedChat) else shape_of(row)
        if shape == "input_ids":
            return read_encoded(row)
        if shape == "text":
            return _encode_text(as_text(row["text"], '"text"'), tokenizer, options)
        conversation = read_row(row, shape)
        template = _template(conversation, tokenizer, options, templates)
        found = find_turns(template, conversation, options)
        found.text.encode()  # half of a surrogate pair cannot be tokenised
        found.notes[:] = notes_of(found, template, conversation, options)
        return found
    except RowError as error:
        if error.reason == "no_template":
            raise
        return error
    except Exception as error:  # a row may hold anything
        unread = "" if isinstance(error, ValueError) else f"the row cannot be read: {type(error).__name__}: "
        malformed = RowError(f"{unread}{error}")
        malformed.__cause__ = error
        return malformed


def _encode_text(text: str, tokenizer: PreTrainedTokenizerBase, options: EncodeOptions) -> EncodedChat:
    """A text with the special tokens that its tokenizer adds and the token that ends it, all trained."""
    text.encode()  # half of a surrogate pair cannot be tokenised
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if eos is None:
        raise ValueError(f"{describe_tokenizer(tokenizer)} has no eos_token to end a text with; set one")
    ids: list[int] = list(
        tokenizer(
            text, verbose=options.max_length is None or options.max_length > tokenizer.model_max_length
        )["input_ids"]
    )
    ids = ids[ids[:2] == [bos, bos] :]  # a text may begin with the token that the tokenizer adds
    ids += [eos] * (ids[-1:] != [eos])
    return EncodedChat(ids, list(ids))


def _template(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    options: EncodeOptions,
    templates: dict[Any, ChatTemplate],
) -> ChatTemplate:
    """The chat template of a conversation; rows with equal variables share one."""
    if not getattr(tokenizer, "is_fast", False):  # MistralCommonBackend has no such attribute
        raise ValueError(
            f"{describe_tokenizer(tokenizer)} gives no character offsets, which labels need; load the fast "
            "version: AutoTokenizer does where a tokenizer.json exists, for a tekken.json there is "
            "transformers.integrations.mistral.convert_tekken_tokenizer"
        )
    kwargs = {**template_variables(options.chat_template_kwargs), **conversation.template_kwargs}
    # Some tokenizers have a second template for conversations with tools.
    key = (
        conversation.tools is not None,
        conversation.thinks_in_parts,
        json.dumps(kwargs, default=repr) if kwargs else "",
    )
    if key not in templates:
        templates[key] = ChatTemplate(
            tokenizer,
            options.chat_template,
            conversation.tools,
            kwargs,
            thinks_in_parts=conversation.thinks_in_parts,
        )
    return templates[key]


def _labelled(found: Found, tokens: Tokens, options: EncodeOptions) -> EncodedChat:
    """A rendered conversation with labels: the id of each trained token and -100 elsewhere, (S,)."""
    if options.train_on == "all":
        return EncodedChat(tokens.ids, list(tokens.ids), tuple(found.notes))
    # A token belongs to the turn in which its first character lies. One that begins before the turn and
    # reaches into it is not trained: the model would have to predict a part of the prompt with it.
    labels, notes = [IGNORE_INDEX] * len(tokens.ids), list(found.notes)
    begin, end = _kept(len(tokens.ids), options)
    answers: dict[int, list[tuple[int, int]]] = {}
    for turn in found.turns:
        first, stop = tokens.first_from(turn.start), tokens.first_from(turn.end)
        labels[first:stop] = tokens.ids[first:stop]
        if found.messages[turn.message]["role"] == "assistant":
            # A message has several turns where a template leaves out a part of it.
            if turn.message not in answers and tokens.is_cut(turn.start, first):
                notes.append("start_in_a_token")
            answers.setdefault(turn.message, []).append((first, stop))
    if any(
        (end < len(tokens.ids) and spans[0][0] >= end) or (begin > 0 and spans[-1][1] <= begin)
        for spans in answers.values()
    ):
        notes.append("answer_cut_off")
    return EncodedChat(tokens.ids, labels, tuple(dict.fromkeys(notes)))


def _kept(length: int, options: EncodeOptions) -> tuple[int, int]:
    """The tokens [begin, end) that `max_length` leaves of so many."""
    limit = length if options.max_length is None else min(length, options.max_length)
    return (length - limit, length) if options.truncation == "left" else (0, limit)


def _cut(chat: EncodedChat, options: EncodeOptions) -> EncodedChat | RowError:
    """A chat cut to `max_length`, or refused for its length, as `truncation` says.

    It has the note "truncated_away" if its last target was cut off.
    """
    begin, end = _kept(len(chat.input_ids), options)
    if end - begin == len(chat.input_ids):
        return chat
    if options.truncation == "error":
        return RowError(
            f"the row has {len(chat.input_ids)} tokens, max_length is {options.max_length}; raise "
            'max_length, drop the row, or truncate with "right" or "left"',
            reason="too_long",
        )
    cut = EncodedChat(chat.input_ids[begin:end], chat.labels[begin:end], chat.notes)
    return (
        replace(cut, notes=(*chat.notes, "truncated_away"))
        if chat.num_targets and not cut.num_targets
        else cut
    )
