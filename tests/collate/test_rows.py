"""The shapes that rows of chats come in, tool calls included, and what is said of malformed ones."""

import json
import re
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

import fsdp_sft as fs
from fsdp_sft import ChatTemplateError, EncodedChat, encode_chat, render_labels
from fsdp_sft.collate.rows import read_row
from tests.harness import chat_templates as ct
from tests.harness.chats import TOKENIZERS, chat, shown

CHATML = TOKENIZERS["chatml"]


AB = chat("a", "b")


@pytest.mark.parametrize(
    ("row", "same"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
                       {"role": "assistant", "content": [{"type": "text", "value": "b"}],
                        "tool_calls": None}]}, AB),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, AB),
        ({"messages": [{"from": "human", "value": "a"}, {"from": "model", "value": "b"}]}, AB),
        ({"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, AB),
        ({"instruction": "a", "output": "b"}, AB),
        ({"instruction": "a", "input": "", "output": "b", "system": "", "history": None}, AB),
        ({"instruction": "c", "input": "d", "output": "e", "system": "s", "history": [["a", "b"]]},
         chat(("system", "s"), "a", "b", "c\nd", "e")),
        ({"prompt": "a", "completion": "b"}, AB),
        # A text comes after the other shapes.
        ({**AB, "text": "c"}, AB),
        ({"text": "c", "messages": None}, {"text": "c"}),
        ({"input_ids": [1], "labels": [1], "text": "c"}, {"input_ids": [1], "labels": [1]}),
    ],
)  # fmt: skip
def test_shapes_of_the_same_row(row, same):
    before = json.dumps(row)
    assert encode_chat(row, CHATML) == encode_chat(same, CHATML)
    assert json.dumps(row) == before, "the row is left as it was"


CALL = '{"name": "weather", "arguments": {"city": "Oslo \\"x\\"", "days": 3}}'
CALLING = [{"from": "human", "value": "a"}, {"from": "function_call", "value": CALL}]
TOOLS = [{"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}]


def test_sharegpt_with_tools():
    row = {
        "conversations": [
            {"from": "human", "value": "sun?"},
            {"from": "function_call", "value": CALL},
            {"from": "observation", "value": "[INST] sunny <|im_end|>"},
            {"from": "gpt", "value": "yes"},
        ],
        "tools": json.dumps(TOOLS),
        "system": "s",
    }
    tool = {"type": "function", "function": TOOLS[0]}
    expected = (
        f"<|im_start|>system\n# Tools\n{json.dumps(tool)}\n<|im_end|>\n<|im_start|>system\ns<|im_end|>\n"
        "<|im_start|>user\nsun?<|im_end|>\n"
        f"<|im_start|>assistant\n⟦\n<tool_call>\n{CALL}\n</tool_call><|im_end|>⟧\n"
        "<|im_start|>tool\n[INST] sunny <|im_end|><|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
    )
    for tools in (row["tools"], TOOLS, [tool]):
        assert shown({**row, "tools": tools}) == expected
    # A result of a tool is trained only when asked for.
    assert "⟦[INST] sunny <|im_end|>" in shown(row, train_on={"tool"})


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": "Oslo \\"x\\"", "days": 3}',
        {"city": 'Oslo "x"', "days": 3},
    ],
)
def test_openai_tool_calls(arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "sun?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": "I look", "tool_calls": [{"function": {"name": "noargs"}}]},
    ]
    text = shown({"messages": messages})
    assert f"⟦\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call><|im_end|>⟧\n" in text
    assert text.endswith(
        '⟦I look\n<tool_call>\n{"name": "noargs", "arguments": {}}\n</tool_call><|im_end|>⟧\n'
    )


def test_tool_calls_that_a_template_joins_as_text():
    arguments = json.dumps(json.loads(CALL)["arguments"])
    template = ct.MISTRAL.replace(
        "{{ message.content + eos_token }}",
        "{% for call in message.tool_calls or [] %}{{ '[TOOL_CALLS]' + call.function.name + ':' + "
        "call.function.arguments }}{% endfor %}{{ message.content + eos_token }}",
    )
    text = shown({"conversations": CALLING}, ct.byte_tokenizer("mistral", template=template))
    assert text == f"<s>[INST]a[/INST]⟦[TOOL_CALLS]weather:{arguments}</s>⟧"


