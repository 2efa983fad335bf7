"""Which characters of a rendered conversation are trained.

A chat template is a program, so the place of an answer in its output cannot be read off the text: a user
may quote the answer, a header or an end-of-turn token. The conversation is therefore rendered twice, once
as it is and once with every content replaced by a numbered sentinel. Where putting the contents back for
the sentinels gives the first rendering character for character, the sentinels tell where the contents are;
where it does not, a `ChatTemplateError` is raised. Where a turn has no known header or end-of-turn token,
its edges are those of two more renderings: of the messages before it with a generation prompt, and of the
messages up to it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from fsdp_sft.collate.forms import other_forms
from fsdp_sft.collate.rows import REASONING_KEYS, Conversation, Message
from fsdp_sft.collate.template import OPEN, SENTINEL, ChatTemplate, TemplateFacts, sentinel
from fsdp_sft.errors import ChatTemplateError

# Templates of reasoning models look for these in the content and cut it there.
_THINK = re.compile(r"(</?think>)")
# What opens and closes reasoning in the rendered text: <think>, [THINK], <|END_THINKING|>, <|end|> ...
_OPENING = re.compile(r"(?:<[^<>]*>|\[[^\[\]]*\])\s*$")
_CLOSING = re.compile(r"\s*(?:<[^<>]*>|\[[^\[\]]*\])\s*")
_OPENED_THINK = re.compile(r"<think>\s*(?:</think>\s*)?$")


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
    """A text of a message, in the forms in which a template may print it."""

    message: int
    texts: tuple[str, ...]
    in_call: bool
    is_reasoning: bool = False

    def spellings(self) -> Iterator[str]:
        """The texts, and the first as it stands inside of JSON."""
        yield from self.texts
        yield json.dumps(self.texts[0], ensure_ascii=False)[1:-1]


@dataclass(frozen=True)
class _Place:
    """Where a leaf stands in the real rendering."""

    leaf: int
    message: int
    start: int
    end: int
    is_reasoning: bool = False


class _Extent(NamedTuple):
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


@dataclass(frozen=True)
class _Layout:
    """All leaves of a conversation, and those that are printed in the order of the text."""

    leaves: list[_Leaf]
    places: list[_Place]
    length: int
    marked: list[Message]

    def check(self, template: ChatTemplate, wanted: set[int]) -> None:
        """Refuse a layout in which a wanted message is missing, doubled or torn apart."""
        printed = Counter(place.leaf for place in self.places)
        groups = Counter(index for index, _ in groupby(self.places, key=lambda place: place.message))
        for index in wanted:
            mine = [number for number, leaf in enumerate(self.leaves) if leaf.message == index]
            calls = [number for number in mine if self.leaves[number].in_call]
            if calls and any(number not in printed for number in calls):
                raise template.error(f"it leaves out tool calls of message {index}")
            if mine and not any(number in printed for number in mine):
                raise template.error(f"it does not print message {index}")
            if any(printed[number] > 1 for number in mine):
                raise template.error(f"it prints message {index} more than once")
            if groups[index] > 1:
                raise template.error(f"it prints another message in the middle of message {index}")

    def extents(self, wanted: set[int]) -> Iterator[_Extent]:
        """Where each wanted message is printed: first those that are not, then in the order of the text."""
        printed = {place.message for place in self.places}
        for index in sorted(wanted - printed):
            floor = max((p.end for p in self.places if p.message < index), default=0)
            ceiling = min((p.start for p in self.places if p.message > index), default=self.length)
            yield _Extent(index, floor, None, ceiling)
        runs = [list(run) for _, run in groupby(self.places, key=lambda place: place.message)]
        ends = [0, *(run[-1].end for run in runs)]
        starts = [*(run[0].start for run in runs), self.length]
        for number, run in enumerate(runs):
            if run[0].message in wanted:
                own = (run[0].start, run[-1].end)
                yield _Extent(run[0].message, ends[number], own, starts[number + 1])


def find_turns(
    template: ChatTemplate, conversation: Conversation, wanted: Iterable[int], *, reasoning: bool = True
) -> tuple[str, list[Turn]]:
    """Render a conversation and find the trained characters of the messages `wanted`.

    Args:
        template: The chat template.
        conversation: What to render.
        wanted: Indices of messages.
        reasoning: Whether their reasoning belongs to them, with the tags that open and close it.

    Returns:
        (rendered text, turns in the order of the text). A message has several turns where the template's
        own generation tags leave out a part in its middle.

    Raises:
        ChatTemplateError: If the characters cannot be told for sure.
    """
    text, tags, messages = _render_any(template, conversation)
    wanted = set(wanted)
    if not wanted:
        return text, []
    if OPEN in text:
        raise template.error(f"the conversation holds the private-use character {OPEN!r}")
    facts = template.facts()
    layout = _lay_out_any(template, messages, conversation.tools, wanted, text)
    layout.check(template, wanted)
    owned = _tags_by_message(tags, layout.places, messages)
    finder = _TurnFinder(template, facts, messages, owned, layout, conversation.tools)
    turns = [turn for extent in layout.extents(wanted) for turn in finder.find(text, extent)]
    if not reasoning:
        turns = [part for turn in turns for part in _without_reasoning(turn, layout.places, text)]
    return text, sorted(turns, key=lambda turn: turn.start)


def _without_reasoning(turn: Turn, places: list[_Place], text: str) -> Iterator[Turn]:
    """The parts of a turn that are not reasoning, nor a tag right in front of reasoning or behind it."""
    mine = [place for place in places if turn.start <= place.start and place.end <= turn.stop_start]
    start = turn.start
    for number, place in enumerate(mine):
        if not place.is_reasoning:
            continue
        before = mine[number - 1].end if number else turn.start
        after = mine[number + 1].start if number + 1 < len(mine) else turn.stop_start
        opening = _OPENING.search(text[before : place.start])
        closing = _CLOSING.match(text[place.end : after])
        end = before + opening.start() if opening else place.start
        if end > start:
            yield Turn(turn.message, start, end, end)
        start = place.end + (closing.end() if closing else 0)
    yield Turn(turn.message, start, max(start, turn.stop_start), turn.end)


def _lay_out_any(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    wanted: set[int],
    text: str,
) -> _Layout:
    """The first layout that holds: all roles marked or the assistant's, blank answers marked or not."""
    everyone = frozenset(message["role"] for message in messages)
    roles_wanted = {messages[index]["role"] for index in wanted}
    for roles in dict.fromkeys([everyone, everyone & {"assistant"}]):
        if roles_wanted <= roles and (roles == everyone or not _mimics(messages, template.facts())):
            for blanks in (True, False):
                layout = _lay_out(template, messages, tools, roles, text, blanks=blanks)
                if layout is not None:
                    return layout
    raise template.error(
        "what it prints around a message depends on the message's content, so that a second rendering "
        "with other contents does not match the first"
    )


