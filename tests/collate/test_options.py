"""Reasoning on and off, named row formats, conversational prompts, and the page that shows a batch."""

import html
import re
from typing import Any

import pytest
import torch

from fsdp_sft import IGNORE_INDEX, SFTCollator, encode_chat, filter_rows, render_labels, render_labels_html
from tests.harness import chat_templates as ct

QWEN3 = ct.byte_tokenizer("qwen3")
CHATML = ct.byte_tokenizer("chatml")


def shown(row: dict[str, Any], tokenizer: Any, **options: Any) -> str:
    encoded = encode_chat(row, tokenizer, **options)
    return render_labels(tokenizer, encoded.input_ids, encoded.labels, color=False)


def answer(content: str, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": content, **fields}]
    }


# --- reasoning --------------------------------------------------------------------------------------------

CALL = {"name": "f", "arguments": {"x": "y"}}


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
    whole = shown(row, CHATML)
    assert whole.endswith("assistant\n⟦" + row["messages"][1]["content"] + "<|im_end|>⟧\n")


def test_reasoning_in_a_field() -> None:
    options = {"chat_template": ct.CHATML_REASONING, "train_reasoning": False}
    row = answer("yes", reasoning_content="h[0] < 2")
    assert shown(row, CHATML, **options).endswith(
        "assistant\n<think>\nh[0] < 2\n</think>\n\n⟦yes<|im_end|>⟧\n"
    )
    parts = answer([{"type": "reasoning", "value": "hm"}, {"type": "text", "value": "yes"}])  # type: ignore[arg-type]
    assert shown(parts, CHATML, **options).endswith("assistant\n<think>\nhm\n</think>\n\n⟦yes<|im_end|>⟧\n")
    silent = answer("", reasoning_content="hm")
    assert shown(silent, CHATML, **options).endswith("<think>\nhm\n</think>\n\n⟦<|im_end|>⟧\n")


def test_reasoning_in_front_of_a_tool_call() -> None:
    row = answer("", reasoning_content="hm", tool_calls=[CALL])
    text = shown(row, CHATML, chat_template=ct.CHATML_REASONING, train_reasoning=False)
    whole = shown(row, CHATML, chat_template=ct.CHATML_REASONING)
    thought = "<think>\nhm\n</think>\n\n\n"
    head, _, calls = text.partition(f"{thought}⟦")
    assert head.endswith("<|im_start|>assistant\n")
    assert '"x"' in calls
    assert calls.endswith("<|im_end|>⟧\n")
    assert whole == f"{head}⟦{thought}{calls}"


def test_reasoning_that_is_not_printed_changes_nothing() -> None:
    turns = ["<think>\nold\n</think>\n\nb", "<think>\nnew\n</think>\n\nd"]
    messages = []
    for turn in turns:
        messages += answer(turn)["messages"]
    text = shown({"messages": messages}, QWEN3, train_reasoning=False)
    assert "<|im_start|>assistant\n⟦b<|im_end|>⟧\n" in text
    assert text.endswith("<|im_start|>assistant\n<think>\nnew\n</think>\n\n⟦d<|im_end|>⟧\n")
    # What the template prints by itself is not reasoning.
    assert shown(answer("d"), QWEN3, train_reasoning=False) == shown(answer("d"), QWEN3)


def test_reasoning_options() -> None:
    with pytest.raises(ValueError, match="train_reasoning must be one of True, False"):
        encode_chat(answer("a"), CHATML, train_reasoning="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='contradicts train_on="all"'):
        SFTCollator(CHATML, max_length=9, train_on="all", train_reasoning=False)
    only = answer("<think>hm</think>")
    collator = SFTCollator(CHATML, max_length=999, train_reasoning=False)
    labels = collator([only])["labels"]
    assert CHATML.decode(labels[labels != IGNORE_INDEX]) == "<|im_end|>"
    kept, counts = filter_rows([only, answer("a")], CHATML, train_reasoning=False)
    assert (len(kept), counts) == (2, {"kept": 2})


# --- prompts ---------------------------------------------------------------------------------------------


def test_prompts_and_completions_of_messages() -> None:
    """As TRL has them: answers in the prompt are context, those of the completion are trained."""
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "early"},
        {"role": "user", "content": "again"},
    ]
    row = {"prompt": messages, "completion": [{"role": "assistant", "content": "late"}]}
    assert shown(row, CHATML) == (
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
    targets = int((batch["labels"] != IGNORE_INDEX).sum())
    tokens = int(batch["attention_mask"].sum())
    assert f"3 rows, {tokens} tokens, {targets} of them targets ({targets / tokens:.1%})" in page
    assert "<h1>A &lt;title&gt;</h1>" in page
    unmasked = render_labels_html(CHATML, batch["input_ids"], batch["labels"])
    assert "&lt;pad&gt;" in unmasked
    assert "&lt;pad&gt;" not in page


def test_the_page_refuses_what_is_not_a_batch() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="zip"):
        render_labels_html(CHATML, ids, ids[:1])
    with pytest.raises(ValueError, match="each label must be -100"):
        render_labels_html(CHATML, ids, ids + 1)
    with pytest.raises(ValueError, match="zip"):
        render_labels_html(CHATML, ids, ids, attention_mask=ids[:, :2])
    assert "0 rows, 0 tokens" in render_labels_html(CHATML, [], [])


# --- speed that must not show -----------------------------------------------------------------------------


def test_a_skeleton_that_is_out_of_date_is_rendered_anew() -> None:
    from fsdp_sft.collate import template

    tokenizer = ct.byte_tokenizer("chatml")
    expected = shown(answer("a"), tokenizer)
    (known,) = (one.skeletons for one in template._KNOWN[tokenizer].values())
    for key, (texts, numbers) in known.items():
        known[key] = (["Today is another day. " + texts[0], *texts[1:]], numbers)
    assert shown(answer("b"), tokenizer) == expected.replace("⟦a", "⟦b")
    assert not any("another day" in texts[0] for texts, _ in known.values())
