"""Reasoning on and off, named row formats, conversational prompts, and the page that shows a batch."""

import html
import re
from typing import Any

import pytest
import torch

from fsdp_sft import IGNORE_INDEX, SFTCollator, encode_chat, filter_rows, render_labels_html
from fsdp_sft.collate import template
from tests.harness import chat_templates as ct
from tests.harness.chats import TOKENIZERS, chat, shown

CHATML = TOKENIZERS["chatml"]


def answer(content: Any, **fields: Any) -> dict[str, Any]:
    row = chat("q", "")
    row["messages"][1] |= {"content": content, **fields}
    return row


# --- reasoning --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        (answer("<think>\nhm\n</think>\n\nyes"), "<think>\nhm\n</think>\n\n⟦yes<|im_end|>⟧\n"),
        (answer("<think>hm <b>x</b></think>a</think>"), "⟦a</think><|im_end|>⟧\n"),
        (answer("hm</think>\n\nyes"), "⟦yes<|im_end|>⟧\n"),
        (answer("yes"), "<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"),
        (answer("say <b>no</b> to it"), "<|im_start|>assistant\n⟦say <b>no</b> to it<|im_end|>⟧\n"),
    ],
    ids=["tags", "a second closing tag", "opened by the prompt", "none", "other tags"],
)
def test_reasoning_in_the_content(row: dict[str, Any], trained: str) -> None:
    assert shown(row, CHATML, train_reasoning=False).endswith(trained)
    assert shown(row, CHATML).endswith("assistant\n⟦" + row["messages"][1]["content"] + "<|im_end|>⟧\n")


@pytest.mark.parametrize(
    ("row", "thought", "trained"),
    [
        (answer("yes", reasoning_content="h[0] < 2"), "h[0] < 2\n</think>\n\n", "yes"),
        (
            answer([{"type": "reasoning", "value": "hm"}, {"type": "text", "value": "yes"}]),
            "hm\n</think>\n\n",
            "yes",
        ),
        (answer("", reasoning_content="hm"), "hm\n</think>\n\n", ""),
        (
            answer("", reasoning_content="hm", tool_calls=[{"name": "f", "arguments": {"x": "y"}}]),
            "hm\n</think>\n\n\n",
            '<tool_call>\n{"name": "f", "arguments": {"x": "y"}}\n</tool_call>',
        ),
    ],
    ids=["a field", "parts", "alone", "in front of a call"],
)
def test_reasoning_in_a_field(row: dict[str, Any], thought: str, trained: str) -> None:
    options: dict[str, Any] = {"chat_template": ct.CHATML_REASONING}
    assert shown(row, CHATML, **options, train_reasoning=False).endswith(
        f"<|im_start|>assistant\n<think>\n{thought}⟦{trained}<|im_end|>⟧\n"
    )
    assert shown(row, CHATML, **options).endswith(f"assistant\n⟦<think>\n{thought}{trained}<|im_end|>⟧\n")


def test_reasoning_that_is_not_printed_changes_nothing() -> None:
    own = TOKENIZERS["qwen3"]
    row = chat("q", "<think>\nold\n</think>\n\nb", "q", "<think>\nnew\n</think>\n\nd")
    text = shown(row, own, train_reasoning=False)
    assert "<|im_start|>assistant\n⟦b<|im_end|>⟧\n" in text
    assert text.endswith("<|im_start|>assistant\n<think>\nnew\n</think>\n\n⟦d<|im_end|>⟧\n")
    # What the template prints by itself is not reasoning.
    assert shown(answer("d"), own, train_reasoning=False) == shown(answer("d"), own)


def test_an_answer_of_reasoning_alone_trains_its_end() -> None:
    only = answer("<think>hm</think>")
    labels = SFTCollator(CHATML, max_length=999, train_reasoning=False)([only])["labels"]
    assert CHATML.decode(labels[labels != IGNORE_INDEX]) == "<|im_end|>"
    assert filter_rows([only, answer("a")], CHATML, train_reasoning=False)[1] == {"kept": 2}


# --- prompts ---------------------------------------------------------------------------------------------


def test_prompts_and_completions_of_messages() -> None:
    """As TRL has them: answers in the prompt are context, those of the completion are trained."""
    *messages, late = chat("q", "early", "again", "late")["messages"]
    assert shown({"prompt": messages, "completion": [late]}, CHATML) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nearly<|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n⟦late<|im_end|>⟧\n"
    )
    with pytest.raises(ValueError, match=r"prompt/completion \(assistant side\) must be a string"):
        encode_chat({"prompt": "q", "completion": messages}, CHATML)


# --- the page ---------------------------------------------------------------------------------------------


def texts_of(page: str) -> list[str]:
    """Text of the rows of a page, with ⟦ and ⟧ for the marks."""
    assert not re.search("<(?:script|link|img)", page)
    rows = re.findall("<pre>(.*?)</pre>", page, re.DOTALL)
    bare = [re.sub("<i>.*?</i>", "", row).replace("<mark>", "⟦").replace("</mark>", "⟧") for row in rows]
    assert not any("<" in row for row in bare)
    return [html.unescape(row) for row in bare]


def test_the_page_shows_what_the_terminal_shows() -> None:
    rows = [answer("<script>alert(1)</script> & 日本🙂\n"), answer("b"), answer("{braces} and &amp;")]
    batch = SFTCollator(CHATML, max_length=999)(rows)
    page = render_labels_html(CHATML, **batch, title="A <title>")
    assert texts_of(page) == [shown(row, CHATML) for row in rows]
    targets, tokens = int((batch["labels"] != IGNORE_INDEX).sum()), int(batch["attention_mask"].sum())
    assert f"3 rows, {tokens} tokens, {targets} of them targets ({targets / tokens:.1%})" in page
    assert "<h1>A &lt;title&gt;</h1>" in page
    unmasked = render_labels_html(CHATML, batch["input_ids"], batch["labels"])
    assert ["&lt;pad&gt;" in one for one in (page, unmasked)] == [False, True]


def test_the_page_refuses_what_is_not_a_batch() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    for labels, mask, says in (
        (ids[:1], None, "zip"),
        (ids + 1, None, "each label must be -100"),
        (ids, ids[:, :2], "zip"),
    ):
        with pytest.raises(ValueError, match=says):
            render_labels_html(CHATML, ids, labels, attention_mask=mask)
    assert "0 rows, 0 tokens" in render_labels_html(CHATML, [], [])


# --- speed that must not show -----------------------------------------------------------------------------


def test_a_skeleton_that_is_out_of_date_is_rendered_anew() -> None:
    tokenizer = ct.byte_tokenizer("chatml")
    expected = shown(answer("a"), tokenizer)
    (known,) = (one.skeletons for one in template._KNOWN[tokenizer].values())
    for one in known.values():
        one.literals[0] = "Today is another day. " + one.literals[0]
    assert shown(answer("b"), tokenizer) == expected.replace("⟦a", "⟦b")
    assert not any("another day" in one.literals[0] for one in known.values())
