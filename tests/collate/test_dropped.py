"""A text of an answer that the template does not print: refused or counted, never lost in silence."""

from typing import Any

import pytest

import fsdp_sft as fs
from fsdp_sft import ChatTemplateError, SFTCollator, encode_chat, filter_rows
from fsdp_sft.collate import collator, notes
from fsdp_sft.collate.template import ChatTemplate
from tests.harness import chat_templates as ct
from tests.harness.chats import chat, shown

# Prints reasoning after the last question only, as Qwen3 does, and text beside a call never, as Llama 3.1.
TEMPLATE = (
    "{% set last = namespace(user=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.reasoning_content and loop.index0 > last.user and not message.tool_calls %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}"
    """{{ call.function.name + "('" + call.function.arguments.city.replace("'", "\\\\'") + "')" }}"""
    "{% endfor %}"
    "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SILENT = TEMPLATE.replace("message.reasoning_content and", "false and")


def tokenizer(template: str = TEMPLATE) -> Any:
    return ct.byte_tokenizer("chatml", template=template)


def with_call(content: str = "", **arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo", **arguments}}}
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
        ]
    }


def thinking(row: dict[str, Any], at: int, key: str = "reasoning_content") -> dict[str, Any]:
    row["messages"][at][key] = "let me see"
    return row


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (with_call("I look"), "the content of message 1, 'I look'"),
        (with_call(other="x"), "the tool call of message 1, 'x'"),
        (
            thinking(with_call(), 1),
            "message 1, 'let me see', so it would not be trained: pass a chat_template=",
        ),
    ],
)
def test_a_text_that_is_not_printed_is_refused(row: dict[str, Any], says: str) -> None:
    for refused in (
        lambda: encode_chat(row, tokenizer()),
        lambda: filter_rows([chat("q", "a"), row], tokenizer()),
        lambda: SFTCollator(tokenizer(), max_length=99)([row]),
    ):
        with pytest.raises(ChatTemplateError, match="does not print") as caught:
            refused()
        assert (says in str(caught.value), caught.value.reason) == (True, "dropped_text")
    assert encode_chat(row, tokenizer(), on_dropped="count").notes == ("dropped",)
    SFTCollator(tokenizer(), max_length=99, on_dropped="count")([row])


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_is_not_printed_is_refused(key: str) -> None:
    row, own = thinking(chat("q", "a"), 1, key), tokenizer(SILENT)
    with pytest.raises(ChatTemplateError, match="the reasoning of message 1, 'let me see'"):
        encode_chat(row, own)
    assert encode_chat(row, own, on_dropped="count").notes == ("dropped",)
    assert encode_chat(row, own, train_reasoning=False).notes == ()
    assert ChatTemplate(own).facts().reasoning_key == ""
    assert ChatTemplate(tokenizer()).facts().reasoning_key == "reasoning_content"


def test_what_is_printed_is_no_loss() -> None:
    for row in (
        with_call(),
        with_call(city="John's"),
        with_call("  \n"),
        thinking(chat("q", "a"), 1),
        chat("q", "a", "r", ""),
    ):
        assert encode_chat(row, tokenizer()).notes == ()


def test_reasoning_of_the_past_is_no_loss() -> None:
    row = thinking(thinking(chat("q", "a", "r", "b"), 1), 3)
    assert encode_chat(row, tokenizer()).notes == ()
    assert shown(row, tokenizer()).endswith("⟦<think>let me see</think>b<|im_end|>⟧\n")


def test_a_message_that_is_not_trained_may_be_left_out() -> None:
    row = with_call("I look")
    row["messages"] += [{"role": "tool", "content": "sun"}, {"role": "assistant", "content": "fine"}]
    assert encode_chat(row, tokenizer(), train_on="last").notes == ()
    row["messages"][1]["train"] = False
    assert encode_chat(row, tokenizer()).notes == ()


@pytest.mark.parametrize("kind", ["call beside text", "system left out"])
def test_all_texts_are_trained_with_all(kind: str) -> None:
    if kind == "call beside text":
        row, template = with_call("I look"), TEMPLATE
    else:
        row, template = (
            chat(("system", "be kind"), "q", "a"),
            TEMPLATE.replace(
                "{{ '<|im_start|>' + message.role",
                "{% if message.role == 'system' %}{% continue %}{% endif %}{{ '<|im_start|>' + message.role",
            ),
        )
    chat_of_all = encode_chat(row, tokenizer(template), train_on="all", on_dropped="count")
    more = () if kind == "call beside text" else ("context_dropped",)
    assert chat_of_all.notes == ("dropped", *more)
    with pytest.raises(ChatTemplateError):
        encode_chat(row, tokenizer(template), train_on="all")
    row["messages"][0 if kind != "call beside text" else 1]["weight"] = 0
    with pytest.raises(ValueError, match="is not to be trained: give the roles"):
        encode_chat(row, tokenizer(template), train_on="all")


