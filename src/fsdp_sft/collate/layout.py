"""Where the texts of a conversation stand in its rendering, and which of them are not printed.

A conversation is rendered with sentinels instead of its texts, and then the texts are put back. The places
are known only if this gives the true rendering, character for character. `spans` opens with a worked example.

A *leaf* is a text that gets one sentinel: a content, reasoning, or a string in the arguments of a tool
call. A content with think tags has a leaf for each text between the tags. A *place* is the position of a
leaf in the rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdp_sft.collate.rows import REASONING_KEYS, Message
from fsdp_sft.errors import ChatTemplateError

if TYPE_CHECKING:
    from fsdp_sft.collate.template import ChatTemplate

# A sentinel is a number between two private-use characters, which mean nothing to templates and strip().
# Python's repr escapes them, so a probe finds none where a template prints a list of parts as Python does.
OPEN, CLOSE = "\U000f5b01", "\U000f5b02"
SENTINEL = re.compile(f"{OPEN}([0-9]+){CLOSE}")
_ESCAPED = repr(OPEN)[1:-1]

# Reasoning that a generation prompt opens, and may close again: <think>, [THINK], <|START_THINKING|>,
# <|channel|>analysis<|message|>, "<|channel>thought" ...
OPENED_REASONING = re.compile(
    r"\s*[<\[][^<>\[\]]*(?:think|thought|reason|channel)[^<>\[\]]*[>\]].*", re.DOTALL | re.IGNORECASE
)

# The tag that closes it in an answer: </think>, [/THINK], <|END_THINKING|>, <|end|> ...
CLOSED_REASONING = re.compile(r"\s*(?:<[^<>]*>|\[[^\[\]]*\]|\{[^{}]*\})\s*")

# Templates of reasoning models search the content for these tags and cut it there.
THINK = re.compile(r"(</?think>)")


@dataclass(slots=True)
class Skeleton:
    """A rendering of sentinels, split at them.

    Attributes:
        literals: The N + 1 texts around N sentinels, which the template itself prints.
        numbers: The sentinels' numbers.
        edges: What `find_turns` has found in conversations of which this is the rendering.
    """

    literals: list[str]
    numbers: list[int]
    edges: dict[Any, Any] = field(default_factory=dict, compare=False)


@dataclass(slots=True)
class TextSlot:
    """A text of a message that gets one sentinel.

    Attributes:
        message: Index of the message.
        texts: The text as the row has it, and further forms in which a template may print it.
        part: Kind of the text: "content", "reasoning", "tool call" or "name of a tool", which gets one if the
            arguments of the call hold no text.
    """

    message: int
    texts: tuple[str, ...]
    part: str = "content"


class Place(NamedTuple):
    """A leaf and its position in the true rendering: characters [start, end)."""

    leaf: TextSlot
    start: int
    end: int


class MessageSpan(NamedTuple):
    """Position of a message in the rendering, in characters of the text.

    The template's own text (headers, end-of-turn tokens) between `floor` and `ceiling` may belong to this
    message; everything outside belongs to others::

        leaf of another message | literal | first leaf ... last leaf | literal | leaf of another message
                              floor     own[0]                   own[1]     ceiling

    Attributes:
        message: Index of the message.
        floor: End of the leaf before the message's first one.
        own: Start of its first leaf and end of its last one; None if nothing of it is printed.
        ceiling: Start of the leaf after the message's last one.
    """

    message: int
    floor: int
    own: tuple[int, int] | None
    ceiling: int


@dataclass(slots=True)
class Layout:
    """The leaves of a conversation and the places of those that are printed.

    Attributes:
        leaves: All leaves; a leaf's number is its index.
        places: Places of the printed leaves, in the order of the text.
        marked: The messages with sentinels instead of their texts.
        skeleton: Their rendering.
    """

    leaves: list[TextSlot]
    places: list[Place]
    marked: list[Message]
    skeleton: Skeleton

    def extents(self, template: ChatTemplate, wanted: set[int], length: int) -> list[MessageSpan]:
        """Positions of the wanted messages in a text of so many characters.

        First of those without a printed text, then in the order of the text.

        Raises:
            ChatTemplateError: If a message with texts is missing, printed twice, or interrupted by another.
        """
        # Neighbouring places of one message are a run. The literal before a run begins at the end of the
        # previous run, or with the text; the one behind it ends at the next run, or at the end of the text.
        runs = [list(run) for _, run in groupby(self.places, key=lambda place: place.leaf.message)]
        floors = [0, *(run[-1].end for run in runs)]
        ceilings = [*(run[0].start for run in runs[1:]), length]
        found: dict[int, MessageSpan] = {}
        for run, floor, ceiling in zip(runs, floors, ceilings, strict=False):
            index = run[0].leaf.message
            if index in wanted:
                if len({id(place.leaf) for place in run}) < len(run):
                    raise template.error(f"it prints message {index} more than once")
                if index in found:
                    raise template.error(f"it prints another message in the middle of message {index}")
                found[index] = MessageSpan(index, floor, (run[0].start, run[-1].end), ceiling)
        blank = []
        for index in sorted(wanted - set(found)):
            if any(leaf.message == index for leaf in self.leaves):
                raise template.error(f"it does not print message {index}")
            floor = max((place.end for place in self.places if place.leaf.message < index), default=0)
            after = (place.start for place in self.places if place.leaf.message > index)
            blank.append(MessageSpan(index, floor, None, min(after, default=length)))
        return [*blank, *found.values()]


def lay_out(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    wanted: set[int],
    text: str,
) -> Layout:
    """Find the places of a conversation's texts in its rendering.

    Some templates inspect a content before they print it, so that a sentinel changes the text around it. The
    first choice of sentinels that reproduces the rendering is therefore taken: in the messages of all roles
    or of the assistant alone, with or without blank answers.

    Args:
        template: The chat template.
        messages: Messages in the form that the template accepts.
        tools: Tool schemas.
        wanted: Indices of messages whose places are needed.
        text: The true rendering.

    Raises:
        ChatTemplateError: If no choice reproduces the rendering.
    """
    everyone, assistant = {message["role"] for message in messages}, {"assistant"}
    for roles in (everyone, assistant):
        if roles is assistant and (
            {messages[index]["role"] for index in wanted} != assistant or _mimics(messages, template)
        ):
            break
        # A template may print the date, and the cached skeleton be of yesterday.
        for blanks, renew in product((True, False), (False, True)):
            leaves, marked = mark_texts(messages, roles, blanks=blanks)
            with suppress(ChatTemplateError):
                skeleton = template.skeleton(marked, tools, renew=renew)
                places = _align(skeleton, text, leaves)
                if places is not None:
                    return Layout(leaves, places, marked, skeleton)
    raise template.error(
        "what it prints around a message depends on the message's content, so that a second rendering "
        "with other contents does not match the first"
    )


def mark_texts(
    messages: list[Message], roles: set[str], *, blanks: bool
) -> tuple[list[TextSlot], list[Message]]:
    """(the texts of the messages of some roles, the messages with sentinels in their place).

    Args:
        messages: The messages, which are not modified.
        roles: Roles whose texts are marked.
        blanks: Whether an answer of white space alone gets a sentinel too.
    """
    leaves: list[TextSlot] = []
    marked = [
        _Marker(index, leaves).mark(message, blanks=blanks) if message["role"] in roles else message
        for index, message in enumerate(messages)
    ]
    return leaves, marked


def occurs(text: str, *texts: str) -> bool:
    """Whether one of the texts is in `text`, in some spelling."""
    return any(spelling in text for spelling in _spellings(*texts))


def _spellings(*texts: str) -> Iterator[str]:
    """The texts, and the first one as in JSON, in Python's repr and in single quotes, without the quotes."""
    yield from texts
    yield json.dumps(texts[0], ensure_ascii=False)[1:-1]
    yield repr(texts[0])[1:-1]
    yield repr(texts[0] + '"')[1:-2]  # Python takes double quotes only where a text has none


