"""Which characters of a rendered conversation are trained.

A chat template is a program, so searching its output for an answer is not enough: a user may quote the
answer, a header or an end-of-turn token. The conversation is therefore rendered twice: once as it is, and
once with every content replaced by a numbered sentinel, which occurs nowhere else. If replacing the sentinels
by the contents gives the first rendering, character for character, then the places of the sentinels are the
places of the contents. If it does not, a `ChatTemplateError` is raised. A sentinel that the template does not
print stands for a text that the template drops.

An example, with a ChatML template. `↵` is a line break, and `⟨0⟩` is the sentinel of text 0 (the number
between two private-use characters)::

    messages:  user "1 + 1?", assistant "2"

    as it is:        <|im_start|>user↵1 + 1?<|im_end|>↵<|im_start|>assistant↵2<|im_end|>↵
    with sentinels:  <|im_start|>user↵⟨0⟩<|im_end|>↵<|im_start|>assistant↵⟨1⟩<|im_end|>↵

The sentinels split the second rendering into three literals, which are the template's own text. With "1 + 1?"
put back for `⟨0⟩` and "2" for `⟨1⟩` (the *leaves*) it equals the first rendering. So the lengths of literals
and leaves, added up, give the place of each leaf::

    character  0                17    23                               56         67
               <|im_start|>user↵1 + 1?<|im_end|>↵<|im_start|>assistant↵2<|im_end|>↵
    leaf                        ^^^^^^                                 ^
                                0                                      1
    trained                                                            ~~~~~~~~~~~

The turn starts where the generation prompt ends: the literal in front of leaf 1 ends with the header
`<|im_start|>assistant↵`, and the first trained character, 56, is the one behind that. The turn ends with the
end-of-turn token, which is the first stop token in the literal behind leaf 1: the last trained character is
66. The line break after it is not trained, because generation has stopped by then.

The prompt is rendered for the messages in front of the answer, since it may depend on anything: a system
message, tools, the number of the turn (``_TurnFinder.starts``). Where it cannot be rendered, as for an
answer that opens the conversation, or is not what stands there, the header counts with which the prompt of a
question ends. Stop tokens are properties of the template and not of the row. `ChatTemplate.facts` learns them
once, from a probe of four messages whose contents are sentinels: the end-of-turn token is, as a rule, the
first special token that the template prints after the last answer.

Where the literal behind a turn contains no stop token, its end comes from another rendering: of the messages
up to and including it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from fsdp_sft.collate.layout import (
    CLOSE,
    CLOSED_REASONING,
    OPEN,
    OPENED_REASONING,
    Layout,
    MessageSpan,
    Place,
    TextSlot,
    common_length,
    lay_out,
    mark_texts,
    occurs,
    overlap,
    shared_header,
)
from fsdp_sft.collate.options import EncodeOptions
from fsdp_sft.collate.probe import TemplateFacts
from fsdp_sft.collate.rows import ROLES, Conversation, Message
from fsdp_sft.collate.template import ChatTemplate
from fsdp_sft.errors import ChatTemplateError

# A tag that opens reasoning in the rendered text.
_OPENING = re.compile(r"(?:<[^<>]*>|\[[^\[\]]*\]|\{[^{}]*\})\s*$")
_NUMBER = re.compile(r"\d+")
# A block of reasoning without any, whose opening tag the prompt may have written.
_THINK_TAG, _END_TAG = (rf"[<\[]{end}[^<>\[\]/]*think[^<>\[\]/]*[>\]]\s*" for end in ("", r"(?:/|\|END_)"))
_EMPTY_BLOCK, _REST_OF_BLOCK, _BEGUN_BLOCK = (
    re.compile(pattern, re.IGNORECASE)
    for pattern in (rf"\s*{_THINK_TAG}{_END_TAG}", rf"\s*{_END_TAG}", rf"{_THINK_TAG}$")
)
_OPENED_THINK = re.compile(r"(?:<think[^<>]*>\s*)?(?:</think[^<>]*>\s*)?$")


@dataclass(slots=True)
class Turn:
    """Trained characters of one message.

    Attributes:
        message: Index of the message.
        start: First trained character.
        stop_start: First character of the end-of-turn token; equal to `end` where the template writes none
            after the message.
        end: The character after the last trained one; the end-of-turn token is [stop_start, end).
    """

    message: int
    start: int
    stop_start: int
    end: int


@dataclass(slots=True)
class Found:
    """A rendered conversation and the characters of it that are trained. Spans are [start, end).

    Attributes:
        text: The rendered conversation.
        messages: The messages in the form that the template accepts.
        turns: Trained characters, in the order of the text. A message has several turns where the template's
            own generation tags leave out a part in its middle.
        dropped: Texts of the trained messages that the template does not print.
        notes: Names of notes on the row.
    """

    text: str
    messages: list[Message]
    turns: list[Turn] = field(default_factory=list)
    dropped: list[TextSlot] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_turns(template: ChatTemplate, conversation: Conversation, options: EncodeOptions) -> Found:
    """Render a conversation and find the characters that are trained.

    Args:
        template: The chat template.
        conversation: The conversation to render.
        options: Which messages are trained, and whether their reasoning, with the tags that open and close
            it, or an empty block of it is. With ``train_on="all"`` there are no turns, since all is trained.

    Raises:
        ChatTemplateError: If the characters cannot be determined with certainty.
        ValueError: For a message that is not to be trained, with ``train_on="all"``.
    """
    text, tags, messages = template.render_any(conversation.messages, conversation.tools)
    if options.train_on == "all":
        return Found(text, messages, dropped=_not_in_the_text(conversation, messages, text))
    wanted = _wanted(conversation, options)
    if not wanted:
        return Found(text, messages)
    layout = lay_out(template, messages, conversation.tools, wanted, text)
    # A turn begins and ends in the template's own text, so a conversation with other texts between the same
    # literals has its edges as far behind the ends of its texts.
    ends = [0, *(place.end for place in layout.places)]
    is_usual = (
        not tags
        and len(layout.skeleton.edges) < 256  # of each row other messages may be trained
        and len(ends) > len(layout.skeleton.numbers)
        and all(at.start < at.end for at in layout.places)
    )
    alike = layout.skeleton.edges if is_usual else {}
    key = (
        *sorted(wanted),
        *(options.empty_reasoning, options.train_reasoning),
        *(not message["content"] for message in messages),
    )
    if key not in alike:
        finder = _TurnFinder(template, template.facts(), messages, conversation.tools, layout, options)
        alike[key] = list(finder.turns(text, tags, wanted)), ends, finder.notes
    known, before, notes = alike[key]
    turns = [
        Turn(
            turn.message,
            *(
                edge - before[last := bisect_right(before, edge) - 1] + ends[last]
                for edge in (turn.start, turn.stop_start, turn.end)
            ),
        )
        for turn in known
    ]
    printed = {id(place.leaf) for place in layout.places}
    dropped = [
        leaf
        for leaf in layout.leaves
        if leaf.message in wanted
        and id(leaf) not in printed
        and (options.train_reasoning or leaf.part != "reasoning")
    ]
    # A call whose arguments have texts is found by these: its name may be missing all the same.
    for index in {turn.message for turn in turns if "tool_calls" in messages[turn.message]}:
        edges = [edge for turn in turns if turn.message == index for edge in (turn.start, turn.end)]
        dropped += [
            TextSlot(index, (name,), "name of a tool")
            for call in messages[index]["tool_calls"]
            if not occurs(
                text[edges[0] : max(*edges, *(p.end for p in layout.places if p.leaf.message == index))],
                name := call["function"]["name"],
            )
        ]
    if not options.train_reasoning:
        turns = [part for turn in turns for part in _without_reasoning(turn, layout.places, text)]
    return Found(text, messages, sorted(turns, key=lambda turn: turn.start), dropped, list(notes))


def _wanted(conversation: Conversation, options: EncodeOptions) -> set[int]:
    """Indices of the messages whose role is trained and that are not switched off."""
    roles = options.train_on if isinstance(options.train_on, tuple) else ("assistant",)
    indices = [
        i
        for i, message in enumerate(conversation.messages)
        if message["role"] in roles and (message["role"] == "assistant" or message["content"].strip())
    ]
    return {i for i in indices[-1 if options.train_on == "last" else 0 :] if conversation.trained[i]}


def _not_in_the_text(conversation: Conversation, messages: list[Message], text: str) -> list[TextSlot]:
    """The texts of a conversation, all of which is trained, that do not occur in its rendering."""
    if not all(conversation.trained):
        raise ValueError(
            f'train_on="all" trains every token, and message {conversation.trained.index(False)} is not '
            'to be trained: give the roles, such as train_on={"user", "assistant"}, where a weight of 0 says '
            'so; join a prompt that is a list of messages: {"messages": row["prompt"] + row["completion"]}'
        )
    return [
        leaf for leaf in mark_texts(messages, set(ROLES), blanks=False)[0] if not occurs(text, *leaf.texts)
    ]


def _without_reasoning(turn: Turn, places: list[Place], text: str) -> Iterator[Turn]:
    """The parts of a turn without its reasoning and without the tags right before and after reasoning."""
    mine = [place for place in places if turn.start <= place.start and place.end <= turn.stop_start]
    ends = [turn.start, *(place.end for place in mine)]
    starts = [*(place.start for place in mine[1:]), turn.stop_start]
    start = turn.start
    for before, place, after in zip(ends, mine, starts, strict=False):
        if place.leaf.part == "reasoning":
            opening = _OPENING.search(text[before : place.start])
            closing = CLOSED_REASONING.match(text[place.end : after])
            # Nothing but the header of the reasoning stands between the turn's start and its first text.
            end = before if place is mine[0] else before + opening.start() if opening else place.start
            if end > start:
                yield Turn(turn.message, start, end, end)
            start = place.end + (closing.end() if closing else 0)
    yield Turn(turn.message, start, max(start, turn.stop_start), turn.end)


@dataclass(slots=True)
class _TurnFinder:
    """Finds the edges of a turn in the template's text before and after the leaves of its message.

    Attributes:
        template: The chat template.
        facts: Its stop tokens, and its header for where no prompt can be rendered.
        messages: Messages of the conversation, in the form that the template accepts.
        tools: Tool schemas of the conversation.
        layout: Places of the texts in the rendering.
        options: Whether an empty block of reasoning is part of a turn.
        notes: Names of notes on the row.
        closings: What ends a rendering behind an answer, by the text behind it and the roles there.
    """

    template: ChatTemplate
    facts: TemplateFacts
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    layout: Layout
    options: EncodeOptions
    notes: list[str] = field(default_factory=list)
    closings: dict[tuple[str, ...], str | None] = field(default_factory=dict)

    def starts(self, text: str, extents: list[MessageSpan]) -> dict[int, int | None]:
        """Where each message begins behind its `floor`, by the generation prompt; None if unknown.

        Rendering a prompt for each answer takes time quadratic in their number. So of answers with the same
        literal in front of them, behind messages of one role, those between the first and the last start
        there if both of these do.
        """
        starts: dict[int, int | None] = {}
        alike: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for index, floor, own, ceiling in extents:
            before = text[floor : own[0] if own else ceiling]
            if self.messages[index]["role"] != "assistant":
                starts[index] = len(before) if own else None
            else:
                role = self.messages[index - 1]["role"] if index else ""
                alike.setdefault((role, before), []).append((index, floor))
        for (_, before), answers in reversed(alike.items()):
            first = self._start(*answers[0], before)
            is_last_alike = len(answers) == 1 or self._start(*answers[-1], before) == first
            starts |= {i: first if is_last_alike else self._start(i, floor, before) for i, floor in answers}
        return starts

    def turns(self, text: str, tags: list[tuple[int, int]], wanted: set[int]) -> Iterator[Turn]:
        """The turns of the wanted messages, narrowed by the template's generation tags."""
        extents = self.layout.extents(self.template, wanted, len(text))
        owned = _tags_by_message(tags, self.layout.places, self.messages)
        # A template with tags says what is trained: an answer with a text outside of them is not.
        says_all = sum(map(len, owned.values())) == len(tags) > 0
        extents = [
            at
            for at in extents
            if not says_all
            or at.message in owned
            or at.own is None
            or self.messages[at.message]["role"] != "assistant"
        ]
        starts = self.starts(text, extents)
        for extent in extents:
            yield from self.find(text, extent, starts[extent.message], owned.get(extent.message, []))

    def find(
        self, text: str, extent: MessageSpan, start: int | None, tags: list[tuple[int, int]]
    ) -> list[Turn]:
        """The turns of the message at `extent`, which begins at `start` behind its `floor`, if that is known.

        The template's generation `tags` in it narrow them.

        Raises:
            ChatTemplateError: If its start or its end cannot be told.
        """
        index, floor, own, ceiling = extent
        if start is None and tags and index and self.messages[index - 1]["role"] == "assistant":
            # Between two consecutive answers there is no generation prompt to mark the start.
            start = max(0, tags[0][0] - floor)
        if start is None:
            raise self.template.error(
                f"message {index} does not come after the generation prompt or anything like it; "
                "is it a second assistant message in a row, or one that follows a tool's?"
            )
        begin = floor + start
        begin += self._supplied(index, text[:begin], text[begin : own[0] if own else ceiling], own)
        last = own[1] if own else floor
        stop_start, end = (
            last + edge for edge in self._stop(index, text[last:ceiling], last, max(0, begin - last), own)
        )
        # What lies between two {% generation %} blocks of one turn is not trained. The end of the last block
        # is not the end of the turn: the end-of-turn token may follow.
        first = max(begin, tags[0][0]) if tags else begin
        cuts = [first, *(edge for left, right in pairwise(tags) for edge in (left[1], right[0])), end]
        *parts, (begin, _) = zip(cuts[::2], cuts[1::2], strict=True)
        turns = [Turn(index, left, right, right) for left, right in parts]
        if tags and last > tags[-1][1]:  # a text that the tags leave out, and the end of the turn with it
            stop_start = end = tags[-1][1]
        return [*turns, Turn(index, begin, stop_start, end)]

    def _start(self, index: int, floor: int, before: str) -> int | None:
        """Offset at which the generation prompt for an answer and `before` part; None if unknown."""
        prompt = self._rendered_after(index, floor, prompt=True)
        if prompt is not None:
            start = _end_of_prompt(prompt, before)
            if start is not None:
                return start
            if index and self.messages[index - 1]["role"] != "assistant":
                self.notes.append("prompt_differs")
            if _NUMBER.sub("0", before).startswith(_NUMBER.sub("0", prompt)):
                return None  # a number that only the row has would be trained
        # The answer opens the conversation, or follows messages that the template does not take alone; or
        # the prompt is not what stands in front of it. Then it begins with the header of any question's.
        for header in self.facts.headers:
            at = before.rfind(header)
            if at >= 0:
                return at + len(header)
        return (
            None
            if self.facts.always_headed or self._edges(index)[0] or not self.messages[index]["content"]
            else len(before)
        )

    def _stop(
        self, index: int, after: str, last: int, first: int, own: tuple[int, int] | None
    ) -> tuple[int, int]:
        """Start and end of the end-of-turn token in `after`; equal if the template writes no such token.

        Args:
            index: Index of the message.
            after: The text behind its last leaf or, if it has none, behind the leaf in front of it.
            last: Position of that text.
            first: Offset in it from which the turn's characters count.
            own: Positions of the message's leaves; None if it has none.

        Raises:
            ChatTemplateError: If nothing tells where a call or a blank answer ends.
        """
        found = [(at, -len(stop)) for stop in self.facts.stop_tokens if (at := after.find(stop, first)) >= 0]
        if found:
            at, length = min(found)
            if self.messages[index]["role"] == "assistant" or not after[:at].strip():
                end = at - length
                if self.facts.stop_has_more:  # the last of them, if it closes this turn and not a later one
                    until = common_length(self._closing(index, after, last) or "", after)
                    more = after.find(str(self.facts.end_of_turn), end, until)
                    end = more + len(str(self.facts.end_of_turn)) if more >= 0 else end
                return at, end
        if own and "tool_calls" not in self.messages[index]:
            tail = self._edges(index)[1]
            endings = (tail + self.facts.after_answer, tail + self.facts.after_past_answer)
            return (len(tail), len(tail)) if after.startswith(endings) else (0, 0)
        ending = self._closing(index, after, last)
        if ending is None or not after.startswith(ending):
            raise self.template.error(
                f"no end-of-turn token comes after the {'tool calls of' if own else 'blank'} message {index}"
            )
        end = max(first, len(ending.rstrip()))
        token = re.search(rf"(?:{self.template.special_token.pattern})\s*$", ending)
        return max(first, token.start() if token else end), end

    def _closing(self, index: int, after: str, last: int) -> str | None:
        """What is printed behind the leaf that ends at `last` if the conversation ends with its message.

        It is looked up where the same text stood behind a message of the same role, in front of one of the
        same role: a row of many calls would else take a rendering for each.
        """
        alike = (after, *(message["role"] for message in self.messages[index : index + 2]))
        if alike not in self.closings:
            self.closings[alike] = self._rendered_after(index + 1, last, prompt=False)
        return self.closings[alike]

    def _supplied(self, index: int, asked: str, before: str, own: tuple[int, int] | None) -> int:
        """Number of characters of an answer that a prompt supplies in some mode, and that are not trained.

        They open reasoning, unless the row's own prompt leaves it to the model whether to, or, where none
        follows, are an empty block of it. `asked` is the text up to the start of the turn, and `before` that
        from there to the message's first leaf.
        """
        if self.messages[index]["role"] != "assistant":
            return 0
        reasons = own is not None and any(
            place.start == own[0] and place.leaf.part == "reasoning" for place in self.layout.places
        )
        # A template in a mode without reasoning prints the row's own tag as text of the answer.
        is_text = reasons and before == self._edges(index)[0] and not self.facts.reads_tags
        openings = () if is_text else self.facts.opening if reasons else self.facts.supplied
        length = max((n for n in (overlap(one, before) for one in openings) if before[:n].strip()), default=0)
        if not (reasons or length or (self.options.train_reasoning and "</think>" in self._edges(index)[0])):
            # The template prints one that no prompt has; a block of the row's own is its text.
            length = len(
                (
                    (_REST_OF_BLOCK if _BEGUN_BLOCK.search(asked[-64:]) else _EMPTY_BLOCK).match(before)
                    or [""]
                )[0]
            )
        if reasons or not length:
            return length
        self.notes.append("empty_reasoning")
        return length if self.options.empty_reasoning != "train" or not self.options.train_reasoning else 0

    def _edges(self, index: int) -> tuple[str, str]:
        """White space and think tags of a content before its first sentinel and behind its last one."""
        content = self.layout.marked[index]["content"]
        if OPEN not in content or "tool_calls" in self.messages[index]:
            return "", ""
        return content.partition(OPEN)[0], content.rpartition(CLOSE)[2]

    def _rendered_after(self, count: int, position: int, *, prompt: bool) -> str | None:
        """The text that follows the last leaf when only the first `count` messages are rendered.

        None if that leaf is not the one that ends at `position` of the whole conversation: the two renderings
        then differ before the end of the shorter one.
        """
        if not count:
            return None
        with suppress(ChatTemplateError):
            shorter = self.template.skeleton(self.layout.marked[:count], self.tools, prompt=prompt)
            last = self.layout.leaves[shorter.numbers[-1]] if shorter.numbers else None
            ends = [place.end for place in self.layout.places if place.leaf is last] if last else [0]
            if position in ends:
                return shorter.literals[-1]
        return None


