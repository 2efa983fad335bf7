"""Encode chat rows as input_ids and labels, and truncate them."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from fsdp_sft._model.view import tokenizer_of
from fsdp_sft.collate.notes import notes_of
from fsdp_sft.collate.options import EncodeOptions, TrainOn
from fsdp_sft.collate.rows import (
    Conversation,
    check_encoded,
    is_encoded,
    is_text,
    read_encoded,
    read_row,
    read_text,
)
from fsdp_sft.collate.spans import Found, find_turns, not_in_the_text
from fsdp_sft.collate.template import ChatTemplate, describe_tokenizer
from fsdp_sft.errors import ChatTemplateError, RowError, row_error
from fsdp_sft.targets import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Token ids of texts, and the token at a given character.
#
# Labels need that token only at the two edges of each turn.


@dataclass(slots=True)
class Tokens:
    """The tokens of one text, at the offsets that the tokenizer reports.

    Edges are found by bisection in the tokenizer's own encoding: converting all offsets to Python objects
    would take longer than the tokenisation.

    Attributes:
        ids: Token ids, (S,).
        text: The tokenised text.
        encoding: The `tokenizers.Encoding`.
        tokenizer: The tokenizer.
    """

    ids: list[int]
    text: str
    encoding: Any
    tokenizer: PreTrainedTokenizerBase

    def first_from(self, position: int) -> int:
        """Index of the first token that starts at character `position` or later; S if none does."""
        index = bisect_left(range(len(self.ids)), position, key=self._start)
        # The bisection uses starts without the leading space, with which a token may begin before `position`.
        while index < len(self.ids) and self._start_with_space(index) < position:
            index += 1
        return index

    def first_beyond(self, position: int) -> int:
        """Index of the first token that ends after character `position`; S if none does."""
        index = bisect_right(range(len(self.ids)), position, key=self._end)
        # Offsets may leave out the spaces at the end of a token too, up to where the next one begins.
        if index and self._token(index - 1).endswith("Ġ"):
            end = self._start_with_space(index) if index < len(self.ids) else len(self.text)
            if position < end and self.text[self._end(index - 1) : end].isspace():
                index -= 1
        return index

    def only_takes_in(self, index: int, position: int) -> bool:
        """Whether token `index` holds only white space from `position` on, which it strips.

        Tokens that were added to the vocabulary may do that (``rstrip=True``).
        """
        added = self.tokenizer.added_tokens_decoder.get(self.ids[index])
        at = self.text.find(added.content, self._start(index)) if added is not None else -1
        return added is not None and 0 <= at <= position - len(added.content)

    def _start(self, index: int) -> int:
        return int(self.encoding.token_to_chars(index)[0])

    def _end(self, index: int) -> int:
        return int(self.encoding.token_to_chars(index)[1])

    def _start_with_space(self, index: int) -> int:
        """Start of a token, with the space that its offsets may leave out.

        Byte-level tokenizers with trim_offsets=True do not count the space of "Ġword" among its characters.
        """
        start, before = self._start(index), self._end(index - 1) if index else 0
        if start <= before or not self.text[before:start].isspace():
            return start
        token = self._token(index)
        return max(before, start - (len(token) - len(token.lstrip("Ġ"))))

    def _token(self, index: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(self.ids[index]))


def starts_in_a_token(tokens: Tokens, position: int) -> bool:
    """Whether the character at `position` lies in a token that begins before it.

    A token that strips white space (``rstrip=True``) does not count: it is the same without what follows.
    """
    index = tokens.first_beyond(position)
    return index < tokens.first_from(position) and not tokens.only_takes_in(index, position)


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Tokens]:
    """Tokenise texts in one call, without adding special tokens.

    Args:
        tokenizer: A fast tokenizer.
        texts: The texts.
    """
    if not texts:
        return []
    batch = tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    found = zip(batch["input_ids"], texts, batch.encodings or [], strict=True)
    return [Tokens(ids, text, encoding, tokenizer) for ids, text, encoding in found]


@dataclass(frozen=True)
class EncodedChat:
    """A tokenised conversation.

    Attributes:
        input_ids: Token ids of the whole conversation, (S,).
        labels: The same ids where trained and -100 elsewhere, (S,), not shifted.
        notes: Remarks on the row: names of `fsdp_sft.collate.NOTES`.

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
        if not self.labels:
            return 0
        # list.count, since a generator over the labels would take as long as rendering the template.
        first = int(self.labels[0] != IGNORE_INDEX)
        return len(self.labels) - self.labels.count(IGNORE_INDEX) - first


