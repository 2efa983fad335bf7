"""Tokens and where they stand, beside the offsets of a tokenizer that trims none."""

import random
import unicodedata
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from fsdp_sft.collate.encode import tokenise

TEXTS = [
    "The answer is 42.  And   so on\n\n\n  indented\ttab \n",
    "Größe: 3 µm, naïve café — “quoted” …",
    "東京へ行きました。🙂👩‍👩‍👧 и ещё немного",
    " leading and trailing ",
    "<|start|>user\nWhat?<|end|>\n<|start|>assistant\n  It is 🙂.<|end|>",
    "\u2028line\u00a0no-break\x00nul",
    "",
]


def _trained(normalizer: Any = None, *, trim_offsets: bool = False, **pre: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **pre})
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def _texts(number: int) -> list[str]:
    draw = random.Random(0)
    letters = [*"ab 1.\n\tüß東🙂\u0301", "  ", "<|start|>", "<|end|>", "\r\n", "e\u0301"]
    return TEXTS + ["".join(draw.choices(letters, k=draw.randrange(40))) for _ in range(number)]


def _places(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and characters of each token, by the tokenizer."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return found["input_ids"], found["offset_mapping"]


def test_each_edge_is_where_a_tokenizer_that_trims_nothing_has_it() -> None:
    tokenizer = _trained(trim_offsets=False)
    texts = _texts(300)
    for text, tokens in zip(texts, tokenise(tokenizer, texts), strict=True):
        ids, places = _places(tokenizer, text)
        assert tokens.ids == ids
        for position in range(len(text) + 1):
            first = next((i for i, (start, _) in enumerate(places) if start >= position), len(ids))
            beyond = next((i for i, (_, end) in enumerate(places) if end > position), len(ids))
            assert tokens.first_from(position) == first, (text, position)
            assert tokens.first_beyond(position) == beyond, (text, position)


def test_with_trimmed_offsets_a_word_begins_with_its_space_all_the_same() -> None:
    tokenizer, plain = _trained(trim_offsets=True), _trained(trim_offsets=False)
    texts = [text for text in _texts(100) if text]
    pairs = zip(tokenise(tokenizer, texts), tokenise(plain, texts), texts, strict=True)
    for tokens, expected, text in pairs:
        for position in range(len(text) + 1):
            assert tokens.first_from(position) == expected.first_from(position), (text, position)
            assert tokens.first_beyond(position) == expected.first_beyond(position), (text, position)


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (_trained(normalizers.NFC()), unicodedata.normalize("NFD", "Größe naïve")),
        (_trained(normalizers.Lowercase()), "An Answer"),
        (_trained(add_prefix_space=True), "word for word"),
    ],
    ids=["another normal form", "lower case", "a space in front"],
)
def test_where_tokens_are_not_the_text_the_tokenizers_offsets_count(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    (tokens,) = tokenise(tokenizer, [text])
    ids, places = _places(tokenizer, text)
    assert tokens.ids == ids
    assert tokens.first_beyond(3) == next(i for i, (_, end) in enumerate(places) if end > 3)


def test_texts_of_both_kinds_stay_in_their_order() -> None:
    tokenizer = _trained(normalizers.Lowercase())
    texts = ["lower", "Upper", "", "again lower", "AND UPPER"]
    found = tokenise(tokenizer, texts)
    assert [tokens.ids for tokens in found] == [_places(tokenizer, text)[0] for text in texts]


def test_a_token_that_takes_in_the_space_beside_it() -> None:
    tokenizer = _trained()
    tokenizer.add_tokens([AddedToken("<pad>", lstrip=True, rstrip=True)])
    text = "a  <pad>  b"
    (tokens,) = tokenise(tokenizer, [text])
    assert tokens.ids == _places(tokenizer, text)[0]


def test_a_token_added_later() -> None:
    tokenizer = _trained()
    (before,) = tokenise(tokenizer, ["x <new> y"])
    tokenizer.add_tokens(["<new>"])
    (after,) = tokenise(tokenizer, ["x <new> y"])
    assert after.ids == _places(tokenizer, "x <new> y")[0] != before.ids
    assert after.ids[after.first_from(2)] == tokenizer.convert_tokens_to_ids("<new>")


class _OwnWay(PreTrainedTokenizerFast):
    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._encode_plus([f"{t}!" for t in text], *args, **kwargs)


def test_a_class_that_encodes_in_a_way_of_its_own_is_asked() -> None:
    tokenizer = _OwnWay(tokenizer_object=_trained().backend_tokenizer)
    (tokens,) = tokenise(tokenizer, ["word"])
    assert tokens.ids == _trained()("word!")["input_ids"]


def test_nothing_to_tokenise() -> None:
    assert tokenise(_trained(), []) == []
