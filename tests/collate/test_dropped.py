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


def tokenizer(template: str = TEMPLATE) -> Any:
    return ct.byte_tokenizer("chatml", template=template)


def with_call(content: str = "", *more: tuple[str, str], **arguments: Any) -> dict[str, Any]:
    row = chat("q", content, *more)
    row["messages"][1]["tool_calls"] = [{"name": "f", "arguments": {"city": "Oslo", **arguments}}]
    return row


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
    own = tokenizer()
    for refused in (
        lambda: encode_chat(row, own),
        lambda: filter_rows([chat("q", "a"), row], own),
        lambda: SFTCollator(own, max_length=99)([row]),
    ):
        with pytest.raises(ChatTemplateError, match="does not print") as caught:
            refused()
        assert (says in str(caught.value), caught.value.reason) == (True, "dropped_text")
    assert encode_chat(row, own, on_dropped="count").notes == ("dropped",)
    SFTCollator(own, max_length=99, on_dropped="count")([row])


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_is_not_printed_is_refused(key: str) -> None:
    row = thinking(chat("q", "a"), 1, key)
    own = tokenizer(TEMPLATE.replace("message.reasoning_content and", "false and"))
    with pytest.raises(ChatTemplateError, match="the reasoning of message 1, 'let me see'"):
        encode_chat(row, own)
    assert encode_chat(row, own, on_dropped="count").notes == ("dropped",)
    assert encode_chat(row, own, train_reasoning=False).notes == ()
    keys = [ChatTemplate(each).facts().reasoning_key for each in (own, tokenizer())]
    assert keys == ["", "reasoning_content"]


@pytest.mark.parametrize(
    ("row", "end"),
    [
        (with_call(), ""),
        (with_call(city="John's"), ""),
        (with_call("  \n"), ""),
        (thinking(chat("q", "a"), 1), ""),
        (chat("q", "a", "r", ""), ""),
        # Reasoning of the past.
        (thinking(thinking(chat("q", "a", "r", "b"), 1), 3), "⟦<think>let me see</think>b<|im_end|>⟧\n"),
    ],
)
def test_what_is_printed_is_no_loss(row: dict[str, Any], end: str) -> None:
    assert encode_chat(row, tokenizer()).notes == ()
    assert shown(row, tokenizer()).endswith(end)


def test_a_message_that_is_not_trained_may_be_left_out() -> None:
    row = with_call("I look", ("tool", "sun"), ("assistant", "fine"))
    assert encode_chat(row, tokenizer(), train_on="last").notes == ()
    row["messages"][1]["train"] = False
    assert encode_chat(row, tokenizer()).notes == ()


@pytest.mark.parametrize(
    ("row", "at", "template", "notes"),
    [
        (with_call("I look"), 1, TEMPLATE, ("dropped",)),
        (
            chat(("system", "be kind"), "q", "a"),
            0,
            TEMPLATE.replace(
                "{{ '<|im_start|>' + message.role",
                "{% if message.role == 'system' %}{% continue %}{% endif %}{{ '<|im_start|>' + message.role",
            ),
            ("dropped", "context_dropped"),
        ),
    ],
    ids=["call beside text", "system left out"],
)
def test_all_texts_are_trained_with_all(
    row: dict[str, Any], at: int, template: str, notes: tuple[str, ...]
) -> None:
    own = tokenizer(template)
    assert encode_chat(row, own, train_on="all", on_dropped="count").notes == notes
    with pytest.raises(ChatTemplateError):
        encode_chat(row, own, train_on="all")
    row["messages"][at]["weight"] = 0
    with pytest.raises(ValueError, match="is not to be trained: give the roles"):
        encode_chat(row, own, train_on="all")


def test_counting_gives_reasons_indices_and_examples() -> None:
    rows = [chat("q", "a"), with_call("I look"), {"messages": "?"}, chat("q"), chat("q", "\udc80")]
    kept, counts = filter_rows(rows, tokenizer(), on_error="count")
    assert (kept, counts) == (rows[:1], {"kept": 1, "dropped_text": 1, "malformed": 2, "no_target": 1})
    assert list(counts.indices["malformed"]) == [2, 4]
    assert counts.examples["dropped_text"][0].startswith("row 1: the chat template of")
    assert "surrogates not allowed" in counts.examples["malformed"][1]
    assert set(counts) <= {"kept", *collator.REFUSALS, *notes.NOTES}
    found = filter_rows(rows, tokenizer(), on_error="count", on_dropped="count")
    assert found == (rows[:2], {"kept": 2, "dropped": 1, "malformed": 2, "no_target": 1})
    _, counts = filter_rows([chat("q", "a"), *[with_call("I look")] * 50], tokenizer(), on_error="count")
    assert [len(of["dropped_text"]) for of in (counts.examples, counts.indices)] == [20, 50]
    with pytest.raises(ValueError, match=r"(?s)no row has a target.*row 0: the chat template"):
        filter_rows([rows[1]], tokenizer(), on_error="count")


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ({"max_length": 30}, {"answer_cut_off": 1}),
        ({"max_length": 75}, {}),
        ({"max_length": 20, "truncation": "left"}, {"answer_cut_off": 1}),
        ({"max_length": 20, "truncation": "left", "train_on": "last"}, {}),
    ],
)
def test_an_answer_that_is_cut_off_whole_is_counted(options: dict[str, Any], noted: dict[str, int]) -> None:
    row = chat("q", "first answer", "r", "second answer")
    assert filter_rows([row], tokenizer(), **options)[1] == {"kept": 1, **noted}


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


def _row(*more: tuple[str, str], system: str = "You answer in French.") -> dict[str, Any]:
    return chat(("system", system), ("user", "What is the capital?"), *more, ("assistant", "Paris."))


@pytest.mark.parametrize(
    ("template", "row"),
    [
        (NO_SYSTEM, _row()),
        (NO_TOOL, _row(("tool", "It is in France."))),
        (SHORTENED, _row()),
    ],
)
def test_what_is_not_printed_in_front_of_an_answer_is_counted(template: str, row: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="20 of 20 rows are counted as context_dropped"):
        _, counts = filter_rows([row] * 20, tokenizer(template))
    assert counts == {"kept": 20, "context_dropped": 20}
    assert "leaves out a text of the system" in counts.examples["context_dropped"][0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("template", "systems"),
    [
        (PRINTS_ALL, ["You answer in French.", "", "  \n"]),
        (FOLDED, ["You answer in French.", "", "  \n"]),
        (NO_SYSTEM, ["", "  \n"]),
    ],
)
def test_what_is_printed_or_blank_is_not_counted(template: str, systems: list[str]) -> None:
    rows = [_row(system=system) for system in systems]
    assert filter_rows(rows, tokenizer(template))[1] == {"kept": len(rows)}


def test_rows_that_are_opened_again_warn_again(tmp_path: Any) -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match="4 of 4 rows are counted as context_dropped"):
            encoded = fs.encode_dataset([_row()] * 4, tokenizer(NO_SYSTEM), max_length=96, cache_dir=tmp_path)
        assert encoded.counts["context_dropped"] == 4
