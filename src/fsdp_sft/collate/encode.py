"""One chat row to input_ids and labels: which tokens are trained, and truncation."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from fsdp_sft.collate.layout import Dropped
from fsdp_sft.collate.rows import (
    FORMATS,
    ROLES,
    Conversation,
    check_template_kwargs,
    is_encoded,
    read_encoded,
    read_row,
)
from fsdp_sft.collate.spans import Found, Turn, find_turns
from fsdp_sft.collate.template import ChatTemplate, describe_tokenizer
from fsdp_sft.collate.tokens import Tokens, tokenise
from fsdp_sft.errors import ChatTemplateError, DroppedTextError, TooLongError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100
"""The label of a position that is not trained; the default of `torch.nn.functional.cross_entropy`."""

TrainOn = Literal["assistant", "last", "all"] | Iterable[str]
ON_DROPPED = ("error", "count", "ignore")

NOTES = {
    "dropped": "the template leaves out a text of an answer, which is not trained",
    "dropped_past_reasoning": "the template leaves out reasoning before the last question, as many do",
    "no_end_of_turn": "the template writes nothing after the last answer, so nothing teaches the model to "
    "stop; pass a chat_template= that writes the token there on which generation is to stop",
    "end_of_turn_is_text": "what ends an answer is no token of this tokenizer; add it as one, and load the "
    "model with new_vocab_size=",
    "answer_cut_off": "max_length leaves nothing of an answer",
}
"""What is said of a row that is kept all the same, by its name in `FilterCounts`."""


@dataclass(frozen=True)
class EncodedChat:
    """A tokenised conversation.

    Attributes:
        input_ids: Token ids of the whole conversation, (S,).
        labels: The same ids where trained and -100 elsewhere, (S,), not shifted.
        loss_weights: The factor of each label's loss, (S,), where messages have weights other than 0 and 1;
            else None.
        notes: What else there is to say of it: names of `NOTES`.
    """

    input_ids: list[int]
    labels: list[int]
    loss_weights: list[float] | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_targets(self) -> int:
        """Trained positions after the shift; the first token has nothing before it to be told from."""
        if not self.labels:
            return 0
        # A generator over the labels would take as long as the template.
        first = int(self.labels[0] != IGNORE_INDEX)
        return len(self.labels) - self.labels.count(IGNORE_INDEX) - first


class EncodeKeywords(TypedDict, total=False):
    """Options of `encode_chat` that others hand on to it."""

    train_on: TrainOn
    train_eot: bool
    train_reasoning: bool
    truncation: str
    chat_template: str | None
    row_format: str | None
    chat_template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True)
class EncodeOptions:
    """What `encode_chat` takes beside the row, checked once: ValueError for the first that is wrong."""

    train_on: TrainOn = "assistant"
    train_eot: bool = True
    train_reasoning: bool = True
    max_length: int | None = None
    truncation: str = "right"
    chat_template: str | None = None
    row_format: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    on_dropped: str = "error"

    def __post_init__(self) -> None:
        if not isinstance(self.train_on, str | Iterable):
            raise ValueError(f"train_on must be a str or a set of roles, got {self.train_on!r}")
        roles = self.train_on if isinstance(self.train_on, str) else frozenset(self.train_on)
        if isinstance(roles, str):
            check_choice("train_on", roles, ("assistant", "last", "all"), hint="; give roles as a set")
        elif not roles or roles - set(ROLES):
            raise ValueError(f"train_on must be a set of roles out of {ROLES}, got {sorted(map(str, roles))}")
        for name in ("train_eot", "train_reasoning"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if roles == "all" and not self.train_reasoning:
            raise ValueError('train_reasoning=False leaves out reasoning, and train_on="all" nothing')
        if self.max_length is not None:
            check_count("max_length", self.max_length)
        check_choice("truncation", self.truncation, ("right", "left", "error"))
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise ValueError(
                f"chat_template must be a Jinja template as a str, got {type(self.chat_template).__name__}"
            )
        if self.row_format is not None:
            check_choice("row_format", self.row_format, tuple(FORMATS))
        check_choice("on_dropped", self.on_dropped, ON_DROPPED)
        object.__setattr__(self, "train_on", roles)
        object.__setattr__(self, "chat_template_kwargs", check_template_kwargs(self.chat_template_kwargs))


def check_choice(name: str, value: Any, allowed: tuple[str, ...], hint: str = "") -> None:
    """Raise ValueError unless the option is one of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}{hint}")


