"""Where the texts of a conversation stand in its rendering, and which of them are not there.

A conversation is rendered with sentinels for its texts, and the texts are put back. Only where that gives the
true rendering, character for character, is it known which text stands where.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fsdp_sft.collate.rows import REASONING_KEYS, Message
from fsdp_sft.collate.template import (
    NUMERIC_SENTINEL,
    ChatTemplate,
    TemplateFacts,
    common_length,
    numeric_sentinel,
    sentinel,
    split_at_sentinels,
)
from fsdp_sft.errors import ChatTemplateError

PartWeights = Mapping[int, dict[str, list[tuple[int, float]]]]
# Templates of reasoning models look for these in the content and cut it there.
THINK = re.compile(r"(</?think>)")


@dataclass(slots=True)
class Dropped:
    """A text of a trained message that the template does not print.

    Attributes:
        message: Index of the message.
        text: The text.
        part: What it is: "reasoning", "tool call" or "content".
        is_past: Whether it is reasoning before the last question, which templates leave out by design.
    """

    message: int
    text: str
    part: str
    is_past: bool


@dataclass(slots=True)
class _Leaf:
    """A text of a message, in the forms in which a template may print it."""

    message: int
    texts: tuple[str, ...]
    in_call: bool
    is_reasoning: bool = False
    is_name: bool = False

    @property
    def part(self) -> str:
        """What of the message it is."""
        return "reasoning" if self.is_reasoning else "tool call" if self.in_call else "content"

    def spellings(self) -> Iterator[str]:
        """The texts, and the first as it stands inside of JSON and of Python's repr."""
        yield from self.texts
        yield json.dumps(self.texts[0], ensure_ascii=False)[1:-1]
        yield repr(self.texts[0])[1:-1]


@dataclass(slots=True)
class _WeighedPart:
    """A part of a message's text that has a weight of its own.

    Attributes:
        leaves: Numbers of its leaves.
        head: What of it stands before the first of them: white space, a think tag.
        tail: What stands behind the last.
        weight: Its weight.
    """

    leaves: range
    head: str
    tail: str
    weight: float


@dataclass(slots=True)
class Place:
    """Where a leaf stands in the real rendering."""

    leaf: int
    message: int
    start: int
    end: int
    is_reasoning: bool = False


class Extent(NamedTuple):
    """Where a message is printed, in characters of the text.

    Attributes:
        message: Its index.
        floor: End of the leaf before it.
        own: Start of its first leaf and end of its last; None if nothing of it is printed.
        ceiling: Start of the leaf after it.
    """

    message: int
    floor: int
    own: tuple[int, int] | None
    ceiling: int


@dataclass(slots=True)
class Layout:
    """All leaves of a conversation, and those that are printed in the order of the text.

    `numeric` says whether numbers have sentinels in `marked`.
    """

    leaves: list[_Leaf]
    places: list[Place]
    length: int
    marked: list[Message]
    numeric: bool
    pieces: list[_WeighedPart] = field(default_factory=list)

    def weighed(self, text: str) -> Iterator[tuple[int, int, float]]:
        """First and last character of each piece that has a weight of its own, and the weight."""
        for piece in self.pieces:
            mine = [number for number, place in enumerate(self.places) if place.leaf in piece.leaves]
            if not mine:
                continue
            runs = [mine] if mine[-1] - mine[0] + 1 == len(mine) else [[number] for number in mine]
            for run in runs:
                start, end = self.places[run[0]].start, self.places[run[-1]].end
                start -= common_length(piece.head[::-1], text[:start][::-1][: len(piece.head)])
                end += common_length(piece.tail, text[end : end + len(piece.tail)])
                yield start, end, piece.weight

    def check(self, template: ChatTemplate, wanted: set[int]) -> None:
        """Refuse a layout in which a wanted message is missing, doubled or torn apart."""
        absent = self.absent(wanted)
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
        if absent:
            raise template.error(f"it does not print message {min(absent)}")

    def absent(self, messages: set[int]) -> set[int]:
        """Those that have texts, of which none is printed."""
        printed = {place.message for place in self.places}
        return (messages & {leaf.message for leaf in self.leaves}) - printed

    def dropped(self, wanted: set[int], last_question: int) -> Iterator[Dropped]:
        """Texts of wanted messages that are not printed."""
        printed = {place.leaf for place in self.places}
        for number, leaf in enumerate(self.leaves):
            if leaf.message in wanted and number not in printed:
                is_past = leaf.is_reasoning and leaf.message < last_question
                yield Dropped(leaf.message, leaf.texts[0], leaf.part, is_past)

    def extents(self, wanted: set[int]) -> Iterator[Extent]:
        """Where each wanted message is printed: first those that are not, then in the order of the text."""
        printed = {place.message for place in self.places}
        for index in sorted(wanted - printed):
            floor = max((p.end for p in self.places if p.message < index), default=0)
            ceiling = min((p.start for p in self.places if p.message > index), default=self.length)
            yield Extent(index, floor, None, ceiling)
        runs: list[tuple[int, int, int]] = []  # (message, start, end)
        for place in self.places:
            start = runs.pop()[1] if runs and runs[-1][0] == place.message else place.start
            runs.append((place.message, start, place.end))
        ends = [0, *(end for _, _, end in runs)]
        starts = [*(start for _, start, _ in runs), self.length]
        for number, (index, start, end) in enumerate(runs):
            if index in wanted:
                yield Extent(index, ends[number], (start, end), starts[number + 1])


