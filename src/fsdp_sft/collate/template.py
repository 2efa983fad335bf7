"""A tokenizer's chat template and its renderings."""

from __future__ import annotations

import json
import math
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
from itertools import chain, count, product
from typing import TYPE_CHECKING, Any

import jinja2

from fsdp_sft.collate.layout import Skeleton, split_at_sentinels
from fsdp_sft.collate.probe import Probe, TemplateFacts
from fsdp_sft.collate.rows import REASONING_KEYS, Message
from fsdp_sft.errors import ChatTemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SECONDS = 10.0  # of the CPU, for one conversation
_rendering = threading.local()  # `since`: when this thread began to, in its CPU time
_endless: set[str] = set()  # templates that have gone over the time, which are not tried again

# A macro or a block set captures its output, and transformers counts the offsets of generation tags in it
# from the start of that output, which makes them useless.
_CAPTURE = r"(?:macro|call|filter)\b|set\s+[\w.]+\s*-?%\}"
_captured_tag = lru_cache(maxsize=64)(
    re.compile(
        rf"\{{%[-+]?\s*(?:{_CAPTURE})(?:(?!\{{%[-+]?\s*end(?:macro|call|filter|set)\b).)*?\{{%[-+]?\s*generation\b",
        re.DOTALL,
    ).search
)


