"""Chat templates written for a test, with a tokenizer of bytes that has their tokens."""

from typing import Any

from tests.harness import chat_templates as ct
from tests.harness.chats import chat


def tokenizer(template: str, *tokens: str, eos: str = "</s>") -> Any:
    made = ct.byte_tokenizer("chatml", template=template, eos_token=eos)
    made.add_special_tokens({"additional_special_tokens": list(tokens)})
    return made


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
