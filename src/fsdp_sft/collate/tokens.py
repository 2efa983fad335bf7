"""Token ids of texts, and the token at a given character.

Labels need that token only at the two edges of each turn. It is found from the lengths of the tokens if they
spell the text byte for byte, and from the tokenizer's offsets if they do not.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from fsdp_sft._compat import tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokens(Protocol):
    """The tokens of one text."""

    @property
    def ids(self) -> list[int]:
        """Token ids, (S,)."""

    def first_from(self, position: int) -> int:
        """Index of the first token that starts at character `position` or later; S if none does."""

    def first_beyond(self, position: int) -> int:
        """Index of the first token that ends after character `position`; S if none does."""

    def only_takes_in(self, index: int, position: int) -> bool:
        """Whether token `index` holds only white space from `position` on, which it strips.

        Tokens that were added to the vocabulary may do that (``rstrip=True``).
        """


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
    found: list[Tokens | None] = [*_spelled(tokenizer, texts)] if texts else []
    rest = [index for index, tokens in enumerate(found) if tokens is None]
    for index, tokens in zip(rest, _with_offsets(tokenizer, [texts[i] for i in rest]), strict=True):
        found[index] = tokens
    return [tokens for tokens in found if tokens is not None]


# --- tokens that spell the text ---------------------------------------------------------------------------


@dataclass(slots=True)
class _SpelledTokens:
    """Tokens that spell the text byte for byte, so that their lengths give offsets.

    Attributes:
        ids: Token ids, (S,).
        text: The tokenised text.
        spelled: Bytes of each token, (S,).
    """

    ids: list[int]
    text: str
    spelled: list[bytes]
    _edges: list[int] = field(default_factory=list)

    def first_from(self, position: int) -> int:
        """See `Tokens`."""
        return min(bisect_left(self._byte_edges(), self._byte(position)), len(self.ids))

    def first_beyond(self, position: int) -> int:
        """See `Tokens`."""
        return bisect_right(self._byte_edges(), self._byte(position), lo=1) - 1

    def only_takes_in(self, index: int, position: int) -> bool:
        """See `Tokens`."""
        return False  # a token that strips white space does not spell the text

    def _byte_edges(self) -> list[int]:
        """Byte offsets at which tokens start, and at which the last one ends: S + 1 numbers."""
        if not self._edges:
            self._edges = list(accumulate(map(len, self.spelled), initial=0))
        return self._edges

    def _byte(self, position: int) -> int:
        """Offset in bytes of the character at `position`."""
        return position if self.text.isascii() else len(self.text[:position].encode())


def _byte_of_letter() -> dict[str, int]:
    """The byte for each letter of byte-level BPE's alphabet.

    Printable bytes are the letters with the same number; the others are the letters from 256 on, in order.

    Source: ``bytes_to_unicode`` of GPT-2's encoder.py, which tokenizers' ``ByteLevel`` follows.
    """
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {chr(byte): byte for byte in printed}
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_of_letter()
_NO_TEXT = b"\xff"  # occurs in no UTF-8 text, so a token with these bytes never spells the text


class _Spelling(dict[int, bytes]):
    """Bytes of each token of a byte-level tokenizer, computed on first access."""

    def __init__(self, backend: Any) -> None:
        self._token_of: Callable[[int], str] = backend.id_to_token
        self._added: dict[int, str] = {
            index: token.content for index, token in backend.get_added_tokens_decoder().items()
        }

    def __missing__(self, index: int) -> bytes:
        self[index] = spelled = self._spell(index)
        return spelled

    def _spell(self, index: int) -> bytes:
        """Bytes of a token; ``_NO_TEXT`` if it has letters outside the byte alphabet."""
        if index in self._added:
            return self._added[index].encode()
        try:
            return bytes(map(_BYTE_OF_LETTER.__getitem__, self._token_of(index)))
        except KeyError:
            return _NO_TEXT


_SPELLINGS: weakref.WeakKeyDictionary[Any, tuple[int, _Spelling]] = weakref.WeakKeyDictionary()


def _spelled(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[_SpelledTokens | None]:
    """The tokens of each text, or None where they do not spell the text byte for byte.

    They do not if the tokenizer changes the text (Unicode normalisation, a space added in front) or a token
    strips the white space beside it. Tokenisation without offsets takes a fifth less time.
    """
    backend = tokenizers.backend_that_encodes(tokenizer)
    if backend is None or type(backend.decoder).__name__ != "ByteLevel":
        return [None] * len(texts)
    size, spelling = _SPELLINGS.get(tokenizer, (None, None))
    if spelling is None or size != len(tokenizer):
        spelling = _Spelling(backend)
        _SPELLINGS[tokenizer] = len(tokenizer), spelling
    found: list[_SpelledTokens | None] = []
    for text, encoding in zip(texts, backend.encode_batch_fast(texts, add_special_tokens=False), strict=True):
        ids = encoding.ids
        pieces = list(map(spelling.__getitem__, ids))
        found.append(_SpelledTokens(ids, text, pieces) if b"".join(pieces) == text.encode() else None)
    return found


# --- tokens with the tokenizer's offsets ------------------------------------------------------------------


@dataclass(slots=True)
class _OffsetTokens:
    """Tokens at the offsets that the tokenizer reports.

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
        """See `Tokens`."""
        index = bisect_left(range(len(self.ids)), position, key=self._start)
        # The bisection uses starts without the leading space, with which a token may begin before `position`.
        while index < len(self.ids) and self._start_with_space(index) < position:
            index += 1
        return index

    def first_beyond(self, position: int) -> int:
        """See `Tokens`."""
        return bisect_right(range(len(self.ids)), position, key=self._end)

    def only_takes_in(self, index: int, position: int) -> bool:
        """See `Tokens`."""
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
        token = str(self.tokenizer.convert_ids_to_tokens(self.ids[index]))
        return max(before, start - (len(token) - len(token.lstrip("Ġ"))))


def _with_offsets(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[_OffsetTokens]:
    """Tokens of each text with the tokenizer's offsets."""
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
    return [_OffsetTokens(ids, text, encoding, tokenizer) for ids, text, encoding in found]
