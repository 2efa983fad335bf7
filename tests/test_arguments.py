"""Arguments of another kind, and rows that say what nothing reads: refused or told, with what is meant."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fsdp_sft as fs
from tests.harness.chats import TOKENIZERS, chat
from tests.harness.models import tiny_model

CHATML = TOKENIZERS["chatml"]
OWN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[END]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_arguments_of_another_kind(tmp_path: Path) -> None:
    model: Any = tiny_model("llama")
    calls: dict[str, tuple[type[Exception], Callable[[], object]]] = {
        "tokenizer must be a tokenizer, .* got a str": (
            TypeError,
            lambda: fs.SFTCollator("some/model", max_length=8),
        ),
        "tokenizer must be a tokenizer, .* got a list": (TypeError, lambda: fs.filter_rows(object(), [{}])),
        "their number, got str": (TypeError, lambda: fs.ResumableSampler("rows.jsonl")),
        "their number, got generator": (TypeError, lambda: fs.ResumableSampler(r for r in ())),
        r"such as torch\.bfloat16, got 'half a byte'": (
            ValueError,
            lambda: fs.export_hf(model, tmp_path / "out", dtype="half a byte"),
        ),
        "frozen_dtype must be a": (
            ValueError,
            lambda: fs.load_pretrained(tmp_path, mesh=None, frozen_dtype="int4"),
        ),
        r"filter_rows takes no train_om=: do you mean train_on\?": (
            TypeError,
            lambda: fs.filter_rows([], CHATML, train_om="all"),
        ),
        "SFTCollator takes no colour=: its options are chat_template, ": (
            TypeError,
            lambda: fs.SFTCollator(CHATML, max_length=9, colour="red"),
        ),
    }
    for words, (kind, call) in calls.items():
        with pytest.raises(kind, match=words):
            call()


def test_answers_that_are_cut_off() -> None:
    rows = [chat("a", "hello", "a longer question", "and its answer"), chat("a", "hi")]
    collate = fs.SFTCollator(CHATML, max_length=40)
    with pytest.warns(UserWarning, match="max_length leaves nothing of an answer"):
        collate(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collate(rows)
        fs.SFTCollator(CHATML, max_length=40, truncation="right")(rows)


def test_what_a_template_does_not_print() -> None:
    thinking = {"type": "thinking", "thinking": "why"}
    answer = {"role": "assistant", "content": [thinking, {"type": "text", "text": "so"}]}
    row: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}, answer]}
    with pytest.raises(fs.ChatTemplateError, match="does not print the reasoning of message 1, 'why'"):
        fs.encode_chat(row, CHATML, chat_template=OWN)
    row = {**chat("q", "a"), "tools": [{"type": "function", "function": {"name": "find", "parameters": {}}}]}
    with pytest.warns(UserWarning, match="or the tools, so the model is trained without"):
        fs.encode_chat(row, CHATML, chat_template=OWN)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*or the tools, so the model is trained without")
        fs.encode_chat(row, CHATML, chat_template="{{ tools }}" + OWN)


@pytest.mark.parametrize(
    ("key", "meant"), [("tool_call", "tool_calls"), ("toolCalls", "tool_calls"), ("weig" + "th", "weight")]
)
def test_a_key_that_is_misspelt(key: str, meant: str) -> None:
    row = chat("q", "a")
    row["messages"][1][key] = []
    with pytest.raises(fs.RowError, match=rf"'{key}', which is not read: is it {meant}\?") as found:
        fs.encode_chat(row, CHATML)
    assert found.value.reason == "malformed"
    row = chat("q", "a")
    row["messages"][1] |= {"id": "7", "reason": "r", "name": "n"}
    fs.encode_chat(row, CHATML)


def test_the_row_of_a_batch_is_named() -> None:
    wrong = {"messages": [{"role": "robot", "content": "a"}]}
    with pytest.raises(fs.RowError, match=r"^row 1 of 2: messages\[0\] has the role 'robot'"):
        fs.SFTCollator(CHATML, max_length=64)([chat("q", "a"), wrong])
