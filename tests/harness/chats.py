"""Rows of chats by hand, and what is trained of them made visible."""

import itertools

from fsdp_sft import IGNORE_INDEX, EncodedChat, encode_chat, render_labels
from tests.harness import chat_templates as ct

TOKENIZERS = {name: ct.byte_tokenizer(name) for name in ct.FAMILIES}


def chat(*turns: str | tuple[str, str]) -> dict:
    """A row; bare strings alternate between user and assistant."""
    roles = itertools.cycle(["user", "assistant"])
    pairs = [(next(roles), turn) if isinstance(turn, str) else turn for turn in turns]
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def shown(row: dict, tokenizer=TOKENIZERS["chatml"], **options) -> str:
    encoded = encode_chat(row, tokenizer, **options)
    return render_labels(tokenizer, encoded.input_ids, encoded.labels, color=False)


def marks(encoded: EncodedChat) -> list[bool]:
    assert all(
        label in (IGNORE_INDEX, token) for token, label in zip(encoded.input_ids, encoded.labels, strict=True)
    )
    return [label != IGNORE_INDEX for label in encoded.labels]


def assert_matches_hand_written(name: str, messages: list[dict]) -> None:
    encoded = encode_chat({"messages": messages}, TOKENIZERS[name])
    text, expected = ct.expected_marks(ct.FAMILIES[name].write(messages))
    assert TOKENIZERS[name].decode(encoded.input_ids) == text
    assert marks(encoded) == expected
    assert encoded.num_targets == sum(expected[1:])