def _end_of_prompt(prompt: str, before: str) -> int | None:
    """Offset in `before`, the text in front of an answer, at which the generation prompt ends.

    None if `before` does not begin with the prompt. An opening of reasoning, or an empty think block, at the
    end of the prompt may be missing or different in `before`.
    """
    without_block = prompt if before.startswith(prompt) else _OPENED_THINK.sub("", prompt)
    if before.startswith(without_block):
        return len(without_block)
    shared = shared_header(prompt, before)
    return len(shared) if shared.strip() and OPENED_REASONING.fullmatch(prompt[len(shared) :]) else None


def _tags_by_message(
    tags: list[tuple[int, int]], places: list[Place], messages: list[Message]
) -> dict[int, list[tuple[int, int]]]:
    """Spans of the template's generation tags by assistant message.

    Empty if one of the tags cuts through a text, or contains texts of several messages or of another role.
    """
    owned: dict[int, list[tuple[int, int]]] = {}
    for start, end in tags:
        inside = [place for place in places if place.start < end and place.end > start]
        owners = {place.leaf.message for place in inside}
        if (
            len(owners) > 1
            or any(place.start < start or end < place.end for place in inside)
            or any(messages[index]["role"] != "assistant" for index in owners)
        ):
            return {}
        for index in owners:
            owned.setdefault(index, []).append((start, end))
    return owned
