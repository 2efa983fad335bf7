"""Which characters of a rendered conversation are trained.

A chat template is a program, so the place of an answer in its output cannot be read off the text: a user
may quote the answer, a header or an end-of-turn token. The conversation is therefore rendered twice, once
as it is and once with every content replaced by a numbered sentinel. Where putting the contents back for
the sentinels gives the first rendering character for character, the sentinels tell where the contents are;
where it does not, a `ChatTemplateError` is raised.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_sft import _compat
from fsdp_sft._chat_rows import REASONING_KEYS, Conversation, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Two private-use characters around a number; no tokenizer, template or strip() treats them specially.
_OPEN, _CLOSE = "\U000f5b01", "\U000f5b02"
_SENTINEL = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
# Templates of reasoning models look for these in the content and cut it there.
_THINK = re.compile(r"(</?think>)")


class ChatTemplateError(ValueError):
    """The trained part of a conversation cannot be told for sure with this chat template."""


@dataclass(frozen=True)
class Turn:
    """Trained characters of one message: [start, end), of which [stop_start, end) is the end-of-turn token.

    `stop_start == end` where the template writes no end-of-turn token after the message.
    """

    message: int
    start: int
    stop_start: int
    end: int


@dataclass(frozen=True)
class _Leaf:
    """A text of a message, and the spellings under which a template may print it."""

    message: int
    spellings: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    """Where a leaf stands in the real rendering."""

    leaf: int
    message: int
    start: int
    end: int


@dataclass(frozen=True)
class _Facts:
    """What a two-message probe tells about a template.

    Attributes:
        headers: Texts that end where generation starts, the best first; empty if there is no such text.
        always_headed: Whether a header of its own stands in front of every answer, not just a question's end.
        before_answer: Text between the user's content and the answer.
        after_answer: Text after the last answer.
        stop_tokens: Tokens on which generation stops.
    """

    headers: tuple[str, ...]
    always_headed: bool
    before_answer: str
    after_answer: str
    stop_tokens: tuple[str, ...]


class ChatTemplate:
    """A tokenizer's chat template with what is known about it.

    Args:
        tokenizer: Supplies the template, the special tokens and the name for error messages.
        chat_template: A template, or the name of one of the tokenizer's; None takes the tokenizer's own.
        tools: Tool schemas of the conversation; some tokenizers have a second template for them.

    Raises:
        ValueError: If there is no template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        if chat_template is None and not tokenizer.chat_template:
            raise ValueError(
                f"{describe_tokenizer(tokenizer)} has no chat template; pass chat_template=, or set "
                "tokenizer.chat_template to the one of the model's instruct version"
            )
        self.tokenizer = tokenizer
        self.text: str = tokenizer.get_chat_template(chat_template, tools=tools)
        self.tools = tools
        self._special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render in the sandbox; returns the text and the character spans of generation tags."""
        import jinja2

        try:
            return _compat.render_chat(
                self.text,
                messages,
                special_tokens=self._special_tokens,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ChatTemplateError(
                f"the chat template of {describe_tokenizer(self.tokenizer)} does not take this conversation: "
                f"{type(error).__name__}: {error}; change the row, or pass another chat_template="
            ) from error

    def facts(self) -> _Facts:
        """Probe the template, once per tokenizer and template."""
        known = _FACTS.setdefault(self.tokenizer, {})
        key = (self.text, json.dumps(self._special_tokens, default=str), len(self.tokenizer))
        if key not in known:
            known[key] = self._probe()
        return known[key]

    def _probe(self) -> _Facts:
        user, answer = _sentinel(0), _sentinel(1)
        question = [{"role": "user", "content": user}]
        asked = self._after(user, self.render(question)[0])
        prompted = self._after(user, self.render(question, add_generation_prompt=True)[0])
        answered = self._after(user, self.render([*question, {"role": "assistant", "content": answer}])[0])
        after_answer = self._after(answer, answered)
        before_answer = answered[: answered.index(answer)]
        shared = prompted[: common_length(prompted, before_answer)]
        # Not len(asked): some templates close the rendering without a prompt in a way of its own.
        skip = common_length(asked, prompted)
        prompt = prompted[skip:]
        headers = (prompt, shared[skip:]) if prompt.strip() else (prompted, shared)
        stops = [self.tokenizer.eos_token, self._stop_token(after_answer)]
        return _Facts(
            headers=tuple(header for header in headers if header.strip()),
            always_headed=bool(prompt.strip()),
            before_answer=before_answer,
            after_answer=after_answer,
            stop_tokens=tuple(dict.fromkeys(str(stop) for stop in stops if stop)),
        )

    def _after(self, mark: str, text: str) -> str:
        if text.count(mark) != 1:
            raise self.error("it does not print each message exactly once")
        return text[text.index(mark) + len(mark) :]

    def _stop_token(self, after_answer: str) -> str | None:
        found = []
        for token in self.tokenizer.added_tokens_decoder.values():
            at = after_answer.find(token.content) if token.content.strip() else -1
            # Some tokenizers add their end-of-turn token as an ordinary one; it is known by its place.
            if at >= 0 and (token.special or not after_answer[:at].strip()):
                found.append((at, -len(token.content), token.content))
        return min(found)[2] if found else None

    def error(self, reason: str) -> ChatTemplateError:
        """A `ChatTemplateError` that says `reason` and the way out."""
        return ChatTemplateError(
            f"cannot tell which tokens the assistant writes with the chat template of "
            f"{describe_tokenizer(self.tokenizer)}: {reason}; pass a chat_template= that prints every "
            "message as it is, with {% generation %}...{% endgeneration %} around the assistant's part"
        )


_FACTS: weakref.WeakKeyDictionary[Any, dict[Any, _Facts]] = weakref.WeakKeyDictionary()


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Name a tokenizer in an error message."""
    name = tokenizer.name_or_path
    return f"{type(tokenizer).__name__} {name!r}" if name else type(tokenizer).__name__