def lay_out(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    wanted: set[int],
    text: str,
    part_weights: PartWeights,
) -> Layout:
    """The first layout that holds: all roles marked or the assistant's, blank answers marked or not."""
    everyone = frozenset(message["role"] for message in messages)
    roles_wanted = {messages[index]["role"] for index in wanted}
    for roles in dict.fromkeys([everyone, everyone & {"assistant"}]):
        if roles_wanted <= roles and (roles == everyone or not _mimics(messages, template.facts())):
            for blanks, numbers in ((True, True), (True, False), (False, False)):
                layout = _lay_out_once(
                    template, messages, tools, roles, text, part_weights, blanks=blanks, numbers=numbers
                )
                if layout is not None:
                    return layout
    raise template.error(
        "what it prints around a message depends on the message's content, so that a second rendering "
        "with other contents does not match the first"
    )


def _mimics(messages: list[Message], facts: TemplateFacts) -> bool:
    """Tell whether someone but the assistant wrote a header or a stop token."""
    marks = [mark for mark in (*facts.headers, facts.before_answer, *facts.stop_tokens) if mark.strip()]
    others = [str(message["content"]) for message in messages if message["role"] != "assistant"]
    return any(mark.strip() in content for content in others for mark in marks)


def _lay_out_once(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    roles: frozenset[str],
    text: str,
    part_weights: PartWeights,
    *,
    blanks: bool,
    numbers: bool,
) -> Layout | None:
    numbers = numbers and any("tool_calls" in message for message in messages)
    if numbers and NUMERIC_SENTINEL.search(text):
        return None
    leaves: list[_Leaf] = []
    pieces: list[_WeighedPart] = []
    marked = [
        _Marker(index, leaves, pieces, part_weights.get(index, {}), numbers).mark(message, blanks=blanks)
        if message["role"] in roles
        else message
        for index, message in enumerate(messages)
    ]
    try:
        places = _align(template.skeleton(marked, tools), text, leaves, numeric=numbers)
        if places is None:  # a template may print the date, which has changed since
            places = _align(template.skeleton(marked, tools, renew=True), text, leaves, numeric=numbers)
    except ChatTemplateError:
        return None
    return None if places is None else Layout(leaves, places, len(text), marked, numbers, pieces)


def _align(marked: str, text: str, leaves: Sequence[_Leaf], *, numeric: bool) -> list[Place] | None:
    """Put the leaves back for their sentinels; None unless that gives `text` exactly."""
    (literal, *literals), numbers = split_at_sentinels(marked, numeric=numeric)
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
        # The name of a call stands again in front of the call's result; there it is not the assistant's.
        if number not in named:
            places.append(Place(number, leaf.message, position, end, leaf.is_reasoning))
        if leaf.is_name:
            named.add(number)
        position = end + len(literal)
    return places if position == len(text) else None


