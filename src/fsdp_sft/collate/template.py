"""A tokenizer's chat template, and what a small probe shows about it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2

from fsdp_sft._compat.data import render_chat
from fsdp_sft.collate.literals import (
    CLOSED_REASONING,
    common_length,
    sentinel,
    shared_header,
    through_the_tag,
)
from fsdp_sft.collate.messages import REASONING_KEYS, Message
from fsdp_sft.errors import ChatTemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SECONDS = 10.0  # of the CPU, for one conversation
_MAX_CHARACTERS = 1 << 27  # of a rendered conversation, which is copied several times
_MODES = tuple({name: on} for name in ("enable_thinking", "thinking") for on in (True, False))
_endless: set[str] = set()  # templates that have gone over the time, which are not tried again

# A macro or a block set captures its output, and transformers counts the offsets of generation tags in it
# from the start of that output, which makes them useless.
_CAPTURE = r"(?:macro|call|filter)\b|set\s+[\w.]+\s*-?%\}"
_CAPTURED_TAG = re.compile(
    rf"\{{%[-+]?\s*(?:{_CAPTURE})(?:(?!\{{%[-+]?\s*end(?:macro|call|filter|set)\b).)*?\{{%[-+]?\s*generation\b",
    re.DOTALL,
)


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
        stop_tokens: Tokens on which generation stops, or texts where the tokenizer has no such token.
        end_of_turn: Token or text that ends an answer and is trained; None if the template writes none.
        stop_is_token: Whether `end_of_turn` is a token of the tokenizer; also True where there is none.
        stop_has_more: Whether another token closes the answer before the one on which generation stops.
        in_parts: Whether contents must be lists of parts, as some templates of vision models require.
        supplied: The text between a later question and the start of generation in other modes (thinking or
            not), where reasoning is opened, or an empty block of it printed, by the prompt. For a template
            that prints an empty block which no prompt has, the text between the question and the answer.
        reasoning_key: The key of a message that the template prints as reasoning; "" if there is none.
        reads_tags: Of "<think>" and "" those behind which the template finds reasoning in a content itself.
    """

    headers: tuple[str, ...]
    always_headed: bool
    after_answer: str
    after_past_answer: str
    stop_tokens: tuple[str, ...]
    end_of_turn: str | None = None
    stop_is_token: bool = True
    stop_has_more: bool = False
    in_parts: bool = False
    supplied: tuple[str, ...] = ()
    reasoning_key: str = ""
    reads_tags: tuple[str, ...] = ()


