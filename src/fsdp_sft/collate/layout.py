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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any, NamedTuple

from fsdp_sft.collate.literals import sentinel, split_at_sentinels
from fsdp_sft.collate.messages import REASONING_KEYS, Message
from fsdp_sft.collate.template import ChatTemplate
from fsdp_sft.errors import ChatTemplateError

# Templates of reasoning models search the content for these tags and cut it there.
THINK = re.compile(r"(</?think>)")


@dataclass(slots=True)
class TextSlot:
    """A text of a message that gets one sentinel.

    Attributes:
        message: Index of the message.
        texts: The text as the row has it, and further forms in which a template may print it.
        in_call: Whether it belongs to a tool call.
        is_reasoning: Whether it is reasoning.
        is_name: Whether it is the name of a function, which is a leaf only if the call's arguments hold none.
    """

    message: int
    texts: tuple[str, ...]
    in_call: bool
    is_reasoning: bool = False
    is_name: bool = False

    @property
    def part(self) -> str:
        """Kind of the text: "reasoning", "tool call" or "content"."""
        return "reasoning" if self.is_reasoning else "tool call" if self.in_call else "content"

    def spellings(self) -> Iterator[str]:
        """The texts, and the first one as JSON and as Python's repr print it, without the quotes."""
        yield from self.texts
        yield json.dumps(self.texts[0], ensure_ascii=False)[1:-1]
        yield repr(self.texts[0])[1:-1]


@dataclass(slots=True)
class SlotSpan:
    """Position of a leaf in the true rendering: characters [start, end).

    Attributes:
        leaf: Number of the leaf.
        message: Index of the leaf's message.
        start: First character.
        end: The character after the last one.
        is_reasoning: Whether the leaf is reasoning.
    """

    leaf: int
    message: int
    start: int
    end: int
    is_reasoning: bool = False


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
        length: Characters of the rendering.
        marked: The messages with sentinels instead of their texts.
    """

    leaves: list[TextSlot]
    places: list[SlotSpan]
    length: int
    marked: list[Message]

    def check(self, template: ChatTemplate, wanted: set[int]) -> None:
        """Check that each wanted message is printed once and in one piece.

        Raises:
            ChatTemplateError: If one is missing, printed twice, or interrupted by another.
        """
        printed: set[int] = set()
        begun: set[int] = set()
        before = None
        for place in self.places:
            index = place.message
            if index in wanted and place.leaf in printed:
                raise template.error(f"it prints message {index} more than once")
            if index in wanted and index != before and index in begun:
                raise template.error(f"it prints another message in the middle of message {index}")
            printed.add(place.leaf)
            begun.add(index)
            before = index
        for index in sorted(self.absent(wanted))[:1]:
            raise template.error(f"it does not print message {index}")

    def absent(self, messages: set[int]) -> set[int]:
        """Those of `messages` that have texts, none of which is printed."""
        printed = {place.message for place in self.places}
        return (messages & {leaf.message for leaf in self.leaves}) - printed

    def dropped(self, wanted: set[int]) -> Iterator[TextSlot]:
        """Texts of the wanted messages that are not printed."""
        printed = {place.leaf for place in self.places}
        for number, leaf in enumerate(self.leaves):
            if leaf.message in wanted and number not in printed:
                yield leaf

    def extents(self, wanted: set[int]) -> Iterator[MessageSpan]:
        """Positions of the wanted messages: first those not printed, then the others in text order."""
        printed = {place.message for place in self.places}
        for index in sorted(wanted - printed):
            floor = max((p.end for p in self.places if p.message < index), default=0)
            ceiling = min((p.start for p in self.places if p.message > index), default=self.length)
            yield MessageSpan(index, floor, None, ceiling)
        # Neighbouring places of one message are a run. A message printed in two pieces has two runs, which
        # `check` refuses for wanted messages. The literal before a run begins at the end of the previous run,
        # or with the text; the one behind it ends at the start of the next run, or at the end of the text.
        runs = [list(run) for _, run in groupby(self.places, key=lambda place: place.message)]
        floors = [0, *(run[-1].end for run in runs)]
        ceilings = [*(run[0].start for run in runs[1:]), self.length]
        for run, floor, ceiling in zip(runs, floors, ceilings, strict=False):
            if run[0].message in wanted:
                yield MessageSpan(run[0].message, floor, (run[0].start, run[-1].end), ceiling)


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
    everyone = {message["role"] for message in messages}
    choices = [everyone]
    if {messages[index]["role"] for index in wanted} == {"assistant"} and not _mimics(messages, template):
        choices.append({"assistant"})
    for roles, blanks in product(choices, (True, False)):
        leaves: list[TextSlot] = []
        marked = [
            _Marker(index, leaves).mark(message, blanks=blanks) if message["role"] in roles else message
            for index, message in enumerate(messages)
        ]
        for renew in (False, True):  # a template may print the date, and the cached skeleton be of yesterday
            with suppress(ChatTemplateError):
                places = _align(template.skeleton(marked, tools, renew=renew), text, leaves)
                if places is not None:
                    return Layout(leaves, places, len(text), marked)
    raise template.error(
        "what it prints around a message depends on the message's content, so that a second rendering "
        "with other contents does not match the first"
    )


def _mimics(messages: list[Message], template: ChatTemplate) -> bool:
    """Whether a message of another role than the assistant's contains a header or a stop token."""
    facts = template.facts()
    marks = [mark.strip() for mark in (*facts.headers, *facts.stop_tokens) if mark.strip()]
    others = [str(message["content"]) for message in messages if message["role"] != "assistant"]
    return any(mark in content for content in others for mark in marks)


