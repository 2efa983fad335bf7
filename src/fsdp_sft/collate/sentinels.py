"""Marks that stand for texts while a conversation is rendered, so that their places are found."""

import re

# A sentinel is a number between two private-use characters, which mean nothing to templates and strip().
OPEN, CLOSE = "\U000f5b01", "\U000f5b02"
_SENTINEL = re.compile(f"{OPEN}([0-9]+){CLOSE}")
_ESCAPED = repr(OPEN)[1:-1]
# The sentinel of a number, which templates print without quotes, must be a number itself: fourteen digits, of
# which the middle six are the sentinel's number.
NUMERIC_SENTINEL = re.compile("7351([0-9]{6})1537")
_EITHER_SENTINEL = re.compile(f"{_SENTINEL.pattern}|{NUMERIC_SENTINEL.pattern}")


def sentinel(number: int) -> str:
    """The sentinel of the text `number`."""
    return f"{OPEN}{number}{CLOSE}"


def numeric_sentinel(number: int) -> int:
    """The sentinel of the text `number` where that text is a number."""
    return int(f"7351{number:06d}1537")


def split_at_sentinels(text: str, *, numeric: bool) -> tuple[list[str], list[int]]:
    """Split a text at its sentinels.

    Args:
        text: The text.
        numeric: Whether to look for numeric sentinels too.

    Returns:
        (the N + 1 texts around the sentinels, the numbers of the N sentinels).
    """
    if _ESCAPED in text:  # some templates print nested arguments with Python's repr, which escapes sentinels
        text = text.replace(_ESCAPED, OPEN).replace(repr(CLOSE)[1:-1], CLOSE)
    if not numeric:
        pieces = _SENTINEL.split(text)
        return pieces[::2], [int(number) for number in pieces[1::2]]
    pieces = _EITHER_SENTINEL.split(text)
    numbers = [int(a or b) for a, b in zip(pieces[1::3], pieces[2::3], strict=True)]
    return pieces[::3], numbers