def common_length(first: str, second: str) -> int:
    """Length of the longest common prefix."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def find_turns(
    template: ChatTemplate, conversation: Conversation, wanted: Iterable[int]
) -> tuple[str, list[Turn]]:
    """Render a conversation and find the trained characters of the messages `wanted`.

    Returns:
        (rendered text, turns in the order of the text). A message may have several turns, where the
        template's own generation tags leave out a part in its middle, or none, where it is not printed.

    Raises:
        ChatTemplateError: If the characters cannot be told for sure.
    """
    messages, wanted = conversation.messages, set(wanted)
    text, tags = template.render(messages, tools=conversation.tools)
    if not wanted:
        return text, []
    if _OPEN in text:
        raise template.error(f"the conversation holds the private-use character {_OPEN!r}")
    facts = template.facts()
    everyone = frozenset(message["role"] for message in messages)
    roles_wanted = {messages[index]["role"] for index in wanted}
    for roles in dict.fromkeys([everyone, everyone & {"assistant"}]):
        if roles_wanted <= roles and (roles == everyone or not _mimics(messages, facts)):
            places = _places(template, conversation, roles, text)
            if places is not None:
                break
    else:
        raise template.error(
            "what it prints around a message depends on the message's content, so that a second rendering "
            "with other contents does not match the first"
        )
    turns = _turns(template, facts, conversation, places, wanted, text)
    return text, _restrict_to_tags(turns, tags, places, messages)


def _sentinel(number: int) -> str:
    return f"{_OPEN}{number}{_CLOSE}"


def _mimics(messages: list[Message], facts: _Facts) -> bool:
    """Tell whether someone but the assistant wrote a header or a stop token."""
    marks = [mark for mark in (*facts.headers, facts.before_answer, *facts.stop_tokens) if mark.strip()]
    others = [str(message["content"]) for message in messages if message["role"] != "assistant"]
    return any(mark.strip() in content for content in others for mark in marks)


def _places(
    template: ChatTemplate, conversation: Conversation, roles: frozenset[str], text: str
) -> list[_Place] | None:
    leaves: list[_Leaf] = []
    marked = [
        _mark_message(message, index, leaves) if message["role"] in roles else message
        for index, message in enumerate(conversation.messages)
    ]
    try:
        rendered, _ = template.render(marked, tools=conversation.tools)
    except ChatTemplateError:
        return None
    return _align(rendered, text, leaves)


def _align(marked: str, text: str, leaves: Sequence[_Leaf]) -> list[_Place] | None:
    """Put the leaves back for their sentinels; None unless that gives `text` exactly."""
    literal, *rest = _SENTINEL.split(marked)
    if not text.startswith(literal):
        return None
    position, places = len(literal), []
    for number, literal in zip(rest[::2], rest[1::2], strict=True):
        leaf = leaves[int(number)]
        for spelling in leaf.spellings:
            end = position + len(spelling)
            if text.startswith(spelling, position) and text.startswith(literal, end):
                break
        else:
            return None
        places.append(_Place(int(number), leaf.message, position, end))
        position = end + len(literal)
    return places if position == len(text) else None


def _mark_message(message: Message, index: int, leaves: list[_Leaf]) -> Message:
    """Copy a message with its texts replaced by sentinels, and note them in `leaves`."""

    def add(*spellings: str) -> str:
        leaves.append(_Leaf(index, spellings))
        return _sentinel(len(leaves) - 1)

    known = len(leaves)
    marked = dict(message)
    for key in (*REASONING_KEYS, "content"):
        if key in marked:
            marked[key] = _mark_text(marked[key], add, pattern=_THINK)
    if "tool_calls" in marked:
        marked["tool_calls"] = [_mark_call(call, leaves, add) for call in marked["tool_calls"]]
    if len(leaves) == known and message["role"] == "assistant":
        marked["content"] = add(message["content"], "")
    return marked


def _mark_text(text: str, add: Callable[..., str], pattern: re.Pattern[str] | None = None) -> str:
    # White space at the edges stays, so that a template that strips it does so in both renderings.
    parts = []
    for part in pattern.split(text) if pattern else [text]:
        core = part.strip()
        if not core or (pattern and pattern.fullmatch(part)):
            parts.append(part)
        else:
            head, tail = part[: len(part) - len(part.lstrip())], part[len(part.rstrip()) :]
            parts.append(head + add(core, json.dumps(core, ensure_ascii=False)[1:-1]) + tail)
    return "".join(parts)


def _mark_call(call: dict[str, Any], leaves: list[_Leaf], add: Callable[..., str]) -> dict[str, Any]:
    def mark(value: Any) -> Any:
        if isinstance(value, str):
            return _mark_text(value, add)
        if isinstance(value, dict):
            return {key: mark(item) for key, item in value.items()}
        return [mark(item) for item in value] if isinstance(value, list | tuple) else value

    known = len(leaves)
    function = dict(call["function"])
    function["arguments"] = mark(function["arguments"])
    if len(leaves) == known:
        function["name"] = _mark_text(function["name"], add)
    return {**call, "function": function}


def _turns(
    template: ChatTemplate,
    facts: _Facts,
    conversation: Conversation,
    places: list[_Place],
    wanted: set[int],
    text: str,
) -> list[Turn]:
    turns, seen = [], set()
    first = 0
    while first < len(places):
        index = places[first].message
        last = first
        while last + 1 < len(places) and places[last + 1].message == index:
            last += 1
        leaves = [place.leaf for place in places[first : last + 1]]
        if index in wanted and (index in seen or len(set(leaves)) < len(leaves)):
            raise template.error(f"it prints message {index} more than once")
        seen.add(index)
        if index in wanted:
            begin = places[first - 1].end if first else 0
            finish = places[last + 1].start if last + 1 < len(places) else len(text)
            message = conversation.messages[index]
            before, after = text[begin : places[first].start], text[places[last].end : finish]
            start = places[first].start - _reach_back(template, facts, message, before, index)
            content_end, end = _reach_on(facts, message, after)
            turns.append(Turn(index, start, places[last].end + content_end, places[last].end + end))
        first = last + 1
    return turns


def _reach_back(template: ChatTemplate, facts: _Facts, message: Message, before: str, index: int) -> int:
    """How many characters in front of the first leaf are the message's own; `before` is template text."""
    if message["role"] != "assistant":
        return 0
    for header in facts.headers:
        at = before.rfind(header)
        if at >= 0:
            return len(before) - at - len(header)
    if facts.always_headed:
        raise template.error(
            f"message {index} does not come after the generation prompt {facts.headers[0]!r}; "
            "is it a second assistant message in a row?"
        )
    # Without a header only the message's own edge can stand in front, and only if it is there to see.
    head = _edges(message)[0]
    if not facts.headers and before.endswith(facts.before_answer + head):
        return len(head)
    if head or not message["content"]:
        raise template.error(f"it prints no header in front of message {index}, so its start cannot be told")
    return 0


