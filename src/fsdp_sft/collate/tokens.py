"""Token ids of texts, and the token at a given character.

Labels need that token only at the two edges of each turn.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class Tokens:
    """The tokens of one text, at the offsets that the tokenizer reports.

    Edges are found by bisection in the tokenizer's own encoding: converting all offsets to Python objects
    would take longer than the tokenisation.

    Attributes:
        ids: Token ids, (S,).
        text: The tokenised text.
        encoding: The `tokenizers.Encoding`.
        tokenizer: The tokenizer.
    """

    ids: list[int]
    text: str
    encoding: Any
    tokenizer: PreTrainedTokenizerBase

    def first_from(self, position: int) -> int:
        """Index of the first token that starts at character `position` or later; S if none does."""
        index = bisect_left(range(len(self.ids)), position, key=self._start)
        # The bisection uses starts without the leading space, with which a token may begin before `position`.
        while index < len(self.ids) and self._start_with_space(index) < position:
            index += 1
        return index

    def first_beyond(self, position: int) -> int:
        """Index of the first token that ends after character `position`; S if none does."""
        index = bisect_right(range(len(self.ids)), position, key=self._end)
        # Offsets may leave out the spaces at the end of a token too, up to where the next one begins.
        if index and self._token(index - 1).endswith("Ġ"):
            end = self._start_with_space(index) if index < len(self.ids) else len(self.text)
            if position < end and self.text[self._end(index - 1) : end].isspace():
                index -= 1
        return index

    def only_takes_in(self, index: int, position: int) -> bool:
        """Whether token `index` holds only white space from `position` on, which it strips.

        Tokens that were added to the vocabulary may do that (``rstrip=True``).
        """
        added = self.tokenizer.added_tokens_decoder.get(self.ids[index])
        at = self.text.find(added.content, self._start(index)) if added is not None else -1
        return added is not None and 0 <= at <= position - len(added.content)

    def _start(self, index: int) -> int:
        return int(self.encoding.token_to_chars(index)[0])

    def _end(self, index: int) -> int:
        return int(self.encoding.token_to_chars(index)[1])

    def _start_with_space(self, index: int) -> int:
        """Start of a token, with the space that its offsets may leave out.

        Byte-level tokenizers with trim_offsets=True do not count the space of "Ġword" among its characters.
        """
        start, before = self._start(index), self._end(index - 1) if index else 0
        if start <= before or not self.text[before:start].isspace():
            return start
        token = self._token(index)
        return max(before, start - (len(token) - len(token.lstrip("Ġ"))))

    def _token(self, index: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(self.ids[index]))


def starts_in_a_token(tokens: Tokens, position: int) -> bool:
    """Whether the character at `position` lies in a token that begins before it.

    A token that strips white space (``rstrip=True``) does not count: it is the same without what follows.
    """
    index = tokens.first_beyond(position)
    return index < tokens.first_from(position) and not tokens.only_takes_in(index, position)


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Tokens]:
    """Tokenise texts in one call, without adding special tokens.

    Args:
        tokenizer: A fast tokenizer.
        texts: The texts.
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
