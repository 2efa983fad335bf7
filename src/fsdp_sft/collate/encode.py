"""One chat row to input_ids and labels: which tokens are trained, and truncation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fsdp_sft.collate.rows import FORMATS, ROLES, Conversation, is_encoded, read_encoded, read_row
from fsdp_sft.collate.spans import Turn, find_turns
from fsdp_sft.collate.template import ChatTemplate, describe_tokenizer
from fsdp_sft.collate.tokens import Tokens, tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100
"""The label of a position that is not trained; the default of `torch.nn.functional.cross_entropy`."""

TrainOn = Literal["assistant", "last", "all"] | Iterable[str]


@dataclass(frozen=True)
class EncodedChat:
    """A tokenised conversation.

    Attributes:
        input_ids: Token ids of the whole conversation, (S,).
        labels: The same ids where trained and -100 elsewhere, (S,), not shifted.
        loss_weights: The factor of each label's loss, (S,), where messages have weights other than 0 and 1;
            else None.
    """

    input_ids: list[int]
    labels: list[int]
    loss_weights: list[float] | None = None

    @property
    def num_targets(self) -> int:
        """Trained positions after the shift; the first token has nothing before it to be told from."""
        return sum(label != IGNORE_INDEX for label in self.labels[1:])


@dataclass(frozen=True)
class EncodeOptions:
    """What `encode_chat` takes beside the row, checked once."""

    train_on: str | frozenset[str]
    train_eot: bool
    train_reasoning: bool
    max_length: int | None
    truncation: str
    chat_template: str | None
    row_format: str | None

    @classmethod
    def check(
        cls,
        train_on: TrainOn,
        train_eot: bool = True,
        train_reasoning: bool = True,
        max_length: int | None = None,
        truncation: str = "right",
        chat_template: str | None = None,
        row_format: str | None = None,
    ) -> EncodeOptions:
        """Check each option; raise ValueError for the first that is wrong."""
        if not isinstance(train_on, str | Iterable):
            raise ValueError(f"train_on must be a str or a set of roles, got {train_on!r}")
        roles = train_on if isinstance(train_on, str) else frozenset(train_on)
        if isinstance(roles, str):
            check_choice("train_on", roles, ("assistant", "last", "all"), hint="; give roles as a set")
        elif not roles or roles - set(ROLES):
            raise ValueError(f"train_on must be a set of roles out of {ROLES}, got {sorted(map(str, roles))}")
        for name, value in (("train_eot", train_eot), ("train_reasoning", train_reasoning)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if roles == "all" and not train_reasoning:
            raise ValueError('train_reasoning=False leaves out reasoning, and train_on="all" nothing')
        if max_length is not None:
            check_count("max_length", max_length)
        check_choice("truncation", truncation, ("right", "left", "error"))
        if chat_template is not None and not isinstance(chat_template, str):
            raise ValueError(
                f"chat_template must be a Jinja template as a str, got {type(chat_template).__name__}"
            )
        if row_format is not None:
            check_choice("row_format", row_format, tuple(FORMATS))
        return cls(roles, train_eot, train_reasoning, max_length, truncation, chat_template, row_format)


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
) -> EncodedChat:
    """Tokenise a chat row and label what the model is to learn.

    The conversation is rendered with the chat template and tokenised once, without adding special tokens
    (the template writes its own). An assistant turn is trained from the end of the generation prompt through
    the token on which generation stops, if the template writes one. A token that reaches over the start is
    not trained.

    Args:
        row: `messages`, `conversations` (ShareGPT), `instruction`/`output` (Alpaca), `prompt`/`completion`
            (two texts, or two lists of messages of which the first is not trained), or
            `input_ids`/`labels`, which pass through with truncation only. `tools` may be a list or JSON.
            `train`, `weight` or `loss_weight` of 0 switches a message off; 1 leaves it to `train_on`; any
            other number above 0 is the factor of the loss of its tokens.
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

    Returns:
        Ids and labels of equal length. Without a trained turn all labels are -100.

    Raises:
        ChatTemplateError: If the trained tokens cannot be told for sure, or the template refuses the row.
        ValueError: For a malformed row or option, a missing template, a slow tokenizer, or a row over
            max_length with truncation="error".
    """
    options = EncodeOptions.check(
        train_on, train_eot, train_reasoning, max_length, truncation, chat_template, row_format
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
    templates: dict[bool, ChatTemplate] = {}  # some tokenizers have a second one for tools
    for index, row in enumerate(rows):
        if is_encoded(row, options.row_format):
            encoded[index] = EncodedChat(*read_encoded(row))
        else:
            rendered[index] = _render(row, tokenizer, options, templates)
    tokenised = tokenise(tokenizer, [rendering.text for rendering in rendered.values()])
    for (index, rendering), tokens in zip(rendered.items(), tokenised, strict=True):
        encoded[index] = EncodedChat(tokens.ids, *_labels(tokens, rendering, options.train_eot))
    return [encoded[index] for index in range(len(rows))]


@dataclass(frozen=True)
class _Rendering:
    """The text of a conversation, and the turns that labels depend on.

    Attributes:
        text: As the template prints it.
        turns: Those that are trained; or, with `all_else`, those that do not weigh 1.
        all_else: Whether everything but `turns` is trained.
        weights: Of each message.
    """

    text: str
    turns: list[Turn]
    all_else: bool
    weights: list[float]


def _render(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    options: EncodeOptions,
    templates: dict[bool, ChatTemplate],
) -> _Rendering:
    conversation = read_row(row, options.row_format)
    if not tokenizer.is_fast:
        raise ValueError(
            f"{describe_tokenizer(tokenizer)} gives no character offsets, which labels need; "
            "load the fast version (AutoTokenizer does, where a tokenizer.json exists)"
        )
    has_tools = conversation.tools is not None
    if has_tools not in templates:
        templates[has_tools] = ChatTemplate(tokenizer, options.chat_template, conversation.tools)
    template = templates[has_tools]
    all_else = options.train_on == "all"
    weighed = [index for index, weight in enumerate(conversation.weights) if weight != 1]
    wanted = weighed if all_else else selected_turns(conversation, options)
    text, turns = find_turns(template, conversation, wanted, reasoning=options.train_reasoning)
    return _Rendering(text, turns, all_else, conversation.weights)


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
    is_weighted = any(rendering.weights[turn.message] not in (0, 1) for turn in rendering.turns)
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
    return labels, weights


def truncate(chat: EncodedChat, options: EncodeOptions) -> EncodedChat:
    """Cut a chat to `max_length`, or refuse it, as the options say."""
    limit, length = options.max_length, len(chat.input_ids)
    if limit is None or length <= limit:
        return chat
    if options.truncation == "error":
        raise ValueError(
            f"the row has {length} tokens, max_length is {limit}; raise max_length, drop the row, "
            'or truncate with "right" or "left"'
        )
    keep = slice(limit) if options.truncation == "right" else slice(length - limit, None)
    weights = None if chat.loss_weights is None else chat.loss_weights[keep]
    return EncodedChat(chat.input_ids[keep], chat.labels[keep], weights)