def encode_chat(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn = "assistant",
    train_eot: bool = True,
    train_reasoning: bool = True,
    empty_reasoning: Literal["mask", "train", "error"] = "mask",
    max_length: int | None = None,
    truncation: str = "right",
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_dropped: Literal["error", "count", "ignore"] = "error",
) -> EncodedChat:
    """Tokenise a chat row and label the tokens that the model is to learn.

    The conversation is rendered with the chat template and tokenised once, without adding special tokens
    (the template writes its own). An assistant turn is trained from the end of the generation prompt through
    the token on which generation stops, if the template writes one. If the tokenizer has no such token, the
    text that ends the turn is trained instead, with a warning. A token that contains characters from both
    sides of the turn's start is not trained.

    Args:
        row: `messages`, `conversations` (ShareGPT), `instruction`/`output` (Alpaca), `prompt`/`completion`
            (two texts, or two lists of messages of which the first is not trained), `input_ids`/`labels`,
            which are only truncated, or `text`, of which every token is trained, with the tokenizer's own and
            `eos_token` at its end, whatever `train_on` says and without a chat template. `tools` may be a
            list or JSON. Nulls with which an Arrow table fills calls and tools are removed, others stay.
            `chat_template_kwargs` are the row's own variables for the template. A message with `train`,
            `weight` or `loss_weight` of 0 is not trained; 1 leaves it to `train_on`.
        tokenizer: A fast tokenizer.
        train_on: "assistant": every assistant turn, with its tool calls but not their results; "last": the
            last assistant turn; "all": every token; or a set of roles, of which all but the assistant's are
            trained without the white space in front of their texts.
        train_eot: Whether the end-of-turn token is trained.
        train_reasoning: Whether reasoning is trained, with the tags around it. Reasoning between ``<think>``
            and ``</think>`` at the beginning of a content is given to the template as the key that it reads
            (`reasoning_content`, `reasoning`, `thinking`), unless it finds it in the content itself.
        empty_reasoning: What to do with the empty block of reasoning, such as ``<think></think>``, that a
            template prints in front of an answer without reasoning, where the generation prompt does not have
            it: "mask" leaves it untrained, so that the model does not unlearn to reason, "train" trains it,
            "error" refuses the row. ``train_on="all"`` trains it always.
        max_length: Most tokens to keep; None keeps all.
        truncation: "right" drops the end, "left" the beginning, "error" raises.
        chat_template: Template to use instead of the tokenizer's.
        chat_template_kwargs: Variables for the template, such as ``{"enable_thinking": False}``; the row's
            own take precedence.
        on_dropped: What to do if the template does not print a text of a trained message: content, reasoning,
            an argument of a call. "error" raises, "count" leaves a note, "ignore" does nothing. Reasoning
            before the last question, which templates leave out by design, never raises.

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
        train_eot=train_eot,
        train_reasoning=train_reasoning,
        empty_reasoning=empty_reasoning,
        max_length=max_length,
        truncation=truncation,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        on_dropped=on_dropped,
    )
    (chat,) = encode_all([row], tokenizer, options)
    return chat


def encode_all(
    rows: Sequence[Mapping[str, Any] | EncodedChat],
    tokenizer: PreTrainedTokenizerBase,
    options: EncodeOptions,
) -> list[EncodedChat]:
    """Each row encoded and cut to `max_length`.

    Raises:
        ValueError: For the first row that is refused, with its index if there are several.
    """
    encoded = encode_rows(rows, tokenizer, options)
    for index, chat in enumerate(encoded):
        if isinstance(chat, ValueError):
            place = f"row {index} of {len(rows)}: " if len(rows) > 1 else ""
            raise row_error(f"{place}{chat}", reason_of(chat)) from chat
    return [chat for chat in encoded if isinstance(chat, EncodedChat)]


def encode_rows(
    rows: Sequence[Any], tokenizer: PreTrainedTokenizerBase, options: EncodeOptions
) -> list[EncodedChat | ValueError]:
    """Each row encoded and cut to `max_length`, or the error that refuses it.

    Chats are tokenised in one call, which can use several cores.

    Raises:
        ChatTemplateError: If there is no chat template, or it does not parse, which is no row's fault.
    """
    templates: dict[Any, ChatTemplate] = {}
    read = [_read(row, tokenizer, options, templates) for row in rows]
    tokenised = iter(tokenise(tokenizer, [one[0].text for one in read if isinstance(one, tuple)]))
    encoded: list[EncodedChat | ValueError] = []
    for one in read:
        if isinstance(one, tuple):
            (found, notes), tokens = one, next(tokenised)
            notes += tuple(_notes_of_tokens(tokens, found, options))
            one = EncodedChat(tokens.ids, _labels(tokens, found, options), tuple(dict.fromkeys(notes)))
        encoded.append(one if isinstance(one, ValueError) else _cut(one, options))
    return encoded


def reason_of(error: ValueError) -> str:
    """The name in `REFUSALS` of the reason why a row is refused."""
    return error.reason if isinstance(error, RowError) else "malformed"


def _read(
    row: Any,
    tokenizer: PreTrainedTokenizerBase,
    options: EncodeOptions,
    templates: dict[Any, ChatTemplate],
) -> EncodedChat | tuple[Found, tuple[str, ...]] | ValueError:
    """A row that is tokenised; or its rendering, with the notes on it; or the error that refuses it."""
    try:
        if isinstance(row, EncodedChat):
            check_encoded(row.input_ids, row.labels)
            return row
        if is_text(row):
            return _encode_text(read_text(row), tokenizer, options)
        if is_encoded(row):
            return EncodedChat(*read_encoded(row))
        return _render(row, tokenizer, options, templates)
    except ValueError as error:
        if reason_of(error) == "no_template":
            raise
        return error
    except Exception as error:  # a row may hold anything
        unread = ValueError(f"the row cannot be read: {type(error).__name__}: {error}")
        unread.__cause__ = error
        return unread


def _notes_of_tokens(tokens: Tokens, found: Found, options: EncodeOptions) -> Iterator[str]:
    """Names of the notes on a row that its tokens show."""
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for turn in found.turns:  # a message has several turns where a template leaves out a part of it
        if found.messages[turn.message]["role"] == "assistant":
            starts.setdefault(turn.message, turn.start)
            ends[turn.message] = turn.end
    if any(starts_in_a_token(tokens, start) for start in starts.values()):
        yield "start_in_a_token"
    limit = options.max_length
    lost = len(tokens.ids) - (limit or len(tokens.ids))
    if (
        limit is not None
        and lost > 0
        and (
            any(tokens.first_from(end) <= lost for end in ends.values())
            if options.truncation == "left"
            else any(tokens.first_from(start) >= limit for start in starts.values())
        )
    ):
        yield "answer_cut_off"
    if len(tokens.ids[: options.max_length]) > tokens.tokenizer.model_max_length:
        yield "longer_than_model"


def _encode_text(text: str, tokenizer: PreTrainedTokenizerBase, options: EncodeOptions) -> EncodedChat:
    """A text with the special tokens that its tokenizer adds and the token that ends it, all trained."""
    _check_text(text)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if eos is None:
        raise ValueError(f"{describe_tokenizer(tokenizer)} has no eos_token to end a text with; set one")
    ids: list[int] = list(tokenizer(text, verbose=False)["input_ids"])
    ids = ids[ids[:2] == [bos, bos] :]  # a text may begin with the token that the tokenizer adds
    ids += [eos] * (ids[-1:] != [eos])
    is_long = len(ids[: options.max_length]) > tokenizer.model_max_length
    return EncodedChat(ids, list(ids), notes=("longer_than_model",) * is_long)


def _render(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    options: EncodeOptions,
    templates: dict[Any, ChatTemplate],
) -> tuple[Found, tuple[str, ...]]:
    """Render a chat row, and find the turns that are trained and the notes on it."""
    conversation = read_row(row)
    template = _template(conversation, tokenizer, options, templates)
    if options.train_on == "all":
        found = _find_all(template, conversation)
    else:
        found = find_turns(
            template,
            conversation,
            _selected_turns(conversation, options),
            reasoning=options.train_reasoning,
            empty_blocks=options.empty_reasoning == "train",
        )
    _check_text(found.text)
    return found, tuple(notes_of(found, template, conversation, options))


def _find_all(template: ChatTemplate, conversation: Conversation) -> Found:
    """The rendering, all of which is trained, and the texts that it leaves out."""
    if not all(conversation.trained):
        raise ValueError(
            f'train_on="all" trains every token, and message {conversation.trained.index(False)} is not '
            'to be trained: give the roles, such as train_on={"user", "assistant"}, where a weight of 0 says '
            'so; join a prompt that is a list of messages: {"messages": row["prompt"] + row["completion"]}'
        )
    everyone = range(len(conversation.messages))
    try:
        return find_turns(template, conversation, [], printed=everyone)
    except ChatTemplateError:
        # The places of the texts are not needed: one that is missing is found by searching for it.
        found = find_turns(template, conversation, [], printed=[])
        return replace(found, dropped=tuple(not_in_the_text(found.messages, everyone, found.text)))


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
    special = sorted(set(tokenizer.special_tokens_map) & set(conversation.template_kwargs))
    if special:
        raise ValueError(
            f"the row's chat_template_kwargs cannot set {', '.join(special)}, which the tokenizer gives: the "
            "row would be trained on other tokens than those on which generation stops"
        )
    kwargs = {**(options.chat_template_kwargs or {}), **conversation.template_kwargs}
    # Some tokenizers have a second template for conversations with tools.
    variables = json.dumps(kwargs, default=repr) if kwargs else ""
    key = (conversation.tools is not None, conversation.thinks_in_parts, variables)
    if key not in templates:
        templates[key] = ChatTemplate(
            tokenizer,
            options.chat_template,
            conversation.tools,
            kwargs,
            thinks_in_parts=conversation.thinks_in_parts,
        )
    return templates[key]


def _check_text(text: str) -> None:
    """Refuse a text with half of a surrogate pair, which cannot be tokenised."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the row holds half of a surrogate pair, {text[error.start]!r}, which is no character: it was "
            "cut in the middle of one, or read with a wrong encoding; drop the row or repair its text"
        ) from error