def check_count(name: str, value: Any) -> None:
    """Raise ValueError unless the option is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def encode_chat(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn = "assistant",
    train_eot: bool = True,
    train_reasoning: bool = True,
    max_length: int | None = None,
    truncation: str = "right",
    chat_template: str | None = None,
    row_format: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_dropped: Literal["error", "count", "ignore"] = "error",
) -> EncodedChat:
    """Tokenise a chat row and label what the model is to learn.

    The conversation is rendered with the chat template and tokenised once, without adding special tokens
    (the template writes its own). An assistant turn is trained from the end of the generation prompt through
    the token on which generation stops, if the template writes one; where that is no token of the tokenizer,
    its text is trained, with a warning. A token that reaches over the start is not trained.

    Args:
        row: `messages`, `conversations` (ShareGPT), `instruction`/`output` (Alpaca), `prompt`/`completion`
            (two texts, or two lists of messages of which the first is not trained), or
            `input_ids`/`labels`, which pass through with truncation only. `tools` may be a list or JSON.
            Nulls with which an Arrow table fills up calls and tools are left out, others stay.
            `chat_template_kwargs` are the row's own variables for the template.
            `train`, `weight` or `loss_weight` of 0 switches a message off; 1 leaves it to `train_on`; any
            other number above 0 is the factor of the loss of its tokens. A part of a content that is text or
            reasoning may have one too, which multiplies that of its message.
        tokenizer: A fast tokenizer.
        train_on: "assistant": every assistant turn, tool calls included and tool results not; "last": the
            last assistant turn; "all": every token; or a set of roles, of which all but the assistant's are
            trained without white space in front.
        train_eot: Whether the end-of-turn token is trained.
        train_reasoning: Whether reasoning is trained, with the tags around it. What a template prints where
            there is no reasoning, such as an empty think block, is trained either way.
        max_length: Most tokens to keep; None keeps all.
        truncation: "right" drops the end, "left" the beginning, "error" raises.
        chat_template: Takes the place of the tokenizer's template.
        row_format: "messages", "sharegpt", "alpaca", "prompt_completion" or "tokenized"; None detects it, in
            the order tokenized, messages, sharegpt, alpaca, prompt_completion.
        chat_template_kwargs: Variables for the template, such as ``{"enable_thinking": False}``; those of the
            row go before them.
        on_dropped: What to do if the template does not print a text of a trained message: content, reasoning,
            an argument of a call. "error" raises, "count" leaves a note, "ignore" nothing. Reasoning before
            the last question, which templates leave out by design, is noted at most.

    Returns:
        Ids and labels of equal length. Without a trained turn all labels are -100.

    Raises:
        DroppedTextError: For a text that is not printed.
        ChatTemplateError: If the trained tokens cannot be told for sure, or the template refuses the row.
        TooLongError: For a row over max_length with truncation="error".
        ValueError: For a malformed row or option, a missing template or a slow tokenizer.
    """
    options = EncodeOptions(
        train_on=train_on,
        train_eot=train_eot,
        train_reasoning=train_reasoning,
        max_length=max_length,
        truncation=truncation,
        chat_template=chat_template,
        row_format=row_format,
        chat_template_kwargs=chat_template_kwargs,
        on_dropped=on_dropped,
    )
    return truncate(encode_row(row, tokenizer, options), options)


def encode_row(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, options: EncodeOptions
) -> EncodedChat:
    """`encode_chat` before truncation."""
    return encode_rows([row], tokenizer, options)[0]


def encode_rows(
    rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, options: EncodeOptions
) -> list[EncodedChat]:
    """`encode_row` of several rows, tokenised in one call, which uses all cores the tokenizer may use."""
    encoded: dict[int, EncodedChat] = {}
    rendered: dict[int, _Rendering] = {}
    templates: dict[Any, ChatTemplate] = {}
    for index, row in enumerate(rows):
        if is_encoded(row, options.row_format):
            encoded[index] = EncodedChat(*read_encoded(row))
        else:
            rendered[index] = _render(row, tokenizer, options, templates)
    tokenised = tokenise(tokenizer, [rendering.text for rendering in rendered.values()])
    for (index, rendering), tokens in zip(rendered.items(), tokenised, strict=True):
        labels, weights = _labels(tokens, rendering, options.train_eot)
        notes = rendering.notes + ("answer_cut_off",) * _loses_an_answer(tokens, rendering, options)
        encoded[index] = EncodedChat(tokens.ids, labels, weights, notes)
    return [encoded[index] for index in range(len(rows))]


@dataclass(slots=True)
class _Rendering:
    """The text of a conversation, and the turns that labels depend on.

    Attributes:
        text: As the template prints it.
        turns: Those that are trained; or, with `all_else`, those that do not weigh 1.
        all_else: Whether everything but `turns` is trained.
        weights: Of each message.
        weighed: First and last character of each part with a weight of its own, and the weight.
        notes: Names of `NOTES`.
        answers: First and last character of each trained answer.
    """

    text: str
    turns: list[Turn]
    all_else: bool
    weights: list[float]
    weighed: tuple[tuple[int, int, float], ...]
    notes: tuple[str, ...]
    answers: tuple[tuple[int, int], ...]


def _render(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    options: EncodeOptions,
    templates: dict[Any, ChatTemplate],
) -> _Rendering:
    conversation = read_row(row, options.row_format)
    template = _template(conversation, tokenizer, options, templates)
    all_else = options.train_on == "all"
    if all_else:
        weighed = conversation.part_weights
        wanted = [i for i, weight in enumerate(conversation.weights) if weight != 1 or i in weighed]
        trained = [index for index, weight in enumerate(conversation.weights) if weight]
    else:
        wanted = trained = selected_turns(conversation, options)
    try:
        found = find_turns(template, conversation, wanted, reasoning=options.train_reasoning, printed=trained)
    except ChatTemplateError:
        if not all_else or wanted:
            raise
        # Where each text stands need not be known if all is trained; what is missing shows without it.
        found = find_turns(template, conversation, [], printed=[])
        found = replace(found, dropped=tuple(_not_in_the_text(conversation, trained, found.text)))
    _check_text(found.text)
    notes = tuple(_notes(found, template, conversation, options))
    return _Rendering(
        found.text, found.turns, all_else, conversation.weights, found.weighed, notes, found.answers
    )


def _template(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    options: EncodeOptions,
    templates: dict[Any, ChatTemplate],
) -> ChatTemplate:
    if not getattr(tokenizer, "is_fast", False):  # MistralCommonBackend has no such attribute
        raise ValueError(
            f"{describe_tokenizer(tokenizer)} gives no character offsets, which labels need; load the fast "
            "version: AutoTokenizer does where a tokenizer.json exists, for a tekken.json there is "
            "transformers.integrations.mistral.convert_tekken_tokenizer"
        )
    kwargs = {**(options.chat_template_kwargs or {}), **conversation.template_kwargs}
    # Some tokenizers have a second template for tools.
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
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the row holds half of a surrogate pair, {text[error.start]!r}, which is no character: it was "
            "cut in the middle of one, or read with a wrong encoding; drop the row or repair its text"
        ) from error


def _not_in_the_text(conversation: Conversation, trained: list[int], text: str) -> Iterator[Dropped]:
    for index in trained:
        content = str(conversation.messages[index]["content"]).strip()
        if content not in text and json.dumps(content, ensure_ascii=False)[1:-1] not in text:
            yield Dropped(index, content, "content", is_past=False)


def _notes(
    found: Found, template: ChatTemplate, conversation: Conversation, options: EncodeOptions
) -> Iterator[str]:
    if options.on_dropped != "ignore":
        if any(item.is_past for item in found.dropped):
            yield "dropped_past_reasoning"
        lost = next((item for item in found.dropped if not item.is_past), None)
        if lost is not None:
            if options.on_dropped == "error":
                raise _dropped_error(lost, template)
            yield "dropped"
    if options.train_on == "all" or not found.turns or not options.train_eot:
        return
    last = found.turns[-1]
    if conversation.messages[last.message]["role"] == "assistant" and last.stop_start == last.end:
        yield "no_end_of_turn"
    with suppress(ChatTemplateError):
        facts = template.facts()
        if not facts.stop_is_token:
            yield "end_of_turn_is_text"
            warnings.warn(
                f"answers end with {facts.end_of_turn!r}, which is no token of "
                f"{describe_tokenizer(template.tokenizer)}: it is trained as text, and generation must be "
                "told to stop on it; better, add it with tokenizer.add_special_tokens and load the model "
                "with new_vocab_size=len(tokenizer)",
                stacklevel=2,
            )


def _dropped_error(lost: Dropped, template: ChatTemplate) -> DroppedTextError:
    keys = template.reasoning_keys() if lost.part == "reasoning" else []
    shown = lost.text if len(lost.text) <= 60 else f"{lost.text[:60]}..."
    return DroppedTextError(
        f"the chat template of {describe_tokenizer(template.tokenizer)} does not print the {lost.part} of "
        f"message {lost.message}, {shown!r}, so it would not be trained: "
        + (f"give reasoning as {' or '.join(map(repr, keys))}, which it prints; or " if keys else "")
        + "pass a chat_template= that prints it, leave the row out (filter_rows with on_error='count'), or "
        "train what is printed with on_dropped='count'"
    )


def turns_of_roles(conversation: Conversation, options: EncodeOptions) -> list[int]:
    """Indices of the messages whose role is trained."""
    roles = options.train_on if isinstance(options.train_on, frozenset) else {"assistant"}
    indices = [i for i, message in enumerate(conversation.messages) if message["role"] in roles]
    return indices[-1:] if options.train_on == "last" else indices


def selected_turns(conversation: Conversation, options: EncodeOptions) -> list[int]:
    """Of those, the ones that no weight switches off."""
    return [index for index in turns_of_roles(conversation, options) if conversation.weights[index]]


def _labels(tokens: Tokens, rendering: _Rendering, train_eot: bool) -> tuple[list[int], list[float] | None]:
    """The id of each trained token, -100 elsewhere; weights. A token lies in a turn if it starts there."""
    ids, all_else = tokens.ids, rendering.all_else
    labels = list(ids) if all_else else [IGNORE_INDEX] * len(ids)
    of_turns = (rendering.weights[turn.message] for turn in rendering.turns)
    is_weighted = rendering.weighed or any(weight not in (0, 1) for weight in of_turns)
    weights = [1.0] * len(ids) if is_weighted else None
    for turn in rendering.turns:
        first, stop = tokens.first_from(turn.start), tokens.first_from(turn.end)
        if not all_else and not train_eot and turn.stop_start < turn.end:
            # A token that strips the white space around it may start before the end-of-turn token does.
            stop = min(stop, tokens.first_beyond(turn.stop_start))
        if first >= stop:
            continue
        weight = rendering.weights[turn.message]
        labels[first:stop] = ids[first:stop] if weight else [IGNORE_INDEX] * (stop - first)
        if weights is not None:
            weights[first:stop] = [weight] * (stop - first)
    if weights is None:
        return labels, None
    for start, end, weight in rendering.weighed:
        for index in range(tokens.first_from(start), tokens.first_from(end)):
            if labels[index] != IGNORE_INDEX:
                weights[index] *= weight
                labels[index] = labels[index] if weight else IGNORE_INDEX
    return labels, weights if set(weights) - {0.0, 1.0} else None


def _loses_an_answer(tokens: Tokens, rendering: _Rendering, options: EncodeOptions) -> bool:
    """Whether an answer lies wholly in what `truncate` will cut off."""
    limit, length = options.max_length, len(tokens.ids)
    if limit is None or length <= limit:
        return False
    if options.truncation == "left":
        return any(tokens.first_from(end) <= length - limit for _, end in rendering.answers)
    return any(tokens.first_beyond(start) >= limit for start, _ in rendering.answers)


def truncate(chat: EncodedChat, options: EncodeOptions) -> EncodedChat:
    """Cut a chat to `max_length`, or refuse it, as the options say."""
    limit, length = options.max_length, len(chat.input_ids)
    if limit is None or length <= limit:
        return chat
    if options.truncation == "error":
        raise TooLongError(
            f"the row has {length} tokens, max_length is {limit}; raise max_length, drop the row, "
            'or truncate with "right" or "left"'
        )
    keep = slice(limit) if options.truncation == "right" else slice(length - limit, None)
    weights = None if chat.loss_weights is None else chat.loss_weights[keep]
    return EncodedChat(chat.input_ids[keep], chat.labels[keep], weights, chat.notes)