def _align(marked: str, text: str, leaves: Sequence[TextSlot]) -> list[SlotSpan] | None:
    """The place of each leaf in `text`, found by putting leaves back for their sentinels.

    None unless the result is `text`, character for character.
    """
    # A literal is what the template itself prints between two sentinels; literals and leaves alternate.
    (literal, *literals), numbers = split_at_sentinels(marked)
    if not text.startswith(literal):
        return None
    position, places = len(literal), []
    named = set()
    for number, literal in zip(numbers, literals, strict=True):
        leaf = leaves[number]
        for spelling in leaf.spellings():
            end = position + len(spelling)
            if text.startswith(spelling, position) and text.startswith(literal, end):
                break
        else:
            return None
        # Some templates print a call's name a second time, in front of the call's result, where it is not
        # written by the assistant: only the first place counts.
        if number not in named:
            places.append(SlotSpan(number, leaf.message, position, end, leaf.is_reasoning))
        if leaf.is_name:
            named.add(number)
        position = end + len(literal)
    return places if position == len(text) else None


@dataclass(slots=True)
class _Marker:
    """Copies messages with sentinels instead of their texts, and collects the texts as leaves.

    Attributes:
        message: Index of the message.
        leaves: Leaves of the conversation so far; those of this message are appended.
    """

    message: int
    leaves: list[TextSlot]

    def mark(self, message: Message, *, blanks: bool) -> Message:
        """The message with sentinels instead of its texts.

        Args:
            message: The message, which is not modified.
            blanks: Whether an answer of white space alone gets a sentinel too.
        """
        known, marked = len(self.leaves), dict(message)
        for key in (*REASONING_KEYS, "content"):
            if key in marked:
                pattern = THINK if "think>" in marked[key] else None
                marked[key] = mark_text(marked[key], self._adder(is_reasoning=key != "content"), pattern)
                if pattern and key == "content":
                    _note_reasoning(marked[key], self.leaves)
        if "tool_calls" in marked:
            marked["tool_calls"] = [self._mark_call(call) for call in marked["tool_calls"]]
        if blanks and len(self.leaves) == known and message["role"] == "assistant":
            content, add = message["content"], self._adder()
            # A template that strips the content treats white space beside a sentinel differently from white
            # space alone. So the sentinel replaces it, and each way of stripping it is a spelling.
            stripped = (content, content.lstrip("\n"), content.rstrip("\n"), content.strip("\n"), "")
            marked["content"] = mark_text(content, add) if content.strip() else add(*dict.fromkeys(stripped))
        return marked

    def _adder(self, **kind: bool) -> Callable[..., str]:
        """A function that adds a leaf of this kind, given its spellings, and returns its sentinel."""

        def add(*texts: str) -> str:
            self.leaves.append(TextSlot(self.message, texts, **{"in_call": False, **kind}))
            return sentinel(len(self.leaves) - 1)

        return add

    def _mark_call(self, call: dict[str, Any]) -> dict[str, Any]:
        """The call with sentinels in its arguments, or for its name if the arguments hold no leaf."""
        known = len(self.leaves)
        function = dict(call["function"])
        function["arguments"] = self._mark_argument(function["arguments"])
        if len(self.leaves) == known:
            function["name"] = mark_text(function["name"], self._adder(in_call=True, is_name=True))
        return {**call, "function": function}

    def _mark_argument(self, value: Any) -> Any:
        """The argument with a sentinel for each string in it."""
        if isinstance(value, str):
            return mark_text(value, self._adder(in_call=True))
        if isinstance(value, dict):
            return {key: self._mark_argument(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark_argument(item) for item in value]
        return value


def mark_text(text: str, add: Callable[..., str], pattern: re.Pattern[str] | None = None) -> str:
    """Replace each part of a text between matches of `pattern` by what `add` returns for it.

    Matches stay, and so does white space at the edges of a part, so that a template strips it in both
    renderings.
    """
    parts = []
    for part in pattern.split(text) if pattern else [text]:
        core = part.strip()
        if not core or (pattern and pattern.fullmatch(part)):
            parts.append(part)
        else:
            head, _, tail = part.partition(core)
            parts.append(head + add(core) + tail)
    return "".join(parts)


def _note_reasoning(marked: str, leaves: list[TextSlot]) -> None:
    """Mark the leaves of a content that are inside think tags as reasoning."""
    # A content that closes a think block without opening it begins inside: the prompt has opened it.
    end = marked.find("</think>")
    inside = end >= 0 and not 0 <= marked.find("<think>") < end
    position = 0
    for part in THINK.split(marked):
        position += len(part)
        if THINK.fullmatch(part):
            # An opening tag that nothing closes is quoted text.
            inside = part == "<think>" and "</think>" in marked[position:]
        else:
            for number in split_at_sentinels(part)[1]:
                leaves[number].is_reasoning = inside