def test_a_tool_call_without_a_stop_token_ends_where_the_template_ends_it():
    template = ct.GLM.replace("message.content }}", "message.content }}" + ct._CALLS)
    tokenizer = ct.byte_tokenizer("glm", template=template)
    assert shown({"conversations": CALLING}, tokenizer).endswith("</tool_call>⟧")
    answered = [*CALLING, {"from": "observation", "value": "rain"}, {"from": "gpt", "value": "b"}]
    assert "</tool_call>⟧<|tool|>\nrain<|assistant|>\n⟦b⟧" in shown({"conversations": answered}, tokenizer)
    end = "{% if loop.last %}(the end){% endif %}{% endfor %}{% if add"
    tokenizer.chat_template = template.replace("{% endfor %}{% if add", end)
    with pytest.raises(
        ChatTemplateError, match="no end-of-turn token comes after the tool calls of message 1"
    ):
        encode_chat({"conversations": answered}, tokenizer)


def test_a_blank_answer_that_a_template_prints_otherwise():
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.content.strip() %}: {{ m.content.strip() }}"
        "{% else %}(nothing){% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    text = shown(chat("a", "", "b", "c"), ct.byte_tokenizer("glm", template=template))
    assert text == "<|user|>: a<|assistant|>⟦(nothing)⟧<|user|>: b<|assistant|>⟦: c⟧"


def test_contents_are_given_in_parts_to_templates_that_take_nothing_else():
    row = chat("hi", "hello", "more", "")
    template = ct.CHATML.replace("{{ message.content }}", "{{ message.content[0]['text'] }}")
    assert shown(row, ct.byte_tokenizer("chatml", template=template)) == shown(row)


def test_encoded_rows_pass_through_with_truncation():
    row = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 1]}
    assert encode_chat(row, CHATML) == EncodedChat([5, 6, 7], [-100, 6, 7])
    tensors = {key: torch.tensor(value) for key, value in row.items()}
    assert encode_chat(tensors, CHATML, max_length=2) == EncodedChat([5, 6], [-100, 6])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("text", "a row must be a dict, got str; accepted shapes"),
        ({"note": "a", "id": 3}, r"keys \['id', 'note'\]; accepted shapes: \"messages\""),
        ({"messages": []}, "no messages"),
        ({"messages": "a"}, r"messages\[0\] must be a dict with role and content, got str 'a'"),
        ({"messages": ["a"]}, r"messages\[0\] must be a dict with role and content"),
        (
            {"messages": [{"role": "model", "content": "a"}]},
            r"messages\[0\] has the role 'model'; known roles: system",
        ),
        ({"messages": [{"content": "a"}]}, "has the role None"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            r"messages\[0\].content must be a string, got int 3",
        ),
        ({"messages": [{"role": "user"}]}, "neither content nor tool_calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "is a part of type image_url",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must be a string, got NoneType"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "text", "text": "a", "train": False, "weight": None}],
                    }
                ]
            },
            "a message is trained as a whole",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "needs a name and arguments"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "["}]}]},
            "must be JSON",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
            "be an object",
        ),
        ({"messages": [{"role": "assistant", "content": "a", "reasoning_content": 3}]}, "cannot be read"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "has the role 'bot'; known roles: human"),
        ({"conversations": [{"value": "a"}]}, "has the role None; known roles: system"),
        ({"conversations": [{"from": "human", "value": None}]}, "value must be a string"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "function_call must be JSON"),
        ({"instruction": "a"}, r"output \(assistant side\) must be a string, got NoneType"),
        ({"instruction": "a", "output": 3}, "must be a string"),
        (
            {"instruction": "a", "output": "b", "history": ["cd"]},
            r"history\[0\] \(assistant side\) must be a string, got NoneType",
        ),
        (
            {"instruction": "a", "output": "b", "history": [{"question": "c", "answer": "d"}]},
            r"history\[0\] \(user side\) must be a string, got dict",
        ),
        ({"prompt": "a"}, r"prompt/completion \(assistant side\) must be a string, got NoneType"),
        ({"input_ids": [1, 2]}, 'needs "input_ids" and "labels"'),
        ({"input_ids": [1, 2], "labels": [1]}, "of one length of at least 1, got 2 and 1"),
        ({"input_ids": [], "labels": []}, "at least 1"),
        ({"input_ids": [1.5], "labels": [1]}, '"input_ids" must be a flat list of integers'),
        ({"input_ids": {1, 2}, "labels": [1, 2]}, '"input_ids" must be a flat list of integers'),
        ({"input_ids": [1], "labels": {1: 1}}, '"labels" must be a flat list of integers'),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "{"}, "tools must be JSON"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [3]}, "the row cannot be read: TypeError"),
        # Marks of other tools that would be lost.
        (
            chat("q", "a") | {"kto_tag": False},
            r'"kto_tag" is False, which marks an answer that is not wanted',
        ),
        ({"prompt": "q", "completion": "a", "label": False}, r'"label" is False'),
        ({"prompt": "q", "completion": "a", "label": torch.tensor(False)}, r'"label" is False'),
        (
            {"messages": [*chat("q")["messages"], {"role": "assistant", "content": "a", "loss": 0.5}]},
            "loss says",
        ),
        (
            {
                "messages": [
                    *chat("q")["messages"],
                    {"role": "assistant", "content": "a", "training_detail": [{"begin_offset": 0}]},
                ]
            },
            "training_detail says whether it is trained .* a message is trained as a whole",
        ),
    ],
)
def test_malformed_rows_say_what_is_wrong(row, message):
    with pytest.raises(ValueError, match=message):
        encode_chat(row, CHATML)


