"""Tokens and where they stand, beside the offsets of a tokenizer that trims none."""

import random
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
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
            assert tokens.first_from(position) == first, (text, position)


def test_with_trimmed_offsets_a_word_begins_with_its_space_all_the_same() -> None:
    tokenizer, plain = _trained(trim_offsets=True), _trained(trim_offsets=False)
    texts = [text for text in _texts(100) if text]
    pairs = zip(tokenise(tokenizer, texts), tokenise(plain, texts), texts, strict=True)
    for tokens, expected, text in pairs:
        for position in range(len(text) + 1):
            first = expected.first_from(position)
            assert tokens.first_from(position) == first, (text, position)
            assert tokens.is_cut(position, first) == expected.is_cut(position, first), (text, position)