def _render_any(
    template: ChatTemplate, conversation: Conversation
) -> tuple[str, list[tuple[int, int]], list[Message]]:
    """(text, tags, messages in the form that the template takes)."""
    messages = conversation.messages
    try:
        return *template.render(messages, tools=conversation.tools), messages
    except ChatTemplateError:
        for form in other_forms(messages):
            with suppress(ChatTemplateError):
                return *template.render(form, tools=conversation.tools), form
        raise


def _mimics(messages: list[Message], facts: TemplateFacts) -> bool:
    """Tell whether someone but the assistant wrote a header or a stop token."""
    marks = [mark for mark in (*facts.headers, facts.before_answer, *facts.stop_tokens) if mark.strip()]
    others = [str(message["content"]) for message in messages if message["role"] != "assistant"]
    return any(mark.strip() in content for content in others for mark in marks)


def _lay_out(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    roles: frozenset[str],
    text: str,
    *,
    blanks: bool,
) -> _Layout | None:
    leaves: list[_Leaf] = []
    marked = [
        _mark_message(message, index, leaves, blanks=blanks) if message["role"] in roles else message
        for index, message in enumerate(messages)
    ]
    try:
        places = _align(template.skeleton(marked, tools), text, leaves)
        if places is None:  # a template may print the date, which has changed since
            places = _align(template.skeleton(marked, tools, renew=True), text, leaves)
    except ChatTemplateError:
        return None
    return None if places is None else _Layout(leaves, places, len(text), marked)


def _align(marked: str, text: str, leaves: Sequence[_Leaf]) -> list[_Place] | None:
    """Put the leaves back for their sentinels; None unless that gives `text` exactly."""
    literal, *rest = SENTINEL.split(marked)
    if not text.startswith(literal):
        return None
    position, places = len(literal), []
    for number, literal in zip(rest[::2], rest[1::2], strict=True):
        leaf = leaves[int(number)]
        for spelling in leaf.spellings():
            end = position + len(spelling)
            if text.startswith(spelling, position) and text.startswith(literal, end):
                break
        else:
            return None
        places.append(_Place(int(number), leaf.message, position, end, leaf.is_reasoning))
        position = end + len(literal)
    return places if position == len(text) else None


