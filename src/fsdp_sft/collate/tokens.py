"""Texts to token ids, and the way from a character to its token."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class Tokens:
    """The tokens of one text.

    A turn has two edges and a row thousands of tokens, so edges are searched for in the tokenizer's own
    encoding; handing all offsets over to Python would take longer than the tokenisation.

    Attributes:
        ids: Token ids, (S,).
        text: What they stand for.
        encoding: The `tokenizers.Encoding`.
        tokenizer: Whose tokens they are.
    """

    ids: list[int]
    text: str
    encoding: Any
    tokenizer: PreTrainedTokenizerBase

    def first_from(self, position: int) -> int:
        """Index of the first token that starts at a character of the text or after it; S if none does."""
        index = bisect_left(range(len(self.ids)), position, key=self._start)
        # Restored spaces move starts to the left, so a token found by its bare start may begin before.
        while index < len(self.ids) and self._start_with_space(index) < position:
            index += 1
        return index

    def first_beyond(self, position: int) -> int:
        """Index of the first token that ends after a character of the text; S if none does."""
        return bisect_right(range(len(self.ids)), position, key=self._end)

    def _start(self, index: int) -> int:
        return int(self.encoding.token_to_chars(index)[0])

    def _end(self, index: int) -> int:
        return int(self.encoding.token_to_chars(index)[1])

    def _start_with_space(self, index: int) -> int:
        """Byte-level tokenizers with trim_offsets leave the space of "Ġword" out of its offsets."""
        start, before = self._start(index), self._end(index - 1) if index else 0
        if start <= before or not self.text[before:start].isspace():
            return start
        token = str(self.tokenizer.convert_ids_to_tokens(self.ids[index]))
        return max(before, start - (len(token) - len(token.lstrip("Ġ"))))


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Tokens]:
    """Tokenise texts in one call, without adding special tokens.

    Args:
        tokenizer: A fast tokenizer.
        texts: What to tokenise.
    """
    if not texts:
        return []
    batch = tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    found = zip(batch["input_ids"], texts, batch.encodings or [], strict=True)
    return [Tokens(ids, text, encoding, tokenizer) for ids, text, encoding in found]
