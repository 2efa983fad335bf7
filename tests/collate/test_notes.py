"""Right templates have no notes, and rank 0 alone warns."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import fsdp_sft as fs
from fsdp_sft import filter_rows
from tests.collate.template_tokenizers import ROW, tokenizer_for, turns
from tests.harness import chat_templates as ct
from tests.harness.chats import chat

_CALLS = "{% for c in m.tool_calls or [] %}{{ '[TOOL_CALLS]' + (c.function | tojson) }}{% endfor %}"
_THOUGHT = "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
# A question in marks and then the answer, as Mistral's templates have them: there is no header to prompt.
MARKED = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ '[AVAILABLE_TOOLS]' + tool.function.name }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.role == 'assistant' %}" + _THOUGHT + "{{ m.content }}" + _CALLS + "{{ eos_token }}"
    "{% else %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}{% endif %}{% endfor %}"
)
# Answers of text and calls have marks of their own, which are no header; the prompt ends every rendering.
ALWAYS_PROMPTED = (
    "{% for m in messages %}{{ '<|turn|><|' + m.role + '|>' }}{% if m.role != 'assistant' %}{{ m.content }}"
    "{% elif m.tool_calls %}{{ '<|act|>' }}" + _CALLS + "{% else %}{{ '<|say|>' + m.content }}{% endif %}"
    "{{ '<|end|>' }}{% endfor %}{{ '<|turn|><|assistant|>' }}"
)
# As Qwen3.5's: the prompt opens reasoning, and an answer without it has an empty block, of other tokens.
OPENED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content }}"
    + _CALLS + "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)  # fmt: skip
_HEADED = "'<|' + message.role + '|>\n'"
WRITTEN = {
    "marked": MARKED,
    "always prompted": ALWAYS_PROMPTED,
    "opened": OPENED,
    "reasoning": ct.CHATML_REASONING,
    **{name: family.template for name, family in ct.FAMILIES.items() if name != "glm"},  # it ends no answer
}
WITHOUT_AN_END, _ = tokenizer_for(turns(_HEADED, ""))
WITH_A_TEXT_FOR_AN_END, _ = tokenizer_for(turns(_HEADED, "@END@\n"))
SOUND, _ = tokenizer_for(ct.CHATML)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", WRITTEN)
def test_a_template_that_does_as_it_prompts_has_no_note(name: str) -> None:
    thinking, calling = chat("q", "a"), chat("q", "")
    thinking["messages"][1]["reasoning_content"] = "why"
    calling["messages"][1]["tool_calls"] = [{"name": "f", "arguments": {"x": "y"}}]
    given = [ROW, chat("q", "a")] + [thinking, calling] * (name in ("marked", "opened", "reasoning"))
    noted = {"qwen3": {"empty_reasoning": 2}, "opened": {"empty_reasoning": 3}}.get(name, {})
    assert filter_rows(given, tokenizer_for(WRITTEN[name])[0])[1] == {"kept": len(given), **noted}


# --- which ranks warn -------------------------------------------------------------------------------------


@pytest.fixture(params=["0", "1"])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RANK", request.param)
    return request.param


def _warned(call: Any) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return len(caught)


def test_rank_0_alone_warns(rank: str, tmp_path: Path) -> None:
    for call in (
        lambda: filter_rows([ROW], WITHOUT_AN_END),
        lambda: fs.encode_chat(ROW, WITH_A_TEXT_FOR_AN_END),
        lambda: fs.SFTCollator(WITHOUT_AN_END, max_length=8)([ROW]),
        lambda: fs.encode_dataset([ROW], WITHOUT_AN_END, max_length=99, cache_dir=tmp_path),
        lambda: fs.encode_dataset([ROW], WITHOUT_AN_END, max_length=99, cache_dir=tmp_path),  # opened
    ):
        assert (_warned(call) > 0) is (rank == "0")


def _heard(rows: list[Any], tokenizer: Any, max_length: int = 99) -> list[int]:
    """How many warnings a collator gives in workers of a loader, at most two, for each row."""
    collate = fs.SFTCollator(tokenizer, max_length=max_length)
    options: Any = {"num_workers": min(2, len(rows)), "multiprocessing_context": "fork"}
    return list(DataLoader(rows, collate_fn=lambda batch: _warned(lambda: collate(batch)), **options))


def test_a_worker_of_a_data_loader_warns_on_rank_0_alone(rank: str) -> None:
    (number,) = _heard([chat("q", "a")], WITH_A_TEXT_FOR_AN_END)
    assert (number > 0) is (rank == "0")


def test_a_collator_warns_once_that_no_answer_ends() -> None:
    collate = fs.SFTCollator(WITHOUT_AN_END, max_length=99)
    few = [fs.encode_chat(ROW, WITHOUT_AN_END), *[fs.encode_chat(ROW, SOUND)] * 2]
    assert [_warned(lambda rows=rows: collate(rows)) for rows in (few, [ROW], [ROW])] == [0, 1, 0]
    assert sum(_heard([ROW] * 4, WITHOUT_AN_END)) == 1


def test_any_worker_warns_of_an_answer_that_is_cut_off() -> None:
    assert _heard([chat("q", "a"), chat("q", "a", "q" * 90, "b")], SOUND, max_length=60) == [0, 1]


@pytest.mark.parametrize(
    ("row", "options", "warned"),
    [
        (ROW, {}, True),
        ({"text": "a text"}, {}, True),
        (ROW, {"max_length": 6}, True),
        (ROW, {"max_length": 5}, False),
    ],
)
def test_rows_longer_than_the_model(
    row: Any, options: Any, warned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    own, _ = tokenizer_for(ct.CHATML)
    own.model_max_length = 5
    fs.encode_chat(row, own, **options)
    assert ("longer than the specified maximum sequence length" in caplog.text) is warned
