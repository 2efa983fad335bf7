"""Texts to token ids, and the way from a character to its token."""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from fsdp_sft import _compat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokens(Protocol):
    """The tokens of one text."""

    @property
    def ids(self) -> list[int]:
        """Token ids, (S,)."""

    def first_from(self, position: int) -> int:
        """Index of the first token that starts at a character of the text or after it; S if none does."""

    def first_beyond(self, position: int) -> int:
        """Index of the first token that ends after a character of the text; S if none does."""


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Tokens]:
    """Tokenise texts in one call, without adding special tokens.

    Args:
        tokenizer: A fast tokenizer.
        texts: What to tokenise.
    """
    found: list[Tokens | None] = [*_spelled(tokenizer, texts)] if texts else []
    rest = [index for index, tokens in enumerate(found) if tokens is None]
    for index, tokens in zip(rest, _with_offsets(tokenizer, [texts[i] for i in rest]), strict=True):
        found[index] = tokens
    return [tokens for tokens in found if tokens is not None]


# --- tokens that spell the text ---------------------------------------------------------------------------


@dataclass(slots=True)
class _SpelledTokens:
    """Tokens whose bytes, one after the other, are the text's: their lengths say where each one stands."""

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

    def _byte_edges(self) -> list[int]:
        """Where each token starts, in bytes, and where the last one ends."""
        if not self._edges:
            self._edges = list(accumulate(map(len, self.spelled), initial=0))
        return self._edges

    def _byte(self, position: int) -> int:
        return position if self.text.isascii() else len(self.text[:position].encode())


def _byte_of_letter() -> dict[str, int]:
    """The alphabet of byte-level BPE: bytes that print stand for themselves, others for letters from 256 on.

    Source: ``bytes_to_unicode`` of GPT-2's encoder.py, which tokenizers' ``ByteLevel`` follows.
    """
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {chr(byte): byte for byte in printed}
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_of_letter()
_NO_TEXT = b"\xff"  # is in no text


class _Spelling(dict[int, bytes]):
    """The bytes that each token of a byte-level tokenizer stands for, found as they are asked for."""

    def __init__(self, backend: Any) -> None:
        self._token_of: Callable[[int], str] = backend.id_to_token
        self._added: dict[int, str] = {
            index: token.content for index, token in backend.get_added_tokens_decoder().items()
        }
        self.num_tried = self.num_held = 0

    def __missing__(self, index: int) -> bytes:
        self[index] = spelled = self._spell(index)
        return spelled

    def _spell(self, index: int) -> bytes:
        if index in self._added:
            return self._added[index].encode()
        try:
            return bytes(map(_BYTE_OF_LETTER.__getitem__, self._token_of(index)))
        except KeyError:
            return _NO_TEXT


_SPELLINGS: weakref.WeakKeyDictionary[Any, tuple[int, _Spelling]] = weakref.WeakKeyDictionary()


def _spelled(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[_SpelledTokens | None]:
    """The tokens of each text that its tokens spell byte for byte; None for others.

    Without offsets, which nothing needs where tokens spell the text, tokenisation takes a fifth less. They
    do not if the tokenizer changes the text (another normal form, a space in front) or a token takes in the
    white space beside it.
    """
    backend = _compat.backend_that_encodes(tokenizer)
    if backend is None or type(backend.decoder).__name__ != "ByteLevel":
        return [None] * len(texts)
    size, spelling = _SPELLINGS.get(tokenizer, (None, None))
    if spelling is None or size != len(tokenizer):
        spelling = _Spelling(backend)
        _SPELLINGS[tokenizer] = len(tokenizer), spelling
    # A tokenizer that changes every text would do all the work twice.
    if spelling.num_tried > 2 * spelling.num_held + 64:
        return [None] * len(texts)
    found: list[_SpelledTokens | None] = []
    for text, encoding in zip(texts, backend.encode_batch_fast(texts, add_special_tokens=False), strict=True):
        ids = encoding.ids
        pieces = list(map(spelling.__getitem__, ids))
        found.append(_SpelledTokens(ids, text, pieces) if b"".join(pieces) == text.encode() else None)
    spelling.num_tried += len(texts)
    spelling.num_held += len(texts) - found.count(None)
    return found


# --- tokens with the tokenizer's offsets ------------------------------------------------------------------


@dataclass(slots=True)
class _OffsetTokens:
    """Tokens that stand where the tokenizer says.

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
        """See `Tokens`."""
        index = bisect_left(range(len(self.ids)), position, key=self._start)
        # Restored spaces move starts to the left, so a token found by its bare start may begin before.
        while index < len(self.ids) and self._start_with_space(index) < position:
            index += 1
        return index

    def first_beyond(self, position: int) -> int:
        """See `Tokens`."""
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


def _with_offsets(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[_OffsetTokens]:
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
