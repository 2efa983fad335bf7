"""Nulls that a row means stay; those that an Arrow table fills in do not."""

import json
from typing import Any

import numpy as np
import pytest

from fsdp_sft.collate import encode_chat
from fsdp_sft.collate.rows import read_row
from tests.harness import chat_templates as ct
from tests.harness.chats import TOKENIZERS, shown


def search(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "search", "arguments": arguments}}


def row(*calls: dict[str, Any], tools: Any = None) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": list(calls)},
        {"role": "tool", "content": "none"},
        {"role": "assistant", "content": "a"},
    ]
    return {"messages": messages, **({"tools": tools} if tools else {})}


def tool(**properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "search", "parameters": parameters}}


def arguments_of(given: dict[str, Any]) -> list[Any]:
    messages = read_row(given).messages
    return [call["function"]["arguments"] for m in messages for call in m.get("tool_calls", [])]


def in_a_table(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    """As an Arrow table gives them back: each struct of a column has the keys of all."""
    return _column(list(rows))


def _column(values: list[Any]) -> list[Any]:
    dicts = [value for value in values if isinstance(value, dict)]
    if dicts:
        names = list(dict.fromkeys(name for value in dicts for name in value))
        columns = {name: iter(_column([value.get(name) for value in dicts])) for name in names}
        filled = iter([{name: next(columns[name]) for name in names} for _ in dicts])
        return [next(filled) if isinstance(value, dict) else None for value in values]
    lists = [value for value in values if isinstance(value, list)]
    if lists:
        items = iter(_column([item for value in lists for item in value]))
        return [[next(items) for _ in value] if isinstance(value, list) else None for value in values]
    return values


def test_a_null_of_a_json_row_is_printed_as_apply_chat_template_prints_it() -> None:
    schema = {"limit": {"type": "integer", "default": None}}
    given = row(search(query="x", limit=None), tools=[tool(query={"type": "string"}, **schema)])
    given["messages"][1]["refusal"] = None  # as OpenAI's API answers
    tokenizer = TOKENIZERS["chatml"]
    text = tokenizer.apply_chat_template(given["messages"], tools=given["tools"], tokenize=False)
    assert tokenizer.decode(encode_chat(given, tokenizer).input_ids) == text
    assert '"limit": null' in text
    assert '"default": null' in text


def test_nulls_for_keys_that_a_row_does_not_have() -> None:
    plain = [
        row(search(query="x", limit=3), search(city="Oslo"), tools=[tool(query={"type": "string"})]),
        row(search(deep={"a": 1, "b": [None, 2]}), tools=[tool(limit={"type": "integer", "default": 4})]),
    ]
    for given, filled in zip(plain, in_a_table(*plain), strict=True):
        assert filled["messages"][0]["tool_calls"] is None
        assert read_row(filled).tools == read_row(given).tools
        if "deep" not in json.dumps(given):
            assert arguments_of(filled) == arguments_of(given)
            assert shown(filled) == shown(given)
    assert arguments_of(in_a_table(*plain)[1]) == [{"deep": {"a": 1, "b": [None, 2]}}]


def test_the_row_is_left_as_it_was() -> None:
    given = in_a_table(row(search(query="x", expression=None), tools=[tool(query={"type": "string"})]))[0]
    before = json.dumps(given)
    encode_chat(given, TOKENIZERS["chatml"])
    assert json.dumps(given) == before


def test_rows_of_numpy() -> None:
    given = row(search(query="x", limit=3), tools=[tool(query={"type": "string"})])
    call = search(query=np.str_("x"), limit=np.int64(3))
    messages = [{**message} for message in given["messages"]]
    messages[1]["tool_calls"] = np.array([call], dtype=object)
    messages[3]["weight"] = np.float64(0.0)
    numpy_row = {
        "messages": np.array(messages, dtype=object),
        "tools": np.array(given["tools"], dtype=object),
    }
    given["messages"][3]["weight"] = 0
    assert shown(numpy_row) == shown(given)
    assert read_row(numpy_row).trained == [True, True, True, False]


def test_what_sharegpt_calls_a_model_is_the_assistant() -> None:
    given = {"conversations": [{"from": "human", "value": "a"}, {"from": "model", "value": "b"}]}
    assert "⟦b<|im_end|>⟧" in shown(given)


MINISTRAL = (
    "{% for message in messages %}{{ '[' + message.role + ']' }}{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'thinking' %}"
    "{{ '[THINK]' + part.thinking[0].text + '[/THINK]' }}{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% if message.role == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.mark.parametrize("thought", ["hm", [{"type": "text", "text": "hm"}]])
def test_parts_of_type_thinking(thought: Any) -> None:
    tokenizer = ct.byte_tokenizer("chatml", template=MINISTRAL)
    parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "yes"}]
    given = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts}]}
    assert shown(given, tokenizer) == "[user]q[assistant]⟦[THINK]hm[/THINK]yes<|im_end|>⟧"
    assert shown(given, tokenizer, train_reasoning=False).endswith("[THINK]hm[/THINK]⟦yes<|im_end|>⟧")