@pytest.mark.parametrize("key", ["train", "loss", "training", "trainable"])
@pytest.mark.parametrize(
    ("shape", "by", "text", "human", "model"),
    [
        ("messages", "role", "content", "user", "assistant"),
        ("conversations", "from", "value", "human", "gpt"),
    ],
)
def test_an_answer_that_another_tool_would_not_train(
    key: str, shape: str, by: str, text: str, human: str, model: str
) -> None:
    for first, expected in ((False, [False, True]), (None, [True, True])):
        turns = [
            {by: human, text: "q"},
            {by: model, text: "first", key: first},
            {by: human, text: "r"},
            {by: model, text: "second", key: True},
        ]
        read = shown({shape: turns})
        assert [f"⟦{answer}" in read for answer in ("first", "second")] == expected


@pytest.mark.parametrize("label", [True, None, 1, 0, "good"])
def test_other_labels_pass(label: object) -> None:
    assert "⟦a" in shown(chat("q", "a") | {"label": label})


# --- rows of one text -------------------------------------------------------------------------------------


def plain_tokenizer(*, bos=False, eos="</s>"):
    """A tokenizer of bytes without a chat template, which adds <s> if asked to."""
    made = ct.byte_tokenizer("mistral")
    made.chat_template, made.eos_token = None, eos
    if bos:
        made.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.convert_tokens_to_ids("<s>"))]
        )
    return made


@pytest.mark.parametrize(
    "text", ["Some text.", "<s>Some text.", "Some text.</s>", "<s>Some text.</s>", "é 🙂"]
)
@pytest.mark.parametrize("bos", [True, False])
def test_all_of_a_text_is_trained_with_its_end(text, bos):
    own = plain_tokenizer(bos=bos)
    encoded = encode_chat({"text": text, "id": 3}, own)
    inner = text.removeprefix("<s>").removesuffix("</s>")
    assert own.decode(encoded.input_ids) == "<s>" * (bos or text[0] == "<") + inner + "</s>"
    assert (encoded.labels, encoded.notes) == (encoded.input_ids, ())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": 3}, '"text" must be a string, got int 3'),
        ({"text": "a", "label": False}, '"label" is False'),
        ({"text": "a", "image": b"x"}, "only text is encoded"),
        ({"text": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_texts_that_are_refused(row, message):
    for own in (plain_tokenizer(), CHATML):
        with pytest.raises(ValueError, match=message):
            encode_chat(row, own)
        assert fs.filter_rows([row, {"text": "b"}], own, on_error="count")[1]["kept"] == 1
    with pytest.raises(ValueError, match="has no eos_token to end a text with"):
        encode_chat({"text": "a"}, plain_tokenizer(eos=None))


@pytest.mark.parametrize(("truncation", "kept"), [("right", "<s>Some"), ("left", "ext.</s>")])
def test_texts_go_everywhere_that_rows_go(truncation, kept, tmp_path):
    own = plain_tokenizer(bos=True)
    rows = [{"text": "Some text."}, {"text": "More."}]
    options = {"max_length": 5, "truncation": truncation}
    encoded = [encode_chat(row, own, **options) for row in rows]
    assert own.decode(encoded[0].input_ids) == kept
    assert render_labels(own, encoded[0].input_ids, encoded[0].labels, color=False) == f"⟦{kept}⟧"
    assert fs.filter_rows(rows, own, **options) == (rows, {"kept": 2})
    batch = fs.SFTCollator(own, **options)(rows)
    assert batch["labels"].tolist() == batch["input_ids"].tolist() == [one.labels for one in encoded]
    assert list(fs.encode_dataset(rows, own, cache_dir=tmp_path, **options)) == encoded
    pack = fs.PackedCollator(max_length=16)(encoded)
    assert pack["input_ids"][0].tolist() == encoded[0].input_ids + encoded[1].input_ids
    begun = [[-100, *one.labels[1:]] for one in encoded]  # no token of its own precedes a row's first
    assert pack["labels"][0].tolist() == begun[0] + begun[1]
    with pytest.raises(ValueError, match="max_length is 5"):
        encode_chat(rows[0], own, max_length=5, truncation="error")


# --- nulls that a row means stay; those that an Arrow table fills in do not ---------------------------------


def search(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "search", "arguments": arguments}}


def row(*calls: dict[str, Any], tools: Any) -> dict[str, Any]:
    made = chat("q", "", ("tool", "none"), ("assistant", "a"))
    made["messages"][1]["tool_calls"] = list(calls)
    return {**made, "tools": tools}


def tool(**properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "search", "parameters": parameters}}