def _mark_message(message: Message, index: int, leaves: list[_Leaf], *, blanks: bool) -> Message:
    """Copy a message with its texts replaced by sentinels, and note them in `leaves`.

    `blanks` says whether an answer of nothing but white space gets one too.
    """
    in_call = in_reasoning = False

    def add(*texts: str) -> str:
        leaves.append(_Leaf(index, texts, in_call, in_reasoning))
        return sentinel(len(leaves) - 1)

    known, marked = len(leaves), dict(message)
    for key in (*REASONING_KEYS, "content"):
        if key in marked:
            in_reasoning = key != "content"
            pattern = _THINK if "think>" in marked[key] else None
            first = len(leaves)
            marked[key] = _mark_text(marked[key], add, pattern)
            if pattern and not in_reasoning:
                _note_reasoning(marked[key], leaves, first)
    in_reasoning = False
    if "tool_calls" in marked:
        in_call = True
        marked["tool_calls"] = [_mark_call(call, leaves, add) for call in marked["tool_calls"]]
    if blanks and len(leaves) == known and message["role"] == "assistant":
        content = message["content"]
        # White space alone cannot stay around a sentinel, so it is replaced, in every way it may be stripped.
        stripped = (content, content.lstrip("\n"), content.rstrip("\n"), content.strip("\n"), "")
        marked["content"] = _mark_text(content, add) if content.strip() else add(*dict.fromkeys(stripped))
    return marked


def _mark_text(text: str, add: Callable[..., str], pattern: re.Pattern[str] | None = None) -> str:
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


def _note_reasoning(marked: str, leaves: list[_Leaf], first: int) -> None:
    """Note which leaves from `first` on stand inside of think tags; the opening one may be in the prompt."""
    inside = marked.find("</think>") >= 0 and not 0 <= marked.find("<think>") < marked.find("</think>")
    number = first
    for part in _THINK.split(marked):
        if _THINK.fullmatch(part):
            inside = part == "<think>"
        elif SENTINEL.search(part):
            leaves[number] = replace(leaves[number], is_reasoning=inside)
            number += 1


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


