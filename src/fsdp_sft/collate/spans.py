"""Which characters of a rendered conversation are trained.

A chat template is a program, so the place of an answer in its output cannot be read off the text: a user
may quote the answer, a header or an end-of-turn token. The conversation is therefore rendered twice, once
as it is and once with every content replaced by a numbered sentinel. Where putting the contents back for
the sentinels gives the first rendering character for character, the sentinels tell where the contents are;
where it does not, a `ChatTemplateError` is raised. A sentinel that is not printed is a text that the template
drops. Where a turn has no known header or end-of-turn token,
its edges are those of two more renderings: of the messages before it with a generation prompt, and of the
messages up to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fsdp_sft.collate.forms import other_forms
from fsdp_sft.collate.layout import THINK, Dropped, Extent, Layout, Place, lay_out, mark_text
from fsdp_sft.collate.rows import Conversation, Message
from fsdp_sft.collate.template import (
    OPEN,
    ChatTemplate,
    TemplateFacts,
    common_length,
    split_at_sentinels,
)
from fsdp_sft.errors import ChatTemplateError

# What opens and closes reasoning in the rendered text: <think>, [THINK], <|END_THINKING|>, <|end|> ...
_OPENING = re.compile(r"(?:<[^<>]*>|\[[^\[\]]*\])\s*$")
_CLOSING = re.compile(r"\s*(?:<[^<>]*>|\[[^\[\]]*\])\s*")
_OPENED_THINK = re.compile(r"(?:<think[^<>]*>\s*)?(?:</think[^<>]*>\s*)?$")


@dataclass(slots=True)
class Turn:
    """Trained characters of one message: [start, end), of which [stop_start, end) is the end-of-turn token.

    `stop_start == end` where the template writes no end-of-turn token after the message.
    """

    message: int
    start: int
    stop_start: int
    end: int


@dataclass(slots=True)
class Found:
    """What is trained of a conversation.

    Attributes:
        text: The rendered conversation.
        turns: In the order of the text. A message has several where the template's own generation tags leave
            out a part in its middle.
        dropped: What the template leaves out of the messages that are trained.
        answers: First and last character of what is printed of each trained message of the assistant.
        weighed: First and last character of each part with a weight of its own, and the weight.
    """

    text: str
    turns: list[Turn]
    dropped: tuple[Dropped, ...] = ()
    answers: tuple[tuple[int, int], ...] = ()
    weighed: tuple[tuple[int, int, float], ...] = ()


def find_turns(
    template: ChatTemplate,
    conversation: Conversation,
    wanted: Iterable[int],
    *,
    reasoning: bool = True,
    printed: Iterable[int] | None = None,
) -> Found:
    """Render a conversation and find the trained characters of the messages `wanted`.

    Args:
        template: The chat template.
        conversation: What to render.
        wanted: Indices of messages.
        reasoning: Whether their reasoning belongs to them, with the tags that open and close it.
        printed: Messages of which each text must be printed; None for those that are wanted.

    Raises:
        ChatTemplateError: If the characters cannot be told for sure.
    """
    text, tags, messages = _render_any(template, conversation)
    wanted = set(wanted)
    printed = wanted if printed is None else set(printed)
    if not wanted and not printed:
        return Found(text, [])
    if OPEN in text:
        raise template.error(f"the conversation holds the private-use character {OPEN!r}")
    facts = template.facts()
    layout = lay_out(
        template, messages, conversation.tools, wanted or printed, text, conversation.part_weights
    )
    # With weight 0 in a conversation that is trained whole: what is not printed need not be taken out.
    wanted -= layout.absent(wanted - printed)
    layout.check(template, wanted)
    owned = _tags_by_message(tags, layout.places, messages)
    finder = _TurnFinder(template, facts, messages, owned, layout, conversation.tools)
    spoken = {index for index in printed if messages[index]["role"] == "assistant"}
    extents = list(layout.extents(wanted | spoken))
    turns = [turn for extent in extents if extent.message in wanted for turn in finder.find(text, extent)]
    answers = tuple(e.own for e in extents if e.own is not None and e.message in spoken)
    last_question = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    dropped = tuple(layout.dropped(printed, last_question))
    if not reasoning:
        turns = [part for turn in turns for part in _without_reasoning(turn, layout.places, text)]
        dropped = tuple(item for item in dropped if item.part != "reasoning")
    weighed = tuple(layout.weighed(text))
    return Found(text, sorted(turns, key=lambda turn: turn.start), dropped, answers, weighed)


def _without_reasoning(turn: Turn, places: list[Place], text: str) -> Iterator[Turn]:
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
        if number == 0:  # all that stands before it is its header
            end = turn.start
        if end > start:
            yield Turn(turn.message, start, end, end)
        start = place.end + (closing.end() if closing else 0)
    yield Turn(turn.message, start, max(start, turn.stop_start), turn.end)


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


@dataclass(slots=True)
class _TurnFinder:
    """Finds where a message's own characters begin and end in the template text around its leaves."""

    template: ChatTemplate
    facts: TemplateFacts
    messages: list[Message]
    tags: dict[int, list[tuple[int, int]]]
    layout: Layout
    tools: list[dict[str, Any]] | None

    def find(self, text: str, extent: Extent) -> list[Turn]:
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
        if stop is not None and self.facts.stop_has_more:
            stop = stop[0], self._through_the_stop(index, last, text[last:ceiling], stop[1])
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

    def _through_the_stop(self, index: int, last: int, after: str, end: int) -> int:
        """Where the token ends on which generation stops, if it closes this turn too; else `end`."""
        ending, stop = self._rendered_after(index + 1, last, prompt=False), self.facts.end_of_turn or ""
        at = after.find(stop, 0, common_length(ending, after)) if ending is not None else -1
        return max(end, at + len(stop)) if at >= 0 else end

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
        pieces, numbers = split_at_sentinels(marked, numeric=self.layout.numeric)
        if not numbers:
            return pieces[0] if position == 0 else None
        ends_here = any(p.leaf == numbers[-1] and p.end == position for p in self.layout.places)
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
    for pattern in (THINK, None):
        marked = mark_text(message["content"], lambda *_: OPEN, pattern)
        if OPEN in marked:
            return marked.partition(OPEN)[0], marked.rpartition(OPEN)[2]
    return "", ""


def _tags_by_message(
    tags: list[tuple[int, int]], places: list[Place], messages: list[Message]
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