def _mimics(messages: list[Message], template: ChatTemplate) -> bool:
    """Whether a message of another role than the assistant's contains a header or a stop token."""
    marks = (*template.facts().headers, *template.facts().stop_tokens)
    return any(
        mark.strip() in str(message["content"])
        for message in messages
        if message["role"] != "assistant"
        for mark in marks
        if mark.strip()
    )


def _align(skeleton: Skeleton, text: str, leaves: Sequence[TextSlot]) -> list[Place] | None:
    """The place of each leaf in `text`, found by putting leaves back for their sentinels.

    None unless the result is `text`, character for character.
    """
    literal, *literals = skeleton.literals  # which alternate with leaves
    if not text.startswith(literal):
        return None
    position = len(literal)
    places: list[Place] = []
    for number, literal in zip(skeleton.numbers, literals, strict=True):
        leaf = leaves[number]
        for spelling in _spellings(*leaf.texts):
            end = position + len(spelling)
            if text.startswith(spelling, position) and text.startswith(literal, end):
                break
        else:
            return None
        # Some templates print a call's name a second time, in front of the call's result, where it is not
        # written by the assistant: only the first place counts.
        if not (leaf.part == "name of a tool" and any(place.leaf is leaf for place in places)):
            places.append(Place(leaf, position, end))
        position = end + len(literal)
    return places if position == len(text) else None