def test_counting_gives_reasons_indices_and_examples() -> None:
    rows = [chat("q", "a"), with_call("I look"), {"messages": "?"}, chat("q"), chat("q", "\udc80")]
    kept, counts = filter_rows(rows, tokenizer(), on_error="count")
    assert kept == [rows[0]]
    assert counts == {"kept": 1, "dropped_text": 1, "malformed": 2, "no_target": 1}
    assert list(counts.indices["malformed"]) == [2, 4]
    assert counts.examples["dropped_text"][0].startswith("row 1: the chat template of")
    assert "surrogates not allowed" in counts.examples["malformed"][1]
    assert set(counts) <= {"kept", *collator.REFUSALS, *notes.NOTES}
    kept, counts = filter_rows(rows, tokenizer(), on_error="count", on_dropped="count")
    assert kept == rows[:2]
    assert counts == {"kept": 2, "dropped": 1, "malformed": 2, "no_target": 1}
    _, counts = filter_rows([chat("q", "a"), *[with_call("I look")] * 50], tokenizer(), on_error="count")
    assert len(counts.examples["dropped_text"]) == 20
    assert len(counts.indices["dropped_text"]) == 50
    with pytest.raises(ValueError, match="no row has a target") as caught:
        filter_rows([rows[1]], tokenizer(), on_error="count")
    assert "row 0: the chat template" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ({"max_length": 30}, True),
        ({"max_length": 75}, False),
        ({"max_length": 20, "truncation": "left"}, True),
        ({"max_length": 20, "truncation": "left", "train_on": "last"}, False),
    ],
)
def test_an_answer_that_is_cut_off_whole_is_counted(options: dict[str, Any], noted: bool) -> None:
    row = chat("q", "first answer", "r", "second answer")
    _, counts = filter_rows([row], tokenizer(), **options)
    assert counts == ({"kept": 1, "answer_cut_off": 1} if noted else {"kept": 1})


# --- what a template leaves out in front of an answer, and rows of which less is trained than it seems ------

PRINTS_ALL = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = PRINTS_ALL.replace("in messages %}", "in messages if message.role != 'system' %}", 1)
NO_TOOL = PRINTS_ALL.replace("in messages %}", "in messages if message.role != 'tool' %}", 1)
SHORTENED = PRINTS_ALL.replace(
    "message.content +", "(message.content if message.role != 'user' else message.content[:9]) +", 1
)
# The system's text within the first question, as Gemma's and Mistral's templates have it.
FOLDED = (
    "{% set ns = namespace(first='') %}{% for message in messages %}{% if message.role == 'system' %}"
    "{% set ns.first = message.content + '\n\n' %}{% else %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'user' %}{{ ns.first }}{% set ns.first = '' %}{% endif %}"
    "{{ message.content | trim + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _row(*more: dict[str, str], system: str = "You answer in French.") -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": "What is the capital?"},
            *more,
            {"role": "assistant", "content": "Paris."},
        ]
    }


@pytest.mark.parametrize(
    ("template", "row"),
    [
        (NO_SYSTEM, _row()),
        (NO_TOOL, _row({"role": "tool", "content": "It is in France."})),
        (SHORTENED, _row()),
    ],
)
def test_what_is_not_printed_in_front_of_an_answer_is_counted(template: str, row: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="20 of 20 rows are counted as context_dropped"):
        _, counts = filter_rows([row] * 20, tokenizer(template))
    assert counts == {"kept": 20, "context_dropped": 20}
    assert "leaves out a text of the system" in counts.examples["context_dropped"][0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("template", [PRINTS_ALL, FOLDED, NO_SYSTEM])
@pytest.mark.parametrize("system", ["You answer in French.", "", "  \n"])
def test_what_is_printed_or_blank_is_not_counted(template: str, system: str) -> None:
    if template == NO_SYSTEM and system.strip():
        pytest.skip("counted, as above")
    assert filter_rows([_row(system=system)], tokenizer(template))[1] == {"kept": 1}


def test_rows_that_are_opened_again_warn_again(tmp_path: Any) -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match="4 of 4 rows are counted as context_dropped"):
            encoded = fs.encode_dataset([_row()] * 4, tokenizer(NO_SYSTEM), max_length=96, cache_dir=tmp_path)
        assert encoded.counts["context_dropped"] == 4