class ChatTemplate:
    """A tokenizer's chat template, its renderings, and its `TemplateFacts`.

    Args:
        tokenizer: The tokenizer, for its template, its special tokens and its name in error messages.
        chat_template: A template, or the name of one of the tokenizer's; None takes the tokenizer's own.
        tools: Tool schemas of the conversation; some tokenizers have a second template for them.
        kwargs: Further variables of the template, for the probe and the rendering alike.
        thinks_in_parts: Whether reasoning is given as a part of type "thinking".

    Raises:
        ChatTemplateError: If there is no template; its reason is "no_template".
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
        *,
        thinks_in_parts: bool = False,
    ) -> None:
        if not chat_template and not tokenizer.chat_template:
            raise ChatTemplateError(
                f"{describe_tokenizer(tokenizer)} has no chat template; pass chat_template=, or set "
                "tokenizer.chat_template to the one of the model's instruct version (the tutorial "
                '"Teach a base model to chat" shows how)',
                reason="no_template",
            )
        self.tokenizer = tokenizer
        self.text: str = tokenizer.get_chat_template(chat_template, tools=tools)
        self._tags_count = not _has_captured_tag(self.text)
        self._variables: dict[str, Any] = {**tokenizer.special_tokens_map, **(kwargs or {})}
        self._tools = tools
        self._thinks_in_parts = False
        key = (self.text, repr(self._variables), len(tokenizer), tools is not None)
        known = _KNOWN.setdefault(tokenizer, {})
        if key not in known and len(known) >= _MAX_VARIABLES:
            known.pop(next(iter(known)), None)
        self._known = known.setdefault(key, _Known())
        special = sorted(filter(None, map(str, tokenizer.all_special_tokens)), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        self._in_parts = False
        with suppress(ChatTemplateError):  # a failed probe matters only when a turn is to be found
            self._in_parts = self.facts().in_parts
        self._thinks_in_parts = thinks_in_parts and self._takes_thinking()

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        mode: dict[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation in transformers' sandbox; `mode` goes before other variables.

        Returns:
            (text, character spans of the generation tags; empty if the tags are in a macro or a block set).

        Raises:
            ChatTemplateError: If the template refuses the conversation, or does not parse ("no_template").
        """
        if self._in_parts or self._thinks_in_parts:
            messages = [self._as_parts(message) for message in messages]
        try:
            with _limited(self.text):
                text, tags = render_chat(
                    self.text,
                    messages,
                    variables={**self._variables, **(mode or {})},
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                )
            if len(text) > _MAX_CHARACTERS:
                raise ValueError(f"it writes {len(text):,} characters, at most {_MAX_CHARACTERS:,} are read")
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template of {describe_tokenizer(self.tokenizer)} does not parse: line "
                f"{error.lineno}: {error.message}; repair it, or pass another chat_template= (the tutorial "
                '"Teach a base model to chat" has one)',
                reason="no_template",
            ) from None
        except Exception as error:
            raise ChatTemplateError(
                f"the chat template of {describe_tokenizer(self.tokenizer)} does not take this conversation: "
                f"{type(error).__name__}: {error}"[:2000]
                + "; change the row, or pass another chat_template="
            ) from None  # a cause would be printed as its template wrote it
        return text, tags if self._tags_count else []

    def _takes_thinking(self) -> bool:
        """Whether the template reads parts of type "thinking"; others print the list of parts as Python does.

        Where it does not, reasoning is given as ``reasoning_content``, like parts of type "reasoning".
        """
        self._thinks_in_parts = True
        answer = {"role": "assistant", "content": "said", "reasoning_content": "thought"}
        try:
            text, _ = self.render([{"role": "user", "content": "asked"}, answer], tools=self._tools)
        except ChatTemplateError:
            return False
        return re.search(r"""['"]type['"]: ?['"]thinking['"]""", text) is None

    def holds_special_token(self, text: str) -> bool:
        """Whether a text holds a special token of the tokenizer, which is then one in the rendering too."""
        return self._special is not None and self._special.search(text) is not None

    def _as_parts(self, message: Message) -> Message:
        """The message with its content, and reasoning that was given in parts, as a list of parts."""
        text, thinks = message["content"], self._thinks_in_parts and "reasoning_content" in message
        if not self._in_parts and not thinks:
            return message
        parts = [{"type": "text", "text": text}] if text or not thinks else []
        if thinks:
            thought = [{"type": "text", "text": message["reasoning_content"]}]
            parts.insert(0, {"type": "thinking", "thinking": thought})
        kept = {key: value for key, value in message.items() if not thinks or key != "reasoning_content"}
        return {**kept, "content": parts}

    def skeleton(
        self,
        marked: list[Message],
        tools: list[dict[str, Any]] | None,
        *,
        renew: bool = False,
        prompt: bool = False,
    ) -> str:
        """Render a conversation whose texts are sentinels.

        Renderings are cached, since many conversations have the same sentinels; not so for conversations with
        tools or with further keys in a message.

        Args:
            marked: Messages with sentinels.
            tools: Tool schemas.
            renew: Whether to render again even if the rendering is cached.
            prompt: Whether to end with a generation prompt.
        """
        if tools is not None or any(len(message) != 2 for message in marked):
            return self.render(marked, tools=tools, add_generation_prompt=prompt)[0]
        known = self._known.skeletons
        key = (prompt, *((message["role"], message["content"]) for message in marked))
        if renew or key not in known:
            text = self.render(marked, add_generation_prompt=prompt)[0]
            if known.get(key, text) != text or len(known) >= _MAX_SKELETONS:  # of another day, or too many
                known.clear()
            known[key] = text
        return known[key]

    def facts(self) -> TemplateFacts:
        """Probe the template, once per tokenizer and template."""
        if self._known.facts is None:
            self._known.facts = self._probe_either_form()
        return self._known.facts

    def _probe_either_form(self) -> TemplateFacts:
        """Probe with plain texts or, if that fails, with tools, contents in parts, or both."""
        try:
            return self._probe(None)
        except ChatTemplateError:
            # A template for tools may refuse a chat without them, and a vision model's may refuse plain text.
            for in_parts, tools in ((False, self._tools), (True, None), (True, self._tools)):
                self._in_parts = in_parts
                if in_parts or tools:
                    with suppress(ChatTemplateError):
                        return replace(self._probe(tools), in_parts=in_parts)
            self._in_parts = False
            raise

    def _probe(self, tools: list[dict[str, Any]] | None) -> TemplateFacts:
        """Facts from renderings of four sentinels, with and without a generation prompt."""

        def render(chat: list[Message], *, prompt: bool = False) -> str:
            return self.render(chat, tools=tools, add_generation_prompt=prompt)[0]

        # Message n consists of sentinel n alone, so the rest of a rendering is the template's own text.
        # `asked` follows the question when only the question is rendered, `prompted` when a generation prompt
        # is rendered with it; `prompted_later` follows the second question.
        roles = ("user", "assistant", "user", "assistant")
        chat: list[Message] = [{"role": role, "content": sentinel(n)} for n, role in enumerate(roles)]
        question = render(chat[:1])
        asked, prompted = self._after(0, question), self._after(0, render(chat[:1], prompt=True))
        prompted_later = self._after(2, render(chat[:3], prompt=True))
        answered = render(chat)
        # Templates of reasoning models may give past answers another header than the last one.
        before_past, before_answer = (
            self._after(question, answered).partition(sentinel(question + 1))[0] for question in (0, 2)
        )
        after_answer = self._after(3, answered)
        after_past_answer = self._after(1, answered).partition(sentinel(2))[0]
        shared, shared_past = (shared_header(prompted, before) for before in (before_answer, before_past))
        # Not prompted[len(asked):], because some templates end a rendering without a prompt differently.
        skip = common_length(asked, prompted)
        prompt = prompted[skip:]
        headers = [prompted, shared, shared_past]
        if prompt.strip():
            headers = [header[skip:] for header in headers]
        reasoned: dict[str, str] = {}  # text behind the last question, by the key of the reasoning
        for key in REASONING_KEYS:
            with suppress(ChatTemplateError):
                text = self._after(2, render([*chat[:3], {**chat[3], key: sentinel(4)}]))
                if sentinel(4) in text:
                    reasoned[key] = text
        supplied = self._supplied(chat, tools, before_answer, reasoned)
        varies = not (prompted.startswith(prompted_later) or prompted_later.startswith(prompted))
        return TemplateFacts(
            headers=() if varies else tuple(filter(str.strip, sorted(headers, key=len, reverse=True))),
            always_headed=varies or bool(prompt.strip()),
            after_answer=after_answer,
            after_past_answer=after_past_answer,
            supplied=tuple(text for text in dict.fromkeys(supplied) if text != prompted_later),
            reasoning_key=next(iter(reasoned), ""),
            reads_tags=tuple(self._tags_read(chat, tools, next(iter(reasoned.values()), ""))),
            **self._closing(after_answer, after_past_answer, question.partition(sentinel(0))[0]),
        )

    def _closing(self, after_answer: str, after_past_answer: str, before_question: str) -> dict[str, Any]:
        """The facts about the end of a turn."""
        # The text that closes an answer: what follows the last answer or, in templates that close an answer
        # only if another message follows, what follows a past answer, up to the header of the next question.
        closing = after_answer
        if not closing.strip():
            closing = self._without_next_header(after_past_answer, before_question)
        first, end_of_turn = self._stop_tokens(closing, after_past_answer)
        text = closing.strip()
        is_token = end_of_turn is not None or not text
        if end_of_turn is None and text and after_past_answer.startswith(closing.rstrip()):
            first = end_of_turn = text
        stops = [self.tokenizer.eos_token, first, end_of_turn]
        return {
            "stop_tokens": tuple(dict.fromkeys(str(stop) for stop in stops if stop)),
            "end_of_turn": end_of_turn,
            "stop_is_token": is_token or end_of_turn is None,
            "stop_has_more": first != end_of_turn,
        }

    def _supplied(
        self,
        chat: list[Message],
        tools: list[dict[str, Any]] | None,
        before_answer: str,
        reasoned: dict[str, str],
    ) -> list[str]:
        """Prompts behind a later question in all modes, and the text with an empty block that no prompt has.

        Args:
            chat: The messages of the probe.
            tools: Its tools.
            before_answer: Text between the last question and its answer.
            reasoned: Text behind the last question with reasoning, by the key of the reasoning.
        """
        supplied = []
        for mode in _MODES:
            with suppress(ChatTemplateError):
                text, _ = self.render(chat[:3], tools=tools, add_generation_prompt=True, mode=mode)
                supplied.append(self._after(2, text))
        for text in reasoned.values():
            opening, behind, *_ = re.split(f"{sentinel(4)}|{sentinel(3)}", text)
            tag = CLOSED_REASONING.match(behind)
            if (
                tag
                and _squeezed(opening + behind) == _squeezed(before_answer)
                and not any(one.rstrip().endswith(tag[0].strip()) for one in supplied)
            ):
                supplied.append(before_answer.removesuffix(behind.removeprefix(tag[0])))
        return supplied

    def _tags_read(
        self, chat: list[Message], tools: list[dict[str, Any]] | None, reasoned: str
    ) -> Iterator[str]:
        """The openings of reasoning in a content that the template does not take for text of the answer.

        Args:
            chat: The messages of the probe.
            tools: Its tools.
            reasoned: Text behind the last question with reasoning under a key of its own; "" if none is read.
        """
        for opening in ("<think>", ""):  # a prompt may have written the tag
            content = f"{opening}\n{sentinel(4)}\n</think>\n\n{sentinel(3)}"
            with suppress(ChatTemplateError):
                told = self._after(
                    2, self.render([*chat[:3], {**chat[3], "content": content}], tools=tools)[0]
                )
                if _squeezed(told) == _squeezed(reasoned) if reasoned else content.strip() not in told:
                    yield opening

    def _without_next_header(self, after_past_answer: str, before_question: str) -> str:
        """`after_past_answer` without the header of the next question: the text that closes the answer.

        The text in front of the first question ends with that header, but may share more with the closing
        text, such as the end of a default system message.

        Args:
            after_past_answer: Text between an earlier answer and the next user content.
            before_question: Text in front of the first question.
        """
        # Some headers number the turns.
        first, later = (re.sub(r"\d", "0", text)[::-1] for text in (before_question, after_past_answer))
        length = len(after_past_answer) - common_length(first, later)
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values()]
        length = through_the_tag(after_past_answer, length, [token for token in added if token])
        eos = str(self.tokenizer.eos_token or "")
        more = re.match(rf"\s*{re.escape(eos)}", after_past_answer[length:]) if eos else None
        return after_past_answer[: length + more.end() if more else length]

    def _after(self, number: int, text: str) -> str:
        """The text behind sentinel `number`, which must occur exactly once."""
        mark = sentinel(number)
        if text.count(mark) != 1:
            raise self.error("it does not print each message exactly once")
        return text[text.index(mark) + len(mark) :]

    def _stop_tokens(self, after_answer: str, after_past_answer: str) -> tuple[str | None, str | None]:
        """(the token that closes the answer, the token on which generation stops), usually the same.

        Args:
            after_answer: Text that closes the last answer.
            after_past_answer: Text between an earlier answer and the next user content.
        """
        found, special = [], []
        for token in self.tokenizer.added_tokens_decoder.values():
            if token.special:
                special.append(re.escape(token.content))
            at = after_answer.find(token.content) if token.content.strip() else -1
            # In some tokenizers the end-of-turn token is not special. Its place directly behind the answer
            # shows it.
            if at >= 0 and (token.special or not after_answer[:at].strip()):
                found.append((at, -len(token.content), token.content))
        if not found:
            return None, None
        at, _, first = min(found)
        # Generation stops on EOS if it follows the token that closes the answer directly, or later but in
        # every turn. A later EOS after the last turn alone closes the conversation and not the turn.
        eos = str(self.tokenizer.eos_token or "")
        run = re.compile(f"(?:{'|'.join(special)})*").match(after_answer, at) if special else None
        of_every_turn = after_answer[: common_length(after_answer, after_past_answer)]
        is_later = eos and (eos in of_every_turn or (run is not None and eos in run[0]))
        return first, eos if is_later else first

    def last_special_token(self, text: str) -> str | None:
        """The special token with which ``text`` ends; None if it ends with something else."""
        added = (token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        found = [token for token in added if token and text.endswith(token)]
        return max(found, key=len, default=None)

    def error(self, reason: str) -> ChatTemplateError:
        """A `ChatTemplateError` that states `reason` and what to do."""
        return ChatTemplateError(
            f"cannot tell which tokens the assistant writes with the chat template of "
            f"{describe_tokenizer(self.tokenizer)}: {reason}; pass a chat_template= that prints every "
            "message as it is, with {% generation %}...{% endgeneration %} around the assistant's part"
        )


@dataclass
class _Known:
    """What is remembered of a template with its variables.

    Attributes:
        facts: Its facts; None before the probe.
        skeletons: Renderings of sentinels.
    """

    facts: TemplateFacts | None = None
    skeletons: dict[Any, str] = field(default_factory=dict)


_KNOWN: weakref.WeakKeyDictionary[Any, dict[Any, _Known]] = weakref.WeakKeyDictionary()
_MAX_SKELETONS = 1024
_MAX_VARIABLES = 64  # sets of variables of a template that are remembered: rows may each have their own
_one_at_a_time = threading.Lock()  # transformers keeps the places of generation tags in one object


def _begin_anew() -> None:
    """In a forked process, where the thread that holds the lock may not be."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def _limited(template: str) -> Iterator[None]:
    """Let a rendering take so many seconds of this thread's CPU, where this is the main thread.

    A template is a program. transformers' sandbox keeps it from files and from Python, and not from looping
    for ever. Only the main thread is told of signals, and only between two operations of Python.

    Raises:
        TimeoutError: If the time is up, now or in an earlier rendering of the template.
    """
    told = f"it takes more than {_SECONDS:g} s of the CPU: is it a program that does not end?"
    if template in _endless:
        raise TimeoutError(told)

    def time_is_up(*_: object) -> None:
        if time.thread_time() - started >= _SECONDS:  # else other threads have used the process's time
            _endless.add(template)
            raise TimeoutError(told)

    with _one_at_a_time:
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGPROF) is None:  # None: a profiler in C uses the signal
            yield
            return
        started = time.thread_time()
        former = signal.signal(signal.SIGPROF, time_is_up)
        timer = signal.setitimer(signal.ITIMER_PROF, _SECONDS, _SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, *timer)
            signal.signal(signal.SIGPROF, former)


def templates_used(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Texts of the templates with which this process has encoded rows for this tokenizer."""
    return {text for text, *_ in _KNOWN.get(tokenizer, ())}


@lru_cache(maxsize=64)
def _has_captured_tag(template: str) -> bool:
    """Whether a generation tag is inside a macro or a block set."""
    return _CAPTURED_TAG.search(template) is not None


def _squeezed(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Class and name of a tokenizer, for error messages."""
    name = tokenizer.name_or_path
    return f"{type(tokenizer).__name__} {name!r}" if name else type(tokenizer).__name__