def arguments_of(given: dict[str, Any]) -> list[Any]:
    messages = read_row(given).messages
    return [call["function"]["arguments"] for m in messages for call in m.get("tool_calls", [])]


def in_a_table(values: list[Any]) -> list[Any]:
    """As a column of an Arrow table gives them back: each struct has the keys of all."""
    dicts = [value for value in values if isinstance(value, dict)]
    if dicts:
        names = list(dict.fromkeys(name for value in dicts for name in value))
        columns = {name: iter(in_a_table([value.get(name) for value in dicts])) for name in names}
        filled = iter([{name: next(columns[name]) for name in names} for _ in dicts])
        return [next(filled) if isinstance(value, dict) else None for value in values]
    lists = [value for value in values if isinstance(value, list)]
    if lists:
        items = iter(in_a_table([item for value in lists for item in value]))
        return [[next(items) for _ in value] if isinstance(value, list) else None for value in values]
    return values


def test_a_null_of_a_json_row_is_printed_as_apply_chat_template_prints_it() -> None:
    schema = {"limit": {"type": "integer", "default": None}}
    given = row(search(query="x", limit=None), tools=[tool(query={"type": "string"}, **schema)])
    given["messages"][1]["refusal"] = None  # as OpenAI's API answers
    text = CHATML.apply_chat_template(given["messages"], tools=given["tools"], tokenize=False)
    assert CHATML.decode(encode_chat(given, CHATML).input_ids) == text
    assert re.findall(r'"(\w+)": null', text) == ["default", "limit"]


def test_nulls_for_keys_that_a_row_does_not_have() -> None:
    plain = [
        row(search(query="x", limit=3), search(city="Oslo"), tools=[tool(query={"type": "string"})]),
        row(search(deep={"a": 1, "b": [None, 2]}), tools=[tool(limit={"type": "integer", "default": 4})]),
    ]
    for given, filled in zip(plain, in_a_table(plain), strict=True):
        assert filled["messages"][0]["tool_calls"] is None
        assert read_row(filled).tools == read_row(given).tools
        if "deep" not in json.dumps(given):
            assert arguments_of(filled) == arguments_of(given)
            assert shown(filled) == shown(given)
    assert arguments_of(in_a_table(plain)[1]) == [{"deep": {"a": 1, "b": [None, 2]}}]


def test_the_row_is_left_as_it_was() -> None:
    (given,) = in_a_table([row(search(query="x", expression=None), tools=[tool(query={"type": "string"})])])
    before = json.dumps(given)
    encode_chat(given, CHATML)
    assert json.dumps(given) == before


def test_rows_of_numpy() -> None:
    tools = [tool(query={"type": "string"})]
    given, other = (
        row(search(query=text, limit=number), tools=tools)
        for text, number in (("x", 3), (np.str_("x"), np.int64(3)))
    )
    given["messages"][3]["weight"], other["messages"][3]["weight"] = 0, np.float64(0.0)
    other["messages"][1]["tool_calls"] = np.array(other["messages"][1]["tool_calls"], dtype=object)
    other = {name: np.array(values, dtype=object) for name, values in other.items()}
    assert shown(other) == shown(given)
    assert read_row(other).trained == [True, True, True, False]


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
    given = {"messages": [*chat("q")["messages"], {"role": "assistant", "content": parts}]}
    assert shown(given, tokenizer) == "[user]q[assistant]⟦[THINK]hm[/THINK]yes<|im_end|>⟧"
    assert shown(given, tokenizer, train_reasoning=False).endswith("[THINK]hm[/THINK]⟦yes<|im_end|>⟧")
