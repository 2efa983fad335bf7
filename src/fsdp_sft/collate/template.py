"""A tokenizer's chat template, and what can be learnt about it from a small probe."""

from __future__ import annotations

import re
import weakref
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fsdp_sft import _compat
from fsdp_sft.collate.rows import Message
from fsdp_sft.errors import ChatTemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Two private-use characters around a number; no tokenizer, template or strip() treats them specially.
OPEN, CLOSE = "\U000f5b01", "\U000f5b02"
SENTINEL = re.compile(f"{OPEN}([0-9]+){CLOSE}")

# Offsets of generation tags count from the start of the block that captures its output.
_CAPTURE = r"(?:macro|call|filter)\b|set\s+[\w.]+\s*-?%\}"
_CAPTURED_TAG = re.compile(
    rf"\{{%[-+]?\s*(?:{_CAPTURE})(?:(?!\{{%[-+]?\s*end(?:macro|call|filter|set)\b).)*?\{{%[-+]?\s*generation\b",
    re.DOTALL,
)


@dataclass(frozen=True)
class TemplateFacts:
    """What a probe with four messages tells about a template.

    Attributes:
        headers: Texts that end where generation starts, the best first; empty if there is no such text.
        always_headed: Whether a header of its own stands in front of every answer, not just a question's end.
        before_answer: Text between the user's content and the answer.
        after_answer: Text after the last answer.
        after_past_answer: Text between an earlier answer and the next user's content.
        stop_tokens: Tokens on which generation stops.
        end_of_turn: The token that ends an answer, as it is trained; None if the template writes none.
        in_parts: Whether contents must be lists of parts, as some templates of vision models want them.
    """

    headers: tuple[str, ...]
    always_headed: bool
    before_answer: str
    after_answer: str
    after_past_answer: str
    stop_tokens: tuple[str, ...]
    end_of_turn: str | None = None
    in_parts: bool = False


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
        self._tags_count = not _has_captured_tag(self.text)
        self._special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self._key = (self.text, tuple(map(str, self._special_tokens.values())), len(tokenizer))
        self._in_parts = False
        with suppress(ChatTemplateError):  # what cannot be told is no matter until a turn is to be found
            self._in_parts = self.facts().in_parts

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render in the sandbox.

        Returns:
            (text, character spans of generation tags; none where a macro or a block set holds the tags).
        """
        import jinja2

        if self._in_parts:
            messages = [_in_parts(message) for message in messages]
        try:
            text, tags = _compat.render_chat(
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
        return text, tags if self._tags_count else []

    def skeleton(
        self, marked: list[Message], tools: list[dict[str, Any]] | None, *, renew: bool = False
    ) -> str:
        """Render a conversation whose texts are sentinels; many conversations have the same one.

        Args:
            marked: The messages.
            tools: Tool schemas.
            renew: Whether to render in any case.
        """
        if tools is not None or any(len(message) != 2 for message in marked):
            return self.render(marked, tools=tools)[0]
        known = _SKELETONS.setdefault(self.tokenizer, {}).setdefault(self._key, {})
        key = tuple((message["role"], message["content"]) for message in marked)
        if renew or key not in known:
            if len(known) >= _MAX_SKELETONS:
                known.clear()
            known[key] = self.render(marked)[0]
        return known[key]

    def facts(self) -> TemplateFacts:
        """Probe the template, once per tokenizer and template."""
        known = _FACTS.setdefault(self.tokenizer, {})
        if self._key not in known:
            known[self._key] = self._probe_either_form()
        return known[self._key]

    def _probe_either_form(self) -> TemplateFacts:
        try:
            return self._probe()
        except ChatTemplateError:
            self._in_parts = True
            with suppress(ChatTemplateError):
                return replace(self._probe(), in_parts=True)
            self._in_parts = False
            raise

    def _probe(self) -> TemplateFacts:
        roles = ("user", "assistant", "user", "assistant")
        chat = [{"role": role, "content": sentinel(number)} for number, role in enumerate(roles)]
        asked = self._after(0, self.render(chat[:1])[0])
        prompted = self._after(0, self.render(chat[:1], add_generation_prompt=True)[0])
        answered = self.render(chat)[0]
        # Templates of reasoning models write another header in front of answers of the past.
        before_past, before_answer = (
            self._after(question, answered).partition(sentinel(question + 1))[0] for question in (0, 2)
        )
        after_answer = self._after(3, answered)
        after_past_answer = self._after(1, answered).partition(sentinel(2))[0]
        shared, shared_past = (
            prompted[: common_length(prompted, before)] for before in (before_answer, before_past)
        )
        # Not len(asked): some templates close the rendering without a prompt in a way of its own.
        skip = common_length(asked, prompted)
        prompt = prompted[skip:]
        headers = [prompted, shared, shared_past]
        if prompt.strip():
            headers = [header[skip:] for header in headers]
        end_of_turn = self._stop_token(after_answer)
        stops = [self.tokenizer.eos_token, end_of_turn]
        return TemplateFacts(
            headers=tuple(header for header in sorted(headers, key=len, reverse=True) if header.strip()),
            always_headed=bool(prompt.strip()),
            before_answer=before_answer,
            after_answer=after_answer,
            after_past_answer=after_past_answer,
            stop_tokens=tuple(dict.fromkeys(str(stop) for stop in stops if stop)),
            end_of_turn=end_of_turn,
        )

    def _after(self, number: int, text: str) -> str:
        mark = sentinel(number)
        if text.count(mark) != 1:
            raise self.error("it does not print each message exactly once")
        return text[text.index(mark) + len(mark) :]

    def _stop_token(self, after_answer: str) -> str | None:
        found, special = [], []
        for token in self.tokenizer.added_tokens_decoder.values():
            if not token.content.strip():
                continue
            if token.special:
                special.append(re.escape(token.content))
            at = after_answer.find(token.content)
            # Some tokenizers add their end-of-turn token as an ordinary one; it is known by its place.
            if at >= 0 and (token.special or not after_answer[:at].strip()):
                found.append((at, -len(token.content), token.content))
        if not found:
            return None
        at, _, first = min(found)
        # Cohere closes the answer with one token and, directly after it, the turn with another.
        run = re.compile(f"(?:{'|'.join(special)})*").match(after_answer, at)
        eos = self.tokenizer.eos_token
        return str(eos) if eos and run and str(eos) in run[0] else first

    def last_special_token(self, text: str) -> str | None:
        """The special token that ``text`` ends with; None if it ends with something else."""
        added = (token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special)
        found = [token for token in added if token and text.endswith(token)]
        return max(found, key=len, default=None)

    def error(self, reason: str) -> ChatTemplateError:
        """A `ChatTemplateError` that says `reason` and the way out."""
        return ChatTemplateError(
            f"cannot tell which tokens the assistant writes with the chat template of "
            f"{describe_tokenizer(self.tokenizer)}: {reason}; pass a chat_template= that prints every "
            "message as it is, with {% generation %}...{% endgeneration %} around the assistant's part"
        )


_FACTS: weakref.WeakKeyDictionary[Any, dict[Any, TemplateFacts]] = weakref.WeakKeyDictionary()
_SKELETONS: weakref.WeakKeyDictionary[Any, dict[Any, dict[Any, str]]] = weakref.WeakKeyDictionary()
_MAX_SKELETONS = 1024


def templates_used(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The templates with which this process has encoded rows by this tokenizer."""
    return {key[0] for key in _FACTS.get(tokenizer, {})}


@lru_cache(maxsize=64)
def _has_captured_tag(template: str) -> bool:
    return _CAPTURED_TAG.search(template) is not None


def describe_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Name a tokenizer in an error message."""
    name = tokenizer.name_or_path
    return f"{type(tokenizer).__name__} {name!r}" if name else type(tokenizer).__name__


def _in_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def common_length(first: str, second: str) -> int:
    """Length of the longest common prefix."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def sentinel(number: int) -> str:
    """The placeholder for the text `number`."""
    return f"{OPEN}{number}{CLOSE}"
