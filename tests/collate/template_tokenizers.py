"""Tokenizers for templates that come without one, as those of a test; forms of messages that they take."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.collate.mask_oracle import Render
from tests.harness import chat_templates as ct
from tests.harness.chats import chat

SPECIAL = re.compile(
    r"<\|[^<>|\s]{1,40}\|?>|<[^<>|\s]{1,40}\|>|<｜[^<>\s]{1,40}｜>|<(?:start|end)_of_\w+>|\[/?[A-Z_]+\]|</?s>"
)


def byte_tokenizer(
    template: str, stops: list[str], eos: str, *, pairs: bool = False
) -> PreTrainedTokenizerFast:
    """Bytes, some pairs of them if asked for, and the special tokens that the template writes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [*(("Ġ", letter) for letter in letters if letter.isalnum()), ("Ċ", "Ċ")] if pairs else []
    vocabulary = {token: i for i, token in enumerate([*letters, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pairs)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(sorted({*SPECIAL.findall(template), *stops, eos, "<s>", "<pad>"}))
    tokens = {"eos_token": eos, "bos_token": "<s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens, chat_template=template)


def tokenizer_for(template: str, *, pairs: bool = False) -> tuple[PreTrainedTokenizerFast, list[str]]:
    """(tokenizer with the first special token after an answer for EOS, all special tokens)."""
    tokenizer = byte_tokenizer(template, [], "</s>", pairs=pairs)
    for form in forms(tokenizer, None, {}):
        found = None
        with suppress(Exception):  # of another form
            found = SPECIAL.search(form(chat("qqq", "zzz")["messages"], False).rpartition("zzz")[2])
        if found:
            tokenizer = byte_tokenizer(template, [], found[0], pairs=pairs)
            break
    specials = [token.content for token in tokenizer.added_tokens_decoder.values()]
    return tokenizer, [token for token in specials if token not in ("<pad>", "<s>")]


def forms(tokenizer: Any, tools: Any, kwargs: dict[str, Any]) -> Iterator[Render]:
    """The template with messages as they are, and in the forms that some templates want instead."""

    def changed(message: dict[str, Any], form: int) -> dict[str, Any]:
        if form & 1 and "tool_calls" in message:
            calls = json.loads(json.dumps(message["tool_calls"]))
            for call in calls:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            message = {**message, "tool_calls": calls}
        if form & 2:
            message = {**message, "content": [{"type": "text", "text": message["content"]}]}
        return message

    for form in range(4):

        def render(messages: list[dict[str, Any]], prompt: bool, form: int = form) -> str:
            text = tokenizer.apply_chat_template(
                [changed(message, form) for message in messages],
                tools=tools,
                add_generation_prompt=prompt,
                tokenize=False,
                **kwargs,
            )
            return str(text)

        yield render


def tokenizer(template: str, *tokens: str, eos: str = "</s>") -> Any:
    return ct.byte_tokenizer(
        "chatml", template=template, eos_token=eos, additional_special_tokens=list(tokens)
    )


def turns(header: str, closing: str, last: str | None = None) -> str:
    """A template that opens each turn with the role in ``header``; ``last`` closes the last turn instead."""
    end = repr(closing) if last is None else f"({last!r} if loop.last else {closing!r})"
    return (
        (
            "{% for message in messages %}{{ HEADER + message.content + (END if message.role == 'assistant' "
            "else '') }}{% endfor %}{% if add_generation_prompt %}{{ PROMPT }}{% endif %}"
        )
        .replace("HEADER", header)
        .replace("END", end)
        .replace("PROMPT", header.replace("message.role", "'assistant'"))
    )


ROW = chat("q", "one", "r", "two")
