"""Chats that only a long memory can answer: a fact, pages of other text, and a question about the fact.

The pages are documentation that Python carries with it, so nothing is downloaded. The fact is one of four,
drawn for each row: who does not see the start of the row can only guess.
"""

import random
from pydoc_data.topics import topics
from typing import Any

from transformers import PreTrainedTokenizerBase

WORDS = ["north", "east", "south", "west"]
STATED = "The treasure lies {}.\n\n"
ASKED = "\n\nWhere does the treasure lie?"
ANSWER = "It lies {}."
_SHORTEST = 64  # tokens; many short rows teach the task, some long ones how far it reaches
_ROOM = 8  # tokens that text may come to have more in its place than by itself


def sentences() -> list[str]:
    """All that a row says but for its pages."""
    return [text.format(word) for word in WORDS for text in (STATED + ASKED, ANSWER)]


def train_rows(tokenizer: PreTrainedTokenizerBase, max_length: int, number: int) -> list[dict[str, Any]]:
    """Rows of all lengths from a few tokens up to ``max_length``, more of them short."""
    generator = random.Random(0)
    shortest = min(_SHORTEST, max_length)
    lengths = [int(shortest * (max_length / shortest) ** generator.random()) for _ in range(number)]
    return _rows(tokenizer, lengths, _pages()[0], generator)


def held_out_rows(tokenizer: PreTrainedTokenizerBase, max_length: int, number: int) -> list[dict[str, Any]]:
    """Rows as long as ``max_length`` allows, with pages that no row in training has."""
    return _rows(tokenizer, [max_length] * number, _pages()[1], random.Random(1))


def _pages() -> tuple[str, str]:
    """Text to train with, and text to hold out."""
    texts = [topics[name] for name in sorted(topics)]
    return "\n\n".join(texts[1::2]), "\n\n".join(texts[::2])


def _row(word: str, pages: str) -> dict[str, Any]:
    asked = STATED.format(word) + pages + ASKED
    return {
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": ANSWER.format(word)},
        ]
    }


def _rows(
    tokenizer: PreTrainedTokenizerBase, lengths: list[int], text: str, generator: random.Random
) -> list[dict[str, Any]]:
    chats = [_row(word, "")["messages"] for word in WORDS]
    without = max(len(tokenizer.apply_chat_template(chat, return_dict=False)) for chat in chats) + _ROOM
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)[
        "offset_mapping"
    ]
    rows = []
    for length in lengths:
        tokens = min(max(length - without, 1), len(spans) - 1)
        start = generator.randrange(len(spans) - tokens)
        rows.append(_row(generator.choice(WORDS), text[spans[start][0] : spans[start + tokens][0]]))
    return rows
