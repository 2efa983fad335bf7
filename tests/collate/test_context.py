"""What a template leaves out in front of an answer, and rows of which less is trained than it seems."""

from typing import Any

import pytest

import fsdp_sft as fs
from fsdp_sft.collate import filter_rows
from tests.harness import chat_templates as ct

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


def _tokenizer(template: str) -> Any:
    return ct.byte_tokenizer("chatml", template=template)


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
        _, counts = filter_rows([row] * 20, _tokenizer(template))
    assert counts == {"kept": 20, "context_dropped": 20}
    assert "leaves out a text of the system" in counts.examples["context_dropped"][0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("template", [PRINTS_ALL, FOLDED, NO_SYSTEM])
@pytest.mark.parametrize("system", ["You answer in French.", "", "  \n"])
def test_what_is_printed_or_blank_is_not_counted(template: str, system: str) -> None:
    if template == NO_SYSTEM and system.strip():
        pytest.skip("counted, as above")
    assert filter_rows([_row(system=system)], _tokenizer(template))[1] == {"kept": 1}


def test_rows_that_are_opened_again_warn_again(tmp_path: Any) -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match="4 of 4 rows are counted as context_dropped"):
            encoded = fs.encode_dataset(
                [_row()] * 4, _tokenizer(NO_SYSTEM), max_length=96, cache_dir=tmp_path
            )
        assert encoded.counts["context_dropped"] == 4