class ChatTemplate:
    """A tokenizer's chat template, its renderings, and its `TemplateFacts`.

    Args:
        tokenizer: The tokenizer, for its template, its special tokens and its name in error messages.
        chat_template: A template, or the name of one of the tokenizer's; None takes the tokenizer's own.
        tools: Tool schemas of the conversation; some tokenizers have a second template for them.
        kwargs: Further variables of the template, for the probe and the rendering alike.
        thinks_in_parts: Whether reasoning is given as a part of type "thinking".

    Attributes:
        special_token: What the tokenizer reads as a special token, in the texts of a row too.

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
                "tokenizer.chat_template to the one of the model's instruct version (the page "
                '"Train on your chat data" shows how)',
                reason="no_template",
            )
        self.tokenizer = tokenizer
        self.text: str = tokenizer.get_chat_template(chat_template, tools=tools)
        self._tags_count = _captured_tag(self.text) is None
        self._variables: dict[str, Any] = {**tokenizer.special_tokens_map, **(kwargs or {})}
        self._tools = tools
        self._thinks_in_parts = False
        key = (self.text, repr(self._variables), len(tokenizer), tools is not None)
        known = _KNOWN.setdefault(tokenizer, {})
        if key not in known:
            if len(known) >= _MAX_VARIABLES:
                known.pop(next(iter(known)), None)
            added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special} - {
                ""
            }
            known[key] = _Known(
                re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)")
            )
        self._known = known[key]
        self.special_token = self._known.special_token
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
        try:
            if self.text in _endless:
                raise TimeoutError
            with _one_at_a_time:
                _rendering.since = time.thread_time()
                text, tags = render_chat(
                    self.text,
                    [self._as_parts(message) for message in messages],
                    variables={**self._variables, **(mode or {})},
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                )
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template of {describe_tokenizer(self.tokenizer)} does not parse: line "
                f"{error.lineno}: {error.message}; repair it, or pass another chat_template= (the page "
                '"Train on your chat data" has one)',
                reason="no_template",
            ) from None
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            if isinstance(error, TimeoutError):
                _endless.add(self.text)
                told = f"it takes more than {_SECONDS:g} s of the CPU: is it a program that does not end?"
            raise ChatTemplateError(
                f"the chat template of {describe_tokenizer(self.tokenizer)} does not take this conversation: "
                f"{told}"[:2000]
                + "; change the row, or pass another chat_template="
            ) from None  # a cause would be printed as its template wrote it
        finally:
            _rendering.since = math.inf
        return text, tags if self._tags_count else []

    def render_any(
        self, messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]], list[Message]]:
        """Render messages in the first form that the template accepts: theirs, or one of `other_forms`.

        Reasoning at the beginning of a content goes where the template wants it, unless it refuses that.

        Returns:
            (text, spans of the template's generation tags, messages in the form that was accepted).
        """
        wanted, refused = [messages], []
        if any("</think>" in message["content"] for message in messages if message["role"] == "assistant"):
            with suppress(ChatTemplateError):
                apart = [_reasoning_apart(message, self.facts()) for message in messages]
                if self.facts().reasoning_key and apart != messages:
                    wanted.insert(0, apart)
        for one in wanted:
            for form in chain([one], other_forms(one)):
                try:
                    return *self.render(form, tools=tools), form
                except ChatTemplateError as error:
                    refused.append(error)
        raise refused[0]

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

    def _as_parts(self, message: Message) -> Message:
        """The message with its content, and reasoning that was given in parts, as a list of parts."""
        text, thinks = message["content"], self._thinks_in_parts and "reasoning_content" in message
        if not self._in_parts and not thinks:
            return message
        parts = [{"type": "text", "text": text}] if text or not thinks else []
        if thinks:
            thought = {"type": "text", "text": message["reasoning_content"]}
            parts.insert(0, {"type": "thinking", "thinking": [thought]})
        return {
            **{key: value for key, value in message.items() if not thinks or key != "reasoning_content"},
            "content": parts,
        }

    def skeleton(
        self,
        marked: list[Message],
        tools: list[dict[str, Any]] | None,
        *,
        renew: bool = False,
        prompt: bool = False,
    ) -> Skeleton:
        """Render a conversation whose texts are sentinels, and split it at them.

        Renderings are kept, since many conversations have the same sentinels, and many the same tools.

        Args:
            marked: Messages with sentinels.
            tools: Tool schemas.
            renew: Whether to render again even if the rendering is kept.
            prompt: Whether to end with a generation prompt.
        """
        known, key = self._known.skeletons, (prompt, self._thinks_in_parts, repr(marked), repr(tools))
        found = None if renew else known.get(key)
        if found is None:
            found = split_at_sentinels(self.render(marked, tools=tools, add_generation_prompt=prompt)[0])
            if known.get(key, found) != found or len(known) >= _MAX_SKELETONS:  # of another day, or too many
                known.clear()
            known[key] = found
        return found  # another thread may clear what is known

    def facts(self) -> TemplateFacts:
        """What a probe of the template shows, once per tokenizer, template and variables."""
        if self._known.facts is None:
            self._known.facts = self._probed()
        return self._known.facts

    def _probed(self) -> TemplateFacts:
        """The facts from plain texts or, if the template refuses those, with tools, in parts, or both."""
        # A template for tools may refuse a chat without them, and a vision model's may refuse plain text.
        refused = []
        for in_parts, tools in product((False, True), (None, self._tools)):
            self._in_parts = in_parts
            try:
                return replace(Probe(self, tools).facts(), in_parts=in_parts)
            except ChatTemplateError as error:
                refused.append(error)
        self._in_parts = False
        raise refused[0]

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
        special_token: What its tokenizer reads as a special token, wherever it stands.
        facts: Its facts; None before the probe.
        skeletons: Renderings of sentinels.
    """

    special_token: re.Pattern[str]
    facts: TemplateFacts | None = None
    skeletons: dict[tuple[bool, bool, str, str], Skeleton] = field(default_factory=dict)


_KNOWN: weakref.WeakKeyDictionary[Any, dict[Any, _Known]] = weakref.WeakKeyDictionary()
_MAX_SKELETONS = 1024  # each holds the tools of its conversation twice
_MAX_VARIABLES = 64  # sets of variables of a template that are remembered: rows may each have their own
_one_at_a_time = threading.RLock()  # transformers keeps the places of generation tags in one object
# A process that is forked while another thread renders would wait for that thread, which it does not have.
os.register_at_fork(
    before=_one_at_a_time.acquire,
    after_in_parent=_one_at_a_time.release,
    after_in_child=_one_at_a_time.release,
)


@contextmanager
def limited_time() -> Iterator[None]:
    """Let each rendering take so many seconds of this thread's CPU, where this is the main thread.

    A template is a program. transformers' sandbox keeps it from files and from Python, and not from looping
    for ever. Only the main thread is told of signals, and only between two operations of Python.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGPROF) is None  # a profiler in C uses the signal
    ):
        yield
        return
    former = signal.signal(signal.SIGPROF, _look_at_the_time)
    timer = signal.setitimer(signal.ITIMER_PROF, _SECONDS / 10, _SECONDS / 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, *timer)
        signal.signal(signal.SIGPROF, former)


def _look_at_the_time(*_: object) -> None:
    # Else other threads have used the process's time.
    if time.thread_time() - getattr(_rendering, "since", math.inf) >= _SECONDS:
        raise TimeoutError


def _reasoning_apart(message: Message, facts: TemplateFacts) -> Message:
    """An assistant's message with its reasoning out of its content, unless the template finds it there."""
    head, closing, answer = message["content"].partition("</think>")
    before, opening, thought = head.partition("<think>")
    if (
        message["role"] != "assistant"
        or not closing
        or (opening and before.strip())
        or opening in facts.reads_tags
        or any(key in message for key in REASONING_KEYS)
        # With a closing tag alone, a line must end behind it: else the answer may speak of the tag.
        or (not opening and re.match(r"[^\S\n]*(?:\n|$)", answer) is None)
    ):
        return message
    reasoning = (thought if opening else head).strip()  # an empty one may be printed
    return {**message, **({facts.reasoning_key: reasoning} if reasoning else {}), "content": answer.lstrip()}


def render_chat(
    template: str,
    messages: list[dict[str, Any]],
    *,
    variables: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Render one conversation in transformers' sandbox.

    ``apply_chat_template`` calls ``render_jinja_template``; only the latter returns the character spans of
    ``{% generation %}`` blocks.

    Returns:
        (text, character spans of the generation blocks; empty for a template without them).
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    # A template without the tag is not asked for spans, since transformers would log a warning.
    tagged = _has_generation_tag(template)
    render: Any = render_jinja_template  # annotated as returning a str; returns a pair, at least up to 5.23
    texts, spans = render(
        [messages],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=tagged,
        continue_final_message=False,  # so that no row can set it
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    return texts[0], [(int(start), int(end)) for start, end in (spans[0] if tagged else ())]


@lru_cache(maxsize=64)
def _has_generation_tag(template: str) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def other_forms(messages: list[Message]) -> Iterator[list[Message]]:
    """Alternative forms of the messages, the smallest change first; none without tool calls.

    - Arguments of tool calls as a JSON string, for templates that concatenate them with other strings.
    - Ids of nine characters for tool calls, and for each result the id and the name of its call, which the
      templates of Mistral's models require and most data sets lack.
    - Both.
    """
    if not any("tool_calls" in message for message in messages):
        return
    as_json = _with_json_arguments(messages)
    yield from (as_json, _with_call_ids(messages), _with_call_ids(as_json))


def _with_json_arguments(messages: list[Message]) -> list[Message]:
    """The messages with arguments of tool calls as JSON strings."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        return {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }

    return [
        {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_call_ids(messages: list[Message]) -> list[Message]:
    """Give each call an id, and each result the id and name of its call.

    A result belongs to the call with the same id in the row, or else to the first call without a result.
    """
    changed: list[Message] = []
    waiting: list[tuple[dict[str, Any], str]] = []  # calls without a result, and their ids for the template
    number = count()
    for message in messages:
        if "tool_calls" in message:
            named = [(call, f"call{next(number):05d}") for call in message["tool_calls"]]
            message = {**message, "tool_calls": [{**call, "id": name} for call, name in named]}
            waiting += named
        elif message["role"] == "tool" and waiting:
            given = message.get("tool_call_id")
            answered = next(
                (item for item in waiting if given is not None and item[0].get("id") == given), waiting[0]
            )
            waiting.remove(answered)
            message = {"name": answered[0]["function"]["name"], **message, "tool_call_id": answered[1]}
        changed.append(message)
    return changed


def templates_used(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Texts of the templates with which this process has encoded rows for this tokenizer."""
    return {text for text, *_ in _KNOWN.get(tokenizer, ())}


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Class and name of a tokenizer, for error messages."""
    return f"{type(tokenizer).__name__} {tokenizer.name_or_path!r}".removesuffix(" ''")
