"""Variables of the template: of a row, of a data set; in the probe as in the rendering."""

from typing import Any

import pytest

import fsdp_sft as fs
from fsdp_sft.collate import SFTCollator, encode_chat, filter_rows
from tests.harness import chat_templates as ct
from tests.harness.chats import chat, shown

# The prompt opens a think block, or writes an empty one, which the answer then has as well.
TEMPLATE = (
    "{{ '[' + (date or 'no date') + ']' }}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think></think>' }}{% endif %}{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)


def tokenizer() -> Any:
    return ct.byte_tokenizer("chatml", template=TEMPLATE)


def test_variables_of_the_row_go_before_those_of_the_call() -> None:
    own, row = tokenizer(), chat("q", "a")
    assert shown(row, own).startswith("[no date]")
    assert shown(row, own, chat_template_kwargs={"date": "today"}).startswith("[today]")
    row["chat_template_kwargs"] = {"date": "now", "enable_thinking": None}
    assert shown(row, own, chat_template_kwargs={"date": "today"}).startswith("[now]")
    text = own.apply_chat_template(row["messages"], tokenize=False, date="now")
    assert own.decode(encode_chat(row, own).input_ids) == text


def test_what_the_prompt_writes_with_them_is_not_trained() -> None:
    own = tokenizer()
    thinks, silent = chat("q", "a"), chat("q", "a")
    silent["chat_template_kwargs"] = {"enable_thinking": False}
    assert shown(thinks, own).endswith("assistant\n⟦a<|im_end|>⟧\n")
    assert shown(silent, own).endswith("assistant\n<think></think>⟦a<|im_end|>⟧\n")
    assert shown(thinks, own, chat_template_kwargs={"enable_thinking": False}) == shown(silent, own)


def test_rows_of_one_batch_may_have_their_own() -> None:
    own = tokenizer()
    rows = [{**chat("q", "a"), "chat_template_kwargs": {"date": str(day)}} for day in range(3)]
    batch = SFTCollator(own, max_length=99)(rows)
    assert [own.decode(ids)[:3] for ids in batch["input_ids"]] == ["[0]", "[1]", "[2]"]
    of_all = SFTCollator(own, max_length=99, chat_template_kwargs={"date": "7"})([chat("q", "a")])
    assert own.decode(of_all["input_ids"][0]).startswith("[7]")
    kept, _ = filter_rows(rows, own, chat_template_kwargs={"date": "7"})
    assert kept == rows


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"messages": []}, "multiple values for keyword argument 'messages'"),
        ({"tools": []}, "multiple values for keyword argument 'tools'"),
        ({"add_generation_prompt": True}, "multiple values for keyword argument"),
        ({"continue_final_message": True}, "multiple values for keyword argument"),
        ({1: 2}, "keywords must be strings"),
        (["x"], "cannot be read"),
    ],
)
def test_names_that_come_from_elsewhere_are_refused(given: Any, says: str) -> None:
    for call in (
        lambda: fs.encode_chat(chat("q", "a"), tokenizer(), chat_template_kwargs=given),
        lambda: fs.encode_chat({**chat("q", "a"), "chat_template_kwargs": given}, tokenizer()),
        lambda: SFTCollator(tokenizer(), max_length=9, chat_template_kwargs=given)([chat("q", "a")]),
    ):
        with pytest.raises(ValueError, match=says):
            call()


NEEDS_TOOLS = (
    "{% for tool in tools %}{{ tool.function.name + '\n' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_template_that_takes_no_conversation_without_tools() -> None:
    own = ct.byte_tokenizer("chatml", template=NEEDS_TOOLS)
    row = {**chat("q", "a"), "tools": [{"name": "f", "parameters": {}}]}
    assert shown(row, own).endswith("assistant\n⟦a<|im_end|>⟧\n")
