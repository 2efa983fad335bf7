"""Sentinels, which stand for texts while a conversation is rendered, and the template's text between them."""

import re
from collections.abc import Iterable

# A sentinel is a number between two private-use characters, which mean nothing to templates and strip().
OPEN, CLOSE = "\U000f5b01", "\U000f5b02"
_SENTINEL = re.compile(f"{OPEN}([0-9]+){CLOSE}")
_ESCAPED = repr(OPEN)[1:-1]

# Reasoning that a generation prompt opens, and may close again: <think>, [THINK], <|START_THINKING|>,
# <|channel|>analysis<|message|>, "<|channel>thought" ...
OPENED_REASONING = re.compile(
    r"\s*[<\[][^<>\[\]]*(?:think|thought|reason|channel)[^<>\[\]]*[>\]].*", re.DOTALL | re.IGNORECASE
)

# The tag that closes it in an answer: </think>, [/THINK], <|END_THINKING|>, <|end|> ...
CLOSED_REASONING = re.compile(r"\s*(?:<[^<>]*>|\[[^\[\]]*\]|\{[^{}]*\})\s*")


def sentinel(number: int) -> str:
    """The sentinel of the text `number`."""
    return f"{OPEN}{number}{CLOSE}"


def split_at_sentinels(text: str) -> tuple[list[str], list[int]]:
    """(the N + 1 texts around the sentinels of a text, the numbers of the N sentinels)."""
    if _ESCAPED in text:  # some templates print nested arguments with Python's repr, which escapes sentinels
        text = text.replace(_ESCAPED, OPEN).replace(repr(CLOSE)[1:-1], CLOSE)
    pieces = _SENTINEL.split(text)
    return pieces[::2], [int(number) for number in pieces[1::2]]


def through_the_tag(text: str, length: int, tokens: Iterable[str]) -> int:
    """`length`, or the end of the token or tag of `text` that a cut there would split."""
    for token in tokens:
        at = text.find(token, max(0, length - len(token) + 1))
        if 0 <= at < length:
            return at + len(token)
    opened = re.search(r"[<\[][^\s<>\[\]]*$", text[:length])
    closed = re.match(r"[^\s<>\[\]]*[>\]]+", text[length:])
    return length + closed.end() if opened and closed else length


def shared_header(prompt: str, before: str) -> str:
    """Common prefix of the two, without the beginning of a tag or word at its end.

    So ``<|start_a|>`` and ``<|start_b|>`` have nothing in common.
    """
    length = common_length(prompt, before)
    for opening, closing in (("<", ">"), ("[", "]"), ("{", "}")):
        at = prompt.rfind(opening, 0, length)
        if at > prompt.rfind(closing, 0, length) and re.match(r"[<\[{]\S*[>\]}]", prompt[at:]):
            length = at
    if length < max(len(prompt), len(before)):
        word = re.search(r"\w+$", prompt[:length])
        if word and re.match(r"\w", prompt[length:] or before[length:]):
            length = word.start()
    return prompt[:length]


def overlap(prompt: str, text: str) -> int:
    """Length of the longest end of `prompt` with which `text` begins."""
    return next(n for n in range(min(len(prompt), len(text)), -1, -1) if prompt.endswith(text[:n]))


def common_length(first: str, second: str) -> int:
    """Length of the longest common prefix."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
