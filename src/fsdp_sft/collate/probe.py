"""What a probe with four messages shows about a chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_sft.collate.layout import (
    CLOSED_REASONING,
    SENTINEL,
    common_length,
    sentinel,
    shared_header,
    through_the_tag,
)
from fsdp_sft.collate.rows import REASONING_KEYS, Message
from fsdp_sft.errors import ChatTemplateError

if TYPE_CHECKING:
    from fsdp_sft.collate.template import ChatTemplate

# Message n consists of sentinel n alone, so the rest of a rendering is the template's own text.
_CHAT: list[Message] = [
    {"role": role, "content": sentinel(number)} for number, role in enumerate(("user", "assistant") * 2)
]
_MODES = tuple({name: on} for name in ("enable_thinking", "thinking") for on in (True, False))


@dataclass(frozen=True)
class TemplateFacts:
    """What a probe with four messages shows about a template.

    Attributes:
        headers: Texts that end where generation starts, the longest first. Empty if there is no such text, or
            the prompt after a later question differs from the one after the first: some templates number
            their turns.
        always_headed: Whether a generation prompt adds a header to the question, or varies.
        after_answer: Text after the last answer.
        after_past_answer: Text between an earlier answer and the next user content.
        supplied: The text between a later question and the start of generation in other modes (thinking or
            not), where reasoning is opened, or an empty block of it printed, by the prompt. For a template
            that prints an empty block which no prompt has, the text between the question and the answer.
        opening: Those of them that are no continuation of the row's own prompt. Where one is, the own prompt
            lets the model open reasoning or not.
        reasoning_key: The key of a message that the template prints as reasoning; "" if there is none.
        reads_tags: Of "<think>" and "" those behind which the template finds reasoning in a content itself.
        stop_tokens: Tokens on which generation stops, or texts where the tokenizer has no such token.
        end_of_turn: Token or text that ends an answer and is trained; None if the template writes none.
        stop_is_token: Whether `end_of_turn` is a token of the tokenizer; also True where there is none.
        stop_has_more: Whether another token closes the answer before the one on which generation stops.
        in_parts: Whether contents must be lists of parts, as some templates of vision models require.
    """

    headers: tuple[str, ...]
    always_headed: bool
    after_answer: str
    after_past_answer: str
    supplied: tuple[str, ...]
    opening: tuple[str, ...]
    reasoning_key: str
    reads_tags: tuple[str, ...]
    stop_tokens: tuple[str, ...]
    end_of_turn: str | None
    stop_is_token: bool
    stop_has_more: bool
    in_parts: bool = False


@dataclass(frozen=True)
class Probe:
    """Renderings of two questions and two answers, and the template's own text in them.

    Attributes:
        template: The chat template.
        tools: Tool schemas.
    """

    template: ChatTemplate
    tools: list[dict[str, Any]] | None

    def facts(self) -> TemplateFacts:
        """What the renderings show.

        Raises:
            ChatTemplateError: If the template refuses them, or does not print each message exactly once.
        """
        # `asked` follows the question when only the question is rendered, `prompted` when a generation prompt
        # is rendered with it; `prompted_later` follows the second question.
        before_question, asked = self._around(0, _CHAT[:1])
        _, prompted = self._around(0, _CHAT[:1], add_generation_prompt=True)
        _, prompted_later = self._around(2, _CHAT[:3], add_generation_prompt=True)
        # Templates of reasoning models may give past answers another header than the last one.
        answered, _ = self.template.render(_CHAT, tools=self.tools)
        pieces = SENTINEL.split(answered)
        if pieces[1::2] != ["0", "1", "2", "3"]:
            raise self.template.error("it does not print each message exactly once")
        _, before_past, after_past_answer, before_answer, after_answer = pieces[::2]
        shared, shared_past = (shared_header(prompted, before) for before in (before_answer, before_past))
        # Not prompted[len(asked):], because some templates end a rendering without a prompt differently.
        skip = common_length(asked, prompted)
        is_headed = bool(prompted[skip:].strip())
        headers = [header[skip if is_headed else 0 :] for header in (prompted, shared, shared_past)]
        varies = not (prompted.startswith(prompted_later) or prompted_later.startswith(prompted))
        reasoned = self._reasoned()
        supplied = dict.fromkeys(self._supplied(before_answer, list(reasoned.values())))
        return TemplateFacts(
            headers=() if varies else tuple(filter(str.strip, sorted(headers, key=len, reverse=True))),
            always_headed=varies or is_headed,
            after_answer=after_answer,
            after_past_answer=after_past_answer,
            supplied=tuple(text for text in supplied if text != prompted_later),
            opening=tuple(text for text in supplied if not text.startswith(prompted_later)),
            reasoning_key=next(iter(reasoned), ""),
            reads_tags=tuple(self._tags_read(next(iter(reasoned.values()), ""))),
            **self._closing(after_answer, after_past_answer, before_question),
        )

    def _around(self, number: int, messages: list[Message], **options: Any) -> tuple[str, str]:
        """The text in front of sentinel `number`, which must occur exactly once, and that behind it."""
        text, _ = self.template.render(messages, tools=self.tools, **options)
        before, *behind = text.split(sentinel(number))
        if len(behind) != 1:
            raise self.template.error("it does not print each message exactly once")
        return before, behind[0]

    def _reasoned(self) -> dict[str, str]:
        """The text behind the last question with reasoning, by the keys under which it is printed."""
        found = {}
        for key in REASONING_KEYS:
            with suppress(ChatTemplateError):
                _, text = self._around(2, [*_CHAT[:3], {**_CHAT[3], key: sentinel(4)}])
                if sentinel(4) in text:
                    found[key] = text
        return found

    def _supplied(self, before_answer: str, reasoned: list[str]) -> Iterator[str]:
        """Prompts behind a later question in all modes, and the text with an empty block that no prompt has.

        Args:
            before_answer: Text between the last question and its answer.
            reasoned: Text behind the last question with reasoning, under one key or another.
        """
        prompts = []
        for mode in _MODES:
            with suppress(ChatTemplateError):
                _, text = self._around(2, _CHAT[:3], add_generation_prompt=True, mode=mode)
                prompts.append(text)
        yield from prompts
        for text in reasoned:
            opening, behind, *_ = re.split(f"{sentinel(4)}|{sentinel(3)}", text)
            tag = CLOSED_REASONING.match(behind)
            is_empty = tag and _squeezed(opening + behind) == _squeezed(before_answer)
            if tag and is_empty and not any(one.rstrip().endswith(tag[0].strip()) for one in prompts):
                yield before_answer.removesuffix(behind.removeprefix(tag[0]))

    def _tags_read(self, reasoned: str) -> Iterator[str]:
        """The openings of reasoning in a content that the template does not take for text of the answer.

        Args:
            reasoned: Text behind the last question with reasoning under a key of its own; "" if none is read.
        """
        for opening in ("<think>", ""):  # a prompt may have written the tag
            content = f"{opening}\n{sentinel(4)}\n</think>\n\n{sentinel(3)}"
            with suppress(ChatTemplateError):
                _, told = self._around(2, [*_CHAT[:3], {**_CHAT[3], "content": content}])
                if _squeezed(told) == _squeezed(reasoned) if reasoned else content.strip() not in told:
                    yield opening

    def _closing(self, after_answer: str, after_past_answer: str, before_question: str) -> dict[str, Any]:
        """The facts about the end of a turn.

        Args:
            after_answer: Text after the last answer.
            after_past_answer: Text between an earlier answer and the next user content.
            before_question: Text in front of the first question.
        """
        # The text that closes an answer: what follows the last answer or, in templates that close an answer
        # only if another message follows, what follows a past answer, up to the header of the next question.
        closing = (
            after_answer
            if after_answer.strip()
            else self._without_next_header(after_past_answer, before_question)
        )
        # In some tokenizers the end-of-turn token is not special: its place directly behind the answer
        # shows it.
        found = [
            (at, -len(token.content), token.content)
            for token in self.template.tokenizer.added_tokens_decoder.values()
            if token.content.strip()
            and (at := closing.find(token.content)) >= 0
            and (token.special or not closing[:at].strip())
        ]
        first = end_of_turn = None
        if found:
            # Generation stops on EOS if it follows the token that closes the answer directly, or later but in
            # every turn. A later EOS after the last turn alone closes the conversation and not the turn. Of a
            # template that writes no EOS in a turn the last token of every turn is the one.
            at, _, first = min(found)
            run = re.compile(f"(?:{self.template.special_token.pattern})*").match(closing, at)
            of_every_turn = closing[: common_length(closing, after_past_answer)]
            eos = str(self.template.tokenizer.eos_token or "")
            is_later = eos and (eos in of_every_turn or (run is not None and eos in run[0]))
            later = [token for token in self.template.special_token.findall(of_every_turn) if token != eos]
            end_of_turn = eos if is_later else later[-1] if later else first
        elif closing.strip() and after_past_answer.startswith(closing.rstrip()):
            first = end_of_turn = closing.strip()
        stops = (self.template.tokenizer.eos_token, first, end_of_turn)
        return {
            "stop_tokens": tuple(dict.fromkeys(str(stop) for stop in stops if stop)),
            "end_of_turn": end_of_turn,
            "stop_is_token": bool(found) or end_of_turn is None,
            "stop_has_more": first != end_of_turn,
        }

    def _without_next_header(self, after_past_answer: str, before_question: str) -> str:
        """`after_past_answer` without the header of the next question: the text that closes the answer.

        The text in front of the first question ends with that header, but may share more with the closing
        text, such as the end of a default system message.
        """
        # Some headers number the turns.
        first, later = (re.sub(r"\d", "0", text)[::-1] for text in (before_question, after_past_answer))
        length = len(after_past_answer) - common_length(first, later)
        added = [token.content for token in self.template.tokenizer.added_tokens_decoder.values()]
        length = through_the_tag(after_past_answer, length, filter(None, added))
        eos = str(self.template.tokenizer.eos_token or "")
        more = re.match(rf"\s*{re.escape(eos)}", after_past_answer[length:]) if eos else None
        return after_past_answer[: length + more.end() if more else length]


def _squeezed(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())