def _reach_on(facts: _Facts, message: Message, after: str) -> tuple[int, int]:
    """Offsets behind the last leaf at which the content and the end-of-turn token end."""
    found = [(after.find(stop), -len(stop)) for stop in facts.stop_tokens if stop in after]
    if found:
        at, length = min(found)
        if message["role"] == "assistant" or not after[:at].strip():
            return at, at - length
    tail = _edges(message)[1]
    kept = len(tail) if after.startswith(tail + facts.after_answer) else 0
    return kept, kept


def _edges(message: Message) -> tuple[str, str]:
    """What stands in front of the first and behind the last sentinel of a message's content."""
    if "tool_calls" in message:
        return "", ""
    marked = _mark_text(message["content"], lambda *_: _OPEN, pattern=_THINK)
    head, mark, tail = marked.partition(_OPEN)
    return (head, tail.rpartition(_OPEN)[2]) if mark else ("", "")


def _restrict_to_tags(
    turns: list[Turn], tags: list[tuple[int, int]], places: list[_Place], messages: list[Message]
) -> list[Turn]:
    """Keep to the template's generation tags inside each turn, if the tags can be right.

    Offsets of tags inside a macro are those of the macro's own output, so tags that cut a text in two or
    hold another role's text are ignored altogether. A tag's end never counts: a turn ends with the token on
    which generation stops.
    """
    owned: dict[int, list[tuple[int, int]]] = {}
    for start, end in tags:
        inside = [place for place in places if place.start < end and place.end > start]
        if any(place.start < start or place.end > end for place in inside):
            return turns
        owners = {place.message for place in inside}
        if len(owners) > 1 or any(messages[index]["role"] != "assistant" for index in owners):
            return turns
        for index in owners:
            owned.setdefault(index, []).append((start, end))
    kept: list[Turn] = []
    for turn in turns:
        spans = owned.get(turn.message) or [(turn.start, turn.end)]
        for number, (start, end) in enumerate(spans):
            start = max(start, turn.start)
            if number == len(spans) - 1:
                kept.append(Turn(turn.message, start, turn.stop_start, turn.end))
            else:
                kept.append(Turn(turn.message, start, end, end))
    return kept