@dataclass(slots=True)
class _Marker:
    """Copies a message with its texts replaced by sentinels, and notes them as leaves.

    Attributes:
        message: Index of the message.
        leaves: Those of the conversation; new ones are added.
        pieces: Likewise.
        weights: Of the parts of its texts, by key: (characters, weight).
        numbers: Whether numbers in the arguments of calls get sentinels as well.
    """

    message: int
    leaves: list[_Leaf]
    pieces: list[_WeighedPart]
    weights: dict[str, list[tuple[int, float]]]
    numbers: bool

    def mark(self, message: Message, *, blanks: bool) -> Message:
        """`blanks` says whether an answer of nothing but white space gets a sentinel too."""
        known, marked = len(self.leaves), dict(message)
        for key in (*REASONING_KEYS, "content"):
            if key in marked:
                pattern = THINK if "think>" in marked[key] else None
                marked[key] = "".join(self._mark_parts(key, marked[key], pattern))
                if pattern and key == "content":
                    _note_reasoning(marked[key], self.leaves)
        if "tool_calls" in marked:
            marked["tool_calls"] = [self._mark_call(call) for call in marked["tool_calls"]]
        if blanks and len(self.leaves) == known and message["role"] == "assistant":
            content, add = message["content"], self._adder()
            # White space cannot stay around a sentinel, so it is replaced, in every way it may be stripped.
            stripped = (content, content.lstrip("\n"), content.rstrip("\n"), content.strip("\n"), "")
            marked["content"] = mark_text(content, add) if content.strip() else add(*dict.fromkeys(stripped))
        return marked

    def _mark_parts(self, key: str, text: str, pattern: re.Pattern[str] | None) -> Iterator[str]:
        """The text's parts, each with leaves of its own if weights differ."""
        add = self._adder(is_reasoning=key != "content")
        if key not in self.weights:
            yield mark_text(text, add, pattern)
            return
        position = 0
        for length, weight in self.weights[key]:
            first = len(self.leaves)
            marked = mark_text(text[position : position + length], add, pattern)
            if weight != 1:
                edges = split_at_sentinels(marked, numeric=False)[0]
                self.pieces.append(_WeighedPart(range(first, len(self.leaves)), edges[0], edges[-1], weight))
            position += length
            yield marked

    def _adder(self, **kind: bool) -> Callable[..., str]:
        def add(*texts: str) -> str:
            self.leaves.append(_Leaf(self.message, texts, **{"in_call": False, **kind}))
            return sentinel(len(self.leaves) - 1)

        return add

    def _mark_call(self, call: dict[str, Any]) -> dict[str, Any]:
        known = len(self.leaves)
        function = dict(call["function"])
        function["arguments"] = self._mark_argument(function["arguments"])
        if len(self.leaves) == known:
            function["name"] = mark_text(function["name"], self._adder(in_call=True, is_name=True))
        return {**call, "function": function}

    def _mark_argument(self, value: Any) -> Any:
        if isinstance(value, str):
            return mark_text(value, self._adder(in_call=True))
        if isinstance(value, dict):
            return {key: self._mark_argument(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark_argument(item) for item in value]
        if self.numbers and isinstance(value, int | float) and not isinstance(value, bool):
            self.leaves.append(_Leaf(self.message, (json.dumps(value), str(value)), in_call=True))
            return numeric_sentinel(len(self.leaves) - 1)
        return value


def mark_text(text: str, add: Callable[..., str], pattern: re.Pattern[str] | None = None) -> str:
    """The text with what `add` returns for each of its parts between matches of `pattern`."""
    # White space at the edges stays, so that a template that strips it does so in both renderings.
    parts = []
    for part in pattern.split(text) if pattern else [text]:
        core = part.strip()
        if not core or (pattern and pattern.fullmatch(part)):
            parts.append(part)
        else:
            head, _, tail = part.partition(core)
            parts.append(head + add(core) + tail)
    return "".join(parts)


def _note_reasoning(marked: str, leaves: list[_Leaf]) -> None:
    """Note which leaves stand inside of think tags; the opening one may be in the prompt."""
    end = marked.find("</think>")
    inside = end >= 0 and not 0 <= marked.find("<think>") < end
    position = 0
    for part in THINK.split(marked):
        position += len(part)
        if THINK.fullmatch(part):
            # One that nothing closes is quoted.
            inside = part == "<think>" and "</think>" in marked[position:]
        else:
            for number in split_at_sentinels(part, numeric=False)[1]:
                leaves[number] = replace(leaves[number], is_reasoning=inside)