def _selected_turns(conversation: Conversation, options: EncodeOptions) -> list[int]:
    """Indices of the messages whose role is trained and that are not switched off."""
    roles = options.train_on if isinstance(options.train_on, frozenset) else {"assistant"}
    indices = [i for i, message in enumerate(conversation.messages) if message["role"] in roles]
    indices = indices[-1:] if options.train_on == "last" else indices
    return [index for index in indices if conversation.trained[index]]


def _labels(tokens: Tokens, found: Found, options: EncodeOptions) -> list[int]:
    """Labels of a rendered conversation: the id of each trained token and -100 elsewhere, (S,)."""
    if options.train_on == "all":
        return list(tokens.ids)
    # A token belongs to the turn in which its first character lies. One that begins before the turn and
    # reaches into it is not trained: the model would have to predict a part of the prompt with it.
    labels = [IGNORE_INDEX] * len(tokens.ids)
    for turn in found.turns:
        first, stop = tokens.first_from(turn.start), tokens.first_from(turn.end)
        if not options.train_eot and turn.stop_start < turn.end:
            # An end-of-turn token with lstrip=True takes in the white space in front of it, and so starts
            # before its own text does: stop at the first token that ends beyond stop_start.
            stop = min(stop, tokens.first_beyond(turn.stop_start))
        if first < stop:
            labels[first:stop] = tokens.ids[first:stop]
    return labels


def _cut(chat: EncodedChat, options: EncodeOptions) -> EncodedChat | RowError:
    """A chat cut to `max_length`, or refused for its length, as `truncation` says.

    It has the note "truncated_away" if its last target was cut off.
    """
    limit, length = options.max_length, len(chat.input_ids)
    if limit is None or length <= limit:
        return chat
    if options.truncation == "error":
        return RowError(
            f"the row has {length} tokens, max_length is {limit}; raise max_length, drop the row, "
            'or truncate with "right" or "left"',
            reason="too_long",
        )
    keep = slice(limit) if options.truncation == "right" else slice(length - limit, None)
    cut = EncodedChat(chat.input_ids[keep], chat.labels[keep], chat.notes)
    is_empty = chat.num_targets and not cut.num_targets
    return replace(cut, notes=(*chat.notes, "truncated_away")) if is_empty else cut
