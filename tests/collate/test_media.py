"""Rows with images, videos or sounds are refused by name, in the shapes in which tools keep them."""

from typing import Any

import pytest
import torch

import fsdp_sft as fs
from tests.harness.chat_templates import byte_tokenizer

TOKENIZER = byte_tokenizer("chatml")
CHAT = [{"role": "user", "content": "what is this?"}, {"role": "assistant", "content": "a cat"}]
TURNS = [{"from": "human", "value": "<image>\nwhat is this?"}, {"from": "gpt", "value": "a cat"}]
PAIR = {"prompt": "what is this?", "completion": "a cat"}
IDS = {"input_ids": [3, 4], "labels": [3, 4]}
IMAGE = {"bytes": b"\x89PNG", "path": "cat.png"}

ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "LLaVA": ({"id": "0", "image": "coco/cat.jpg", "conversations": TURNS}, "'image'"),
    "LLaMA-Factory": ({"messages": CHAT, "images": ["cat.jpg"]}, "'images'"),
    "ms-swift": ({"messages": CHAT, "images": [{"bytes": None, "path": "cat.jpg"}]}, "'images'"),
    "TRL's messages": ({"messages": CHAT, "images": [IMAGE]}, "'images'"),
    "TRL's prompts": ({**PAIR, "images": [IMAGE]}, "'images'"),
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
    "tokenised": (
        {"input_ids": [3, 4], "labels": [3, 4], "pixel_values": torch.ones(1, 3, 4, 4)},
        "'pixel_values'",
    ),
    "tokenised sounds": (
        {"input_ids": [3, 4], "labels": [3, 4], "input_features": [[0.1]]},
        "'input_features'",
    ),
}


@pytest.mark.parametrize("shape", ROWS)
def test_a_row_with_more_than_text_is_refused_by_name(shape: str) -> None:
    row, words = ROWS[shape]
    with pytest.raises(fs.RowError, match=words):
        fs.encode_chat(row, TOKENIZER)
    rows = [{"messages": CHAT}, row]
    kept, counts = fs.filter_rows(rows, TOKENIZER, max_length=200, on_error="count")
    assert (kept, dict(counts)) == (rows[:1], {"kept": 1, "media": 1})
    with pytest.raises(fs.RowError, match="row 0: "):
        fs.filter_rows([row], TOKENIZER, max_length=200)
    with pytest.raises(fs.RowError, match=words):
        fs.SFTCollator(TOKENIZER, max_length=200)([row])


@pytest.mark.parametrize(
    "nothing", [None, [], "", {}, [None], {"bytes": None, "path": None}, [{"bytes": None, "path": ""}], False]
)
def test_nulls_are_no_images(nothing: Any) -> None:
    row = {
        "messages": [{**message, "images": nothing} for message in CHAT],
        "image": nothing,
        "videos": nothing,
    }
    assert fs.encode_chat(row, TOKENIZER) == fs.encode_chat({"messages": CHAT}, TOKENIZER)


class _Processor:
    """As transformers': a tokenizer within, which alone has a padding token and encodes."""

    def __init__(self) -> None:
        self.tokenizer = TOKENIZER

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a processor is asked for images")


def test_a_processor_is_used_by_its_tokenizer(tmp_path: Any) -> None:
    processor: Any = _Processor()
    rows = [{"messages": CHAT}]
    chat = fs.encode_chat(rows[0], TOKENIZER)
    assert fs.encode_chat(rows[0], processor) == chat
    assert fs.filter_rows(rows, processor, max_length=200)[0] == rows
    batch = fs.SFTCollator(processor, max_length=200)(rows)
    assert batch["input_ids"][0].tolist() == chat.input_ids
    encoded = fs.encode_dataset(rows, processor, max_length=200, cache_dir=tmp_path)
    assert list(encoded[0].input_ids) == chat.input_ids
