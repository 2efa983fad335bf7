"""Rows that are nearly right: read as they are meant, or refused; nothing of them is lost without a word."""

import collections
import json
import types
from typing import Any

import pytest

from fsdp_sft.collate import EncodedChat, SFTCollator, encode_chat, filter_rows
from tests.harness import chat_templates as ct
from tests.harness.chats import TOKENIZERS, chat, shown

USER = {"role": "user", "content": "q"}


def assistant(content: Any = "", **keys: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "content": content, **keys}]}


def sharegpt(who: str, value: str, **keys: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": "q"}, {"from": who, "value": value, **keys}]}


def with_arguments(**arguments: Any) -> dict[str, Any]:
    return assistant(tool_calls=[{"function": {"name": "f", "arguments": arguments}}])


@pytest.mark.parametrize(
    ("row", "same"),
    [
        (assistant(tool_calls=[{"name": "f", "parameters": {"x": "y"}}]), with_arguments(x="y")),
        (assistant(function_call={"name": "f", "arguments": '{"x": "y"}'}), with_arguments(x="y")),
        (sharegpt("function_call", '{"name": "f", "parameters": {"x": "y"}}'), with_arguments(x="y")),
        (sharegpt("gpt", "", tool_calls=[{"name": "f", "arguments": {"x": "y"}}]), with_arguments(x="y")),
        (sharegpt("gpt", "a", reasoning_content="hm"), assistant("a", reasoning_content="hm")),
        (
            assistant([{"type": "reasoning", "reasoning": "", "text": "hm"}, {"type": "text", "text": "C"}]),
            assistant("C", reasoning_content="hm"),
        ),
    ],
)
def test_the_same_in_other_words(row: dict[str, Any], same: dict[str, Any]) -> None:
    tokenizer = ct.byte_tokenizer("chatml", template=ct.CHATML_REASONING if "hm" in str(row) else ct.CHATML)
    assert shown(row, tokenizer) == shown(same, tokenizer)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            assistant([{"type": "reasoning", "text": "B"}, {"type": "text", "text": "C"}], thinking="A"),
            "twice",
        ),
        (
            assistant([{"type": "text", "text": "a"}, {"type": "reasoning", "text": "b"}]),
            "reasoning after text",
        ),
        (assistant(tool_calls=[{"name": "f", "args": {"x": "y"}}]), "belong under 'arguments'"),
        (assistant(tool_calls=True), "not iterable"),
        (assistant("a", weight=10**400), "must be 0 or 1"),
        ({"instruction": "a", "output": "b", "history": 5}, "not iterable"),
        ({"conversations": [{"from": ["human"], "value": "q"}]}, "known roles"),
        ({"input_ids": [1, 2], "labels": [1, 2], "loss_weights": [1, 1e39]}, "are not read"),
    ],
)
def test_rows_that_are_refused(row: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        encode_chat(row, TOKENIZERS["chatml"])
    kept, counts = filter_rows([chat("a", "b"), row], TOKENIZERS["chatml"], on_error="count")
    assert (len(kept), counts["malformed"]) == (1, 1)


@pytest.mark.parametrize("number", [73519999991537, 73510000001537, -1, 1e300, 10**30])
def test_any_number(number: float) -> None:
    assert json.dumps({"id": number}) in shown(with_arguments(id=number))
    tools = [{"name": "f", "parameters": {"maximum": number}}]
    assert "⟦a<|im_end|>⟧" in shown({**chat("q", "a"), "tools": tools})


def test_a_quoted_tag_is_text() -> None:
    content = "<think>\nplan\n</think>\n\nWrite <think> to open, then 42."
    assert shown(chat("q", content), train_reasoning=False).endswith(
        "⟦Write <think> to open, then 42.<|im_end|>⟧\n"
    )


def test_what_breaks_a_template_is_its_refusal() -> None:
    tokenizer = ct.byte_tokenizer("chatml", template="{{ 1 // (messages | length - 2) }}" + ct.CHATML)
    _, counts = filter_rows([chat("q", "a", "r", "b"), chat("q", "a")], tokenizer, on_error="count")
    assert counts == {"kept": 1, "refused_by_template": 1}


def test_an_encoded_row_of_two_lengths() -> None:
    with pytest.raises(ValueError, match="one length"):
        SFTCollator(TOKENIZERS["chatml"], max_length=10)([EncodedChat([1, 2, 3], [1, 2])])


def test_any_mapping_and_any_sequence_will_do():
    plain = chat("q", "a", "r", "b")
    messages = collections.deque(collections.UserDict(message) for message in plain["messages"])
    row = collections.UserDict(messages=messages)
    assert encode_chat(row, TOKENIZERS["chatml"]) == encode_chat(plain, TOKENIZERS["chatml"])
    tuples = {"messages": tuple(types.MappingProxyType(message) for message in plain["messages"])}
    assert encode_chat(tuples, TOKENIZERS["chatml"]) == encode_chat(plain, TOKENIZERS["chatml"])
