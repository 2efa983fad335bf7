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
WITHOUT_AN_END = turns(_HEADED, "")
WITH_A_TEXT_FOR_AN_END = turns(_HEADED, "@END@\n")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", WRITTEN)
def test_a_template_that_does_as_it_prompts_has_no_note(name: str) -> None:
    own, _ = tokenizer_for(WRITTEN[name])
    thinking = chat("q", "a")
    thinking["messages"][1]["reasoning_content"] = "why"
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": "y"}}]}
    calling = {"messages": [*chat("q")["messages"], call]}
    given = [ROW, chat("q", "a")] + [thinking, calling] * (name in ("marked", "opened", "reasoning"))
    _, counts = filter_rows(given, own)
    expected = {"qwen3": {"empty_reasoning": 2}, "opened": {"empty_reasoning": 3}}
    assert counts == {"kept": len(given), **expected.get(name, {})}


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
    own, _ = tokenizer_for(WITHOUT_AN_END)
    other, _ = tokenizer_for(WITH_A_TEXT_FOR_AN_END)
    cut = fs.SFTCollator(own, max_length=8)
    for call in (
        lambda: filter_rows([ROW], own),
        lambda: fs.encode_chat(ROW, other),
        lambda: cut([ROW]),
        lambda: fs.encode_dataset([ROW], own, max_length=99, cache_dir=tmp_path),
        lambda: fs.encode_dataset([ROW], own, max_length=99, cache_dir=tmp_path),  # opened
    ):
        assert (_warned(call) > 0) is (rank == "0")


class _Heard:
    """A collator that returns how many warnings another gives."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, rows: Any) -> int:
        return _warned(lambda: self.collate(rows))


def test_a_worker_of_a_data_loader_warns_on_rank_0_alone(rank: str) -> None:
    own, _ = tokenizer_for(WITH_A_TEXT_FOR_AN_END)
    loader = DataLoader(
        [chat("q", "a")], collate_fn=_Heard(fs.SFTCollator(own, max_length=99)), num_workers=1,
        multiprocessing_context="fork",
    )  # fmt: skip
    assert (next(iter(loader)) > 0) is (rank == "0")


def test_a_collator_warns_once_that_no_answer_ends() -> None:
    own, _ = tokenizer_for(WITHOUT_AN_END)
    ended, _ = tokenizer_for(ct.CHATML)
    collate = fs.SFTCollator(own, max_length=99)
    few = [fs.encode_chat(ROW, own), *[fs.encode_chat(ROW, ended)] * 2]
    assert [_warned(lambda rows=rows: collate(rows)) for rows in (few, [ROW], [ROW])] == [0, 1, 0]
    heard = _Heard(fs.SFTCollator(own, max_length=99))
    loader = DataLoader([ROW] * 4, collate_fn=heard, num_workers=2, multiprocessing_context="fork")
    assert sum(loader) == 1


def test_any_worker_warns_of_an_answer_that_is_cut_off() -> None:
    own, _ = tokenizer_for(ct.CHATML)
    short, long = chat("q", "a"), chat("q", "a", "q" * 90, "b")
    heard = _Heard(fs.SFTCollator(own, max_length=60))
    loader = DataLoader([short, long], collate_fn=heard, num_workers=2, multiprocessing_context="fork")
    assert list(loader) == [0, 1]


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
