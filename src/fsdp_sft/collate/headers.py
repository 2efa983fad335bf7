"""What stands in front of an answer: where two such texts part, and whether they are one header."""

import re
from collections.abc import Iterable

# Reasoning that a generation prompt opens, and may close again: <think>, [THINK], <|START_THINKING|>,
# <|channel|>analysis<|message|>, "<|channel>thought" ...
OPENED_REASONING = re.compile(
    r"\s*[<\[][^<>\[\]]*(?:think|thought|reason|channel)[^<>\[\]]*[>\]].*", re.DOTALL | re.IGNORECASE
)

# The tag that closes it in an answer: </think>, [/THINK], <|END_THINKING|>, <|end|> ...
CLOSED_REASONING = re.compile(r"\s*(?:<[^<>]*>|\[[^\[\]]*\]|\{[^{}]*\})\s*")


def through_the_tag(text: str, length: int, tokens: Iterable[str]) -> int:
    """`length`, or the end of the token or tag of `text` that a cut there would split."""
    for token in tokens:
        at = text.find(token, max(0, length - len(token) + 1))
        if 0 <= at < length:
            return at + len(token)
    opened = re.search(r"[<\[][^\s<>\[\]]*$", text[:length])
    closed = re.match(r"[^\s<>\[\]]*[>\]]+", text[length:])
    return length + closed.end() if opened and closed else length


def is_a_header(text: str) -> bool:
    """Whether the text in front of an answer is more than white space or an opening of reasoning."""
    return bool(text.strip()) and OPENED_REASONING.fullmatch(text) is None


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