@dataclass(frozen=True)
class _TurnFinder:
    """Finds where a message's own characters begin and end in the template text around its leaves."""

    template: ChatTemplate
    facts: TemplateFacts
    messages: list[Message]
    tags: dict[int, list[tuple[int, int]]]
    layout: _Layout
    tools: list[dict[str, Any]] | None

    def find(self, text: str, extent: _Extent) -> list[Turn]:
        """The turns of one message."""
        index, floor, own, ceiling = extent
        if own is None:
            return self._find_blank(text, index, floor, ceiling)
        first, last = own
        message, tags = self.messages[index], self.tags.get(index, [])
        start = self._start(message, text[floor:first])
        if start is None:
            start = self._end_of_prompt(index, floor, text[floor:first])
        if start is None and tags and index and self.messages[index - 1]["role"] == "assistant":
            start = max(0, tags[0][0] - floor)  # nothing is generated anew between two answers in a row
        stop = self._stop(message, text[last:ceiling]) or self._end_of_ending(index, last, text[last:ceiling])
        if start is None:
            raise self.template.error(
                f"message {index} does not come after the generation prompt or anything like it; "
                "is it a second assistant message in a row, or one that follows a tool's?"
            )
        if stop is None:
            raise self.template.error(f"no end-of-turn token comes after the tool calls of message {index}")
        begin, stop_start, end = floor + start, last + stop[0], last + stop[1]
        # Tags say which part inside a turn is left out; a tag's end never is the end of the turn.
        gaps = [(left[1], right[0]) for left, right in pairwise(tags)]
        begin = max(begin, tags[0][0]) if tags else begin
        cuts = [begin, *(edge for gap in gaps for edge in gap), end]
        spans = list(zip(cuts[::2], cuts[1::2], strict=True))
        turns = [Turn(index, left, right, right) for left, right in spans[:-1]]
        return [*turns, Turn(index, spans[-1][0], stop_start, end)]

    def _find_blank(self, text: str, index: int, floor: int, ceiling: int) -> list[Turn]:
        """The turn of a message of which nothing is printed, or nothing but white space."""
        between = text[floor:ceiling]
        start = self._end_of_prompt(index, floor, between)
        ending = self._rendered_after(index + 1, floor, prompt=False)
        if start is None or ending is None or not between.startswith(ending) or len(ending) < start:
            raise self.template.error(f"message {index} is blank, and it does not show where its turn is")
        found = [(at, -len(stop)) for stop in self.facts.stop_tokens if (at := ending.find(stop, start)) >= 0]
        if found:
            at, length = min(found)
            return [Turn(index, floor + start, floor + at, floor + at - length)]
        end = floor + max(start, len(ending.rstrip()))
        return [Turn(index, floor + start, end, end)] if end > floor + start else []

    def _end_of_prompt(self, index: int, floor: int, before: str) -> int | None:
        """Where the generation prompt of exactly these messages ends in `before`; None if it is not there."""
        prompt = self._rendered_after(index, floor, prompt=True)
        if prompt is None:
            return None
        # A prompt may open a think block, or write an empty one, that this answer lacks or spells otherwise.
        for there in (prompt, _OPENED_THINK.sub("", prompt)):
            if before.startswith(there):
                return len(there)
        return None

    def _end_of_ending(self, index: int, last: int, after: str) -> tuple[int, int] | None:
        """Like `_stop`, by what is printed if the conversation ends with this message."""
        ending = self._rendered_after(index + 1, last, prompt=False)
        if ending is None or not after.startswith(ending):
            return None
        ending = ending.rstrip()
        token = self.template.last_special_token(ending)
        return len(ending) - len(token or ""), len(ending)

    def _rendered_after(self, count: int, position: int, *, prompt: bool) -> str | None:
        """What the first `count` messages print after the leaf that ends at `position` of the real text.

        None if that is not the last leaf they print.
        """
        messages = self.layout.marked[:count]
        if not messages:
            return None
        try:
            marked, _ = self.template.render(messages, tools=self.tools, add_generation_prompt=prompt)
        except ChatTemplateError:
            return None
        pieces = SENTINEL.split(marked)
        if len(pieces) == 1:
            return pieces[0] if position == 0 else None
        ends_here = any(p.leaf == int(pieces[-2]) and p.end == position for p in self.layout.places)
        return pieces[-1] if ends_here else None

    def _start(self, message: Message, before: str) -> int | None:
        """Offset in `before`, the template text in front of the first leaf; None if it cannot be told."""
        if message["role"] != "assistant":
            return len(before)
        for header in self.facts.headers:
            at = before.rfind(header)
            if at >= 0:
                return at + len(header)
        # Without a header only the message's own edge can stand in front, and only if it is there to see.
        head = _edges(message)[0]
        if not self.facts.headers and before.endswith(self.facts.before_answer + head):
            return len(before) - len(head)
        return None if self.facts.always_headed or head or not message["content"] else len(before)

    def _stop(self, message: Message, after: str) -> tuple[int, int] | None:
        """Offsets in `after` at which the end-of-turn token starts and ends; None if that cannot be told."""
        found = [(after.find(stop), -len(stop)) for stop in self.facts.stop_tokens if stop in after]
        if found:
            at, length = min(found)
            if message["role"] == "assistant" or not after[:at].strip():
                return at, at - length
        if "tool_calls" in message:
            return None
        tail = _edges(message)[1]
        endings = (tail + self.facts.after_answer, tail + self.facts.after_past_answer)
        kept = len(tail) if after.startswith(endings) else 0
        return kept, kept


def _edges(message: Message) -> tuple[str, str]:
    """What stands in front of the first and behind the last sentinel of a message's content."""
    if "tool_calls" in message:
        return "", ""
    for pattern in (_THINK, None):
        marked = _mark_text(message["content"], lambda *_: OPEN, pattern)
        if OPEN in marked:
            return marked.partition(OPEN)[0], marked.rpartition(OPEN)[2]
    return "", ""


def _tags_by_message(
    tags: list[tuple[int, int]], places: list[_Place], messages: list[Message]
) -> dict[int, list[tuple[int, int]]]:
    """Generation tags of each assistant message; none at all if one cuts a text or holds another role's."""
    owned: dict[int, list[tuple[int, int]]] = {}
    for start, end in tags:
        inside = [place for place in places if place.start < end and place.end > start]
        owners = {place.message for place in inside}
        whole = all(start <= place.start and place.end <= end for place in inside)
        if not whole or len(owners) > 1 or any(messages[index]["role"] != "assistant" for index in owners):
            return {}
        for index in owners:
            owned.setdefault(index, []).append((start, end))
    return owned
