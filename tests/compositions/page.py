"""The end of docs/reference/errors.md, made of the list of reasons: ``python -m tests.compositions.page``."""

from pathlib import Path

from tests.compositions.reasons import REASONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "errors.md"

_HEAD = """## What is refused

<!-- Made by `python -m tests.compositions.page` from tests/compositions/reasons.py; change it there. -->

Features are tried together at random, each draw beside plain training in one process: it has to come out
equal, or be refused by one of these errors, before anything has been trained. Each is an `FsdpSftError`, and
its message says what was expected, what was got and what to do.

| What is refused | Error | Do this instead |
| --- | --- | --- |
"""


def text() -> str:
    """The page as it has to be."""
    rows = [f"| {_capital(r.name)} | `{r.error}` | {_capital(r.instead)} |" for r in REASONS]
    return PAGE.read_text().partition("## What is refused\n")[0] + _HEAD + "\n".join(rows) + "\n"


def _capital(sentence: str) -> str:
    return sentence if sentence.startswith("`") else sentence[0].upper() + sentence[1:]


if __name__ == "__main__":
    PAGE.write_text(text())
