"""Rows that are nearly right: read as they are meant, or refused; nothing of them is lost without a word."""

import collections
import json
import types
from typing import Any

import pytest
import torch

from fsdp_sft import RowError, SFTCollator, encode_chat, encode_dataset, filter_rows
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
        ({"input_ids": [0, 2], "labels": [-100, 2], "attention_mask": [0, 1]}, "without padding="),
        ({"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 2]}, "this is a pack of several"),
        ({"input_ids": [1, 2], "labels": [1, 2], "position_ids": [0, 0]}, "this is a pack of several"),
        ({"input_ids": [1, 2], "labels": [1, 2], "seq_lengths": [1, 1]}, "this is a pack of several"),
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
    row = chat("q", "<think>\nplan\n</think>\n\nWrite <think> to open, then 42.")
    assert shown(row, train_reasoning=False).endswith("⟦Write <think> to open, then 42.<|im_end|>⟧\n")


def test_what_breaks_a_template_is_its_refusal() -> None:
    tokenizer = ct.byte_tokenizer("chatml", template="{{ 1 // (messages | length - 2) }}" + ct.CHATML)
    rows = [chat("q", "a", "r", "b"), chat("q", "a")]
    assert filter_rows(rows, tokenizer, on_error="count")[1] == {"kept": 1, "refused_by_template": 1}


@pytest.mark.parametrize(
    ("mapping", "sequence"), [(collections.UserDict, collections.deque), (types.MappingProxyType, tuple)]
)
def test_any_mapping_and_any_sequence_will_do(mapping: Any, sequence: Any) -> None:
    plain = chat("q", "a", "r", "b")
    row = mapping({"messages": sequence(map(mapping, plain["messages"]))})
    assert encode_chat(row, TOKENIZERS["chatml"]) == encode_chat(plain, TOKENIZERS["chatml"])


# --- rows with images, videos or sounds are refused by name, in the shapes in which tools keep them ---------

TOKENIZER = TOKENIZERS["chatml"]
CHAT = chat("what is this?", "a cat")["messages"]
TURNS = [{"from": "human", "value": "<image>\nwhat is this?"}, {"from": "gpt", "value": "a cat"}]
IDS = {"input_ids": [3, 4], "labels": [3, 4]}
IMAGE = {"bytes": b"\x89PNG", "path": "cat.png"}

ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "LLaVA": ({"id": "0", "image": "coco/cat.jpg", "conversations": TURNS}, "'image'"),
    "LLaMA-Factory": ({"messages": CHAT, "images": ["cat.jpg"]}, "'images'"),
    "ms-swift": ({"messages": CHAT, "images": [{"bytes": None, "path": "cat.jpg"}]}, "'images'"),
    "TRL's messages": ({"messages": CHAT, "images": [IMAGE]}, "'images'"),
    "TRL's prompts": ({"prompt": "what is this?", "completion": "a cat", "images": [IMAGE]}, "'images'"),
    "Alpaca": ({"instruction": "what?", "input": "", "output": "a cat", "image": IMAGE}, "'image'"),
    "a video": ({"messages": CHAT, "video": "cat.mp4"}, "'video'"),
    "videos and sounds": (
        {"messages": CHAT, "videos": ["a.mp4"], "audios": ["a.wav"]},
        "'videos' and 'audios'",
    ),
    "in a message": ({"messages": [{**CHAT[0], "images": [IMAGE]}, CHAT[1]]}, r"messages\[0\] has 'images'"),
    "in a turn": ({"conversations": [{**TURNS[0], "image": "a.png"}, TURNS[1]]}, r"conversations\[0\]"),
    "a part": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, CHAT[1]]},
        r"messages\[0\]\.content\[0\] is a part of type image",
    ),
    "a part of OpenAI's": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                CHAT[1],
            ]
        },
        "type image_url",
    ),
    "tokenised": ({**IDS, "pixel_values": torch.ones(1, 3, 4, 4)}, "'pixel_values'"),
    "tokenised sounds": ({**IDS, "input_features": [[0.1]]}, "'input_features'"),
}


@pytest.mark.parametrize("shape", ROWS)
def test_a_row_with_more_than_text_is_refused_by_name(shape: str) -> None:
    row, words = ROWS[shape]
    for call, says in (
        (lambda: encode_chat(row, TOKENIZER), words),
        (lambda: filter_rows([row], TOKENIZER, max_length=200), "row 0: "),
        (lambda: SFTCollator(TOKENIZER, max_length=200)([row]), words),
    ):
        with pytest.raises(RowError, match=says):
            call()
    rows = [{"messages": CHAT}, row]
    found = filter_rows(rows, TOKENIZER, max_length=200, on_error="count")
    assert found == (rows[:1], {"kept": 1, "media": 1})


@pytest.mark.parametrize(
    "nothing", [None, [], "", {}, [None], {"bytes": None, "path": None}, [{"bytes": None, "path": ""}], False]
)
def test_nulls_are_no_images(nothing: Any) -> None:
    messages = [{**message, "images": nothing} for message in CHAT]
    row = {"messages": messages, "image": nothing, "videos": nothing}
    assert encode_chat(row, TOKENIZER) == encode_chat({"messages": CHAT}, TOKENIZER)


class _Processor:
    """As transformers': a tokenizer within, which alone has a padding token and encodes."""

    tokenizer = TOKENIZER

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a processor is asked for images")


def test_a_processor_is_used_by_its_tokenizer(tmp_path: Any) -> None:
    processor: Any = _Processor()
    rows = [{"messages": CHAT}]
    expected = encode_chat(rows[0], TOKENIZER)
    assert encode_chat(rows[0], processor) == expected
    assert filter_rows(rows, processor, max_length=200)[0] == rows
    assert SFTCollator(processor, max_length=200)(rows)["input_ids"][0].tolist() == expected.input_ids
    assert list(encode_dataset(rows, processor, max_length=200, cache_dir=tmp_path)) == [expected]