@dataclass(slots=True)
class _Marker:
    """Copies a message with sentinels instead of its texts, and collects the texts as leaves.

    White space at the edges of a text stays, so that a template strips it in both renderings.

    Attributes:
        message: Index of the message.
        leaves: Leaves of the conversation so far; those of this message are appended.
    """

    message: int
    leaves: list[TextSlot]

    def mark(self, message: Message, *, blanks: bool) -> Message:
        """The message with sentinels instead of its texts."""
        known, marked = len(self.leaves), dict(message)
        for key in (*REASONING_KEYS, "content"):
            if key in marked:
                marked[key] = self._mark_around_tags(marked[key], thought=key != "content")
        if "tool_calls" in marked:
            marked["tool_calls"] = [self._mark_call(call) for call in marked["tool_calls"]]
        if blanks and len(self.leaves) == known and message["role"] == "assistant":
            content = message["content"]
            # A template that strips the content treats white space beside a sentinel differently from white
            # space alone. So the sentinel replaces it, and each way of stripping it is a spelling.
            stripped = (content, content.lstrip("\n"), content.rstrip("\n"), content.strip("\n"), "")
            marked["content"] = self._mark_text(content) if content.strip() else self._add(stripped)
        return marked

    def _mark_around_tags(self, text: str, *, thought: bool) -> str:
        """The text with a sentinel for each part between think tags; inside them it is reasoning."""
        if "think>" not in text:
            return self._mark_text(text, "reasoning" if thought else "content")
        # A content that closes a think block without opening it begins inside: the prompt has opened it. A
        # line ends behind that tag, or else the answer speaks of it.
        inside = re.match(r"(?:(?!<think>).)*?</think>[^\S\n]*(?:\n|$)", text, re.DOTALL) is not None
        marked, position, answers = "", 0, False
        for part in THINK.split(text):
            position += len(part)
            if THINK.fullmatch(part):
                # An opening tag that nothing closes, or in the middle of an answer, is quoted text.
                inside = part == "<think>" and "</think>" in text[position:] and not answers
                marked += part
            else:
                answers = answers or (not inside and bool(part.strip()))
                marked += self._mark_text(part, "reasoning" if thought or inside else "content")
        return marked

    def _mark_call(self, call: dict[str, Any]) -> dict[str, Any]:
        """The call with sentinels in its arguments, or for its name if the arguments hold no leaf."""
        known = len(self.leaves)
        function = dict(call["function"])
        function["arguments"] = self._mark_argument(function["arguments"])
        if len(self.leaves) == known:
            name, function["name"] = function["name"], self._mark_text(function["name"], "name of a tool")
            if str(call.get("id")).startswith(f"functions.{name}:"):  # which Kimi's templates print instead
                call = {**call, "id": call["id"].replace(name, function["name"], 1)}
        return {**call, "function": function}

    def _mark_argument(self, value: Any) -> Any:
        """The argument with a sentinel for each string in it."""
        if isinstance(value, str):
            return self._mark_text(value, "tool call")
        if isinstance(value, dict):
            return {key: self._mark_argument(item) for key, item in value.items()}
        return [self._mark_argument(item) for item in value] if isinstance(value, list | tuple) else value

    def _mark_text(self, text: str, part: str = "content") -> str:
        """The text with a sentinel for all of it but white space at its edges."""
        core = text.strip()
        if not core:
            return text
        head, _, tail = text.partition(core)
        return head + self._add((core,), part) + tail

    def _add(self, texts: tuple[str, ...], part: str = "content") -> str:
        """Add a leaf with its spellings, and return its sentinel."""
        self.leaves.append(TextSlot(self.message, texts, part))
        return sentinel(len(self.leaves) - 1)


def sentinel(number: int) -> str:
    """The sentinel of the text `number`."""
    return f"{OPEN}{number}{CLOSE}"


def split_at_sentinels(text: str) -> Skeleton:
    """A text split at its sentinels."""
    if _ESCAPED in text:  # some templates print nested arguments with Python's repr, which escapes sentinels
        text = text.replace(_ESCAPED, OPEN).replace(repr(CLOSE)[1:-1], CLOSE)
    pieces = SENTINEL.split(text)
    return Skeleton(pieces[::2], [int(number) for number in pieces[1::2]])


def through_the_tag(text: str, length: int, tokens: Iterable[str]) -> int:
    """`length`, or the end of the token or tag of `text` that a cut there would split."""
    for token in tokens:
        at = text.find(token, max(0, length - len(token) + 1))
        if 0 <= at < length:
            return at + len(token)
    opened = re.search(r"[<\[][^\s<>\[\]]*$", text[:length])
    closed = re.match(r"[^\s<>\[\]]*[>\]]+", text[length:])
    return length + closed.end() if opened and closed else length


def shared_header(prompt: str, before: str) -> str:
    """Common prefix of the two, without the beginning of a tag or word at its end.

    So ``<|start_a|>`` and ``<|start_b|>`` have nothing in common.
    """
    length = common_length(prompt, before)
    for opening, closing in (("<", ">"), ("[", "]"), ("{", "}")):
        at = prompt.rfind(opening, 0, length)
        if at > prompt.rfind(closing, 0, length) and re.match(r"[<\[{]\S*[>\]}]", prompt[at:]):
            length = at
    if length < max(len(prompt), len(before)):
        word = re.search(r"\w+$", prompt[:length])
        if word and re.match(r"\w", prompt[length:] or before[length:]):
            length = word.start()
    return prompt[:length]


def overlap(prompt: str, text: str) -> int:
    """Length of the longest end of `prompt` with which `text` begins."""
    return next(n for n in range(min(len(prompt), len(text)), -1, -1) if prompt.endswith(text[:n]))


def common_length(first: str, second: str) -> int:
    """Length of the longest common prefix."""
    return next(
        (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
