"""Options, batches, filtering and rendering of chats."""

import pickle
import re
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from fsdp_sft import (
    IGNORE_INDEX,
    ChatTemplateError,
    EncodedChat,
    SFTCollator,
    encode_chat,
    encode_dataset,
    filter_rows,
    render_labels,
)
from tests.harness import chat_templates as ct
from tests.harness.chats import TOKENIZERS, chat, marks, shown
from tests.harness.packs import assert_same
from tests.harness.places import ROOT

CHATML = TOKENIZERS["chatml"]


def bare(text: str) -> str:
    return text.replace("⟦", "").replace("⟧", "")


@pytest.mark.parametrize(
    ("train_on", "trained"), [("last", "d"), ({"user", "assistant"}, "abcd"), ({"system"}, "s")]
)
def test_train_on(train_on, trained):
    found = shown(chat(("system", "s"), "a", "b", "c", "d"), train_on=train_on)
    assert re.findall("⟦(.*?)⟧", found) == [f"{letter}<|im_end|>" for letter in trained]


def test_train_on_all():
    row = chat(("system", "s"), "a", "b", "c", "d")
    assert shown(row, train_on="all") == "⟦" + bare(shown(row)) + "⟧"


@pytest.mark.parametrize(
    ("key", "off", "on"), [("train", False, True), ("weight", 0, 1), ("loss_weight", 0.0, 1.0)]
)
def test_messages_can_be_switched_off(key, off, on):
    row = chat("a", "b", "c", "d")
    row["messages"][1][key], row["messages"][3][key] = off, on
    text = shown(row)
    assert "b<|im_end|>" in text
    assert re.findall("⟦(.*?)⟧", text) == ["d<|im_end|>"]
    with pytest.raises(ValueError, match='"all" trains every token, and message 1 is not to be trained'):
        shown(row, train_on="all")
    row["messages"][3][key] = off
    assert encode_chat(row, CHATML, train_on="last").num_targets == 0


@pytest.mark.parametrize("key", ["weight", "loss_weight", "train", "loss", "loss_scale"])
@pytest.mark.parametrize("value", [-1, "1", float("nan"), float("inf"), [1], 0.25, 2])
def test_flags_that_say_neither_yes_nor_no_are_refused(key, value):
    row = chat("a", "b")
    row["messages"][1][key] = value
    with pytest.raises(ValueError, match=rf"{key} says whether it is trained and must be 0 or 1"):
        encode_chat(row, CHATML)


def test_truncation():
    tokenizer, row = CHATML, chat("a", "hello", "b", "c")
    whole = encode_chat(row, tokenizer)
    cut = marks(whole).index(True) + 2
    right = encode_chat(row, tokenizer, max_length=cut)
    left = encode_chat(row, tokenizer, max_length=len(whole.input_ids) - cut, truncation="left")
    for part, kept in ((right, slice(cut)), (left, slice(cut, None))):
        assert (part.input_ids, part.labels) == (whole.input_ids[kept], whole.labels[kept])
    # The first token on the left is a target without anything in front of it, so the shift takes it away.
    assert left.labels[0] != IGNORE_INDEX
    assert (right.num_targets, left.num_targets) == (2, whole.num_targets - 3)
    assert encode_chat(row, tokenizer, max_length=len(whole.input_ids), truncation="error") == whole
    with pytest.raises(ValueError, match=r"max_length is 5; raise max_length, drop the row"):
        encode_chat(row, tokenizer, max_length=5, truncation="error")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_on": "answer"}, "train_on must be one of 'assistant', 'last', 'all', got 'answer'"),
        ({"train_on": {"model"}}, r"train_on must be a set of roles out of .*got \{'model'\}"),
        ({"train_on": set()}, "train_on must be a set of roles"),
        ({"max_length": 0}, "max_length must be an integer of at least 1, got 0"),
        ({"max_length": True}, "max_length must be an integer"),
        ({"truncation": "middle"}, "truncation must be one of 'right', 'left', 'error', got 'middle'"),
        ({"empty_reasoning": "error"}, "empty_reasoning must be one of 'mask', 'train', got 'error'"),
        ({"on_dropped": "ignore"}, "on_dropped must be one of 'error', 'count', got 'ignore'"),
        ({"train_reasoning": "no"}, "train_reasoning must be one of True, False"),
        ({"train_on": "all", "train_reasoning": False}, 'contradicts train_on="all"'),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of must be an integer of at least 1, got 0"),
        ({"train_no": "all"}, "train_no=: do you mean train_on"),
    ],
)
def test_options_are_checked_before_any_row_is_read(options, message, tmp_path):
    unread, error = map(pytest.fail, ["a row was read"]), TypeError if "train_no" in options else ValueError
    calls = [
        lambda: SFTCollator(CHATML, **{"max_length": 8, **options}),
        lambda: filter_rows(unread, CHATML, **options),
        lambda: encode_dataset([None], CHATML, cache_dir=tmp_path, **{"max_length": 8, **options}),
        lambda: encode_chat(chat("a", "b"), CHATML, **options),  # Python itself refuses other names
    ]
    for call in calls[:1] if "pad_to_multiple_of" in options else calls[: 3 if error is TypeError else 4]:
        with pytest.raises(error, match=message):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "has no chat template"),
        ("{% for message in messages %}\n{{ message.content", "does not parse: line 2"),
    ],
)
def test_a_template_that_takes_no_row_is_one_error_and_no_row_is_to_blame(template, says, tmp_path):
    own = ct.byte_tokenizer("chatml")
    own.chat_template = template  # None, too
    rows, page = [chat("q", "a")] * 20, (ROOT / "docs/how-to/train-on-your-chat-data.md").read_text()
    for calls in (
        lambda: filter_rows(rows, own, on_error="count"),
        lambda: filter_rows(rows, own),
        lambda: encode_dataset(rows, own, max_length=99, cache_dir=tmp_path),
        lambda: SFTCollator(own, max_length=99)(rows),
    ):
        with pytest.raises(
            ChatTemplateError, match=f"^(the chat template of )?TokenizersBackend.* {says}"
        ) as error:
            calls()
        assert str(error.value).partition('the page "')[2].partition('"')[0] == page.partition("\n")[0][2:]
    encoded = [encode_chat(rows[0], CHATML)]
    assert filter_rows(encoded, own)[1] == {"kept": 1}
    assert len(encode_dataset(encoded, own, max_length=99, cache_dir=tmp_path)) == 1
    assert filter_rows(rows, own, chat_template=ct.CHATML)[1] == {"kept": 20}


def test_tokenizers_that_cannot_be_used_are_refused():
    own, row = ct.byte_tokenizer("chatml"), chat("a", "b")
    own.chat_template = None
    assert encode_chat(row, own, chat_template=ct.CHATML) == encode_chat(row, CHATML)

    class Slow(PreTrainedTokenizerFast):
        is_fast = property(lambda self: False)

    with pytest.raises(ValueError, match="gives no character offsets"):
        encode_chat(row, Slow(tokenizer_object=own.backend_tokenizer), chat_template=ct.CHATML)


def test_named_templates_and_a_template_for_tools():
    tokenizer = ct.byte_tokenizer("chatml")
    tokenizer.chat_template = {"default": ct.ZEPHYR, "tool_use": ct.CHATML}
    assert "<|assistant|>" in shown(chat("a", "b"), tokenizer)
    assert "<|im_start|>" in shown(chat("a", "b") | {"tools": [{"name": "f"}]}, tokenizer)
    assert "<|im_start|>" in shown(chat("a", "b"), tokenizer, chat_template="tool_use")


ROWS = [chat("a", "hello"), chat("only a question"), chat("b", "c", "d", "e")]


@pytest.mark.parametrize("multiple", [None, 1, 8, 45])
@pytest.mark.parametrize("pad_token", ["<|im_end|>", "<pad>", None])
def test_batches_are_padded_by_length(multiple, pad_token):
    tokenizer = ct.byte_tokenizer("chatml-eos", pad_token=pad_token)
    batch = SFTCollator(tokenizer, max_length=45, pad_to_multiple_of=multiple)(ROWS)
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    encoded = [encode_chat(row, tokenizer, max_length=45) for row in ROWS]
    length = -(-max(len(item.input_ids) for item in encoded) // (multiple or 1)) * (multiple or 1)
    for key, values, filler in (
        ("input_ids", [item.input_ids for item in encoded], tokenizer.pad_token_id or 0),
        ("labels", [item.labels for item in encoded], IGNORE_INDEX),
        ("attention_mask", [[1] * len(item.input_ids) for item in encoded], 0),
    ):
        assert batch[key].dtype == torch.int64
        assert batch[key].tolist() == [value + [filler] * (length - len(value)) for value in values]
    assert (batch["labels"][1] == IGNORE_INDEX).all(), "a row without a target stays a row"
    assert (batch["labels"][0] == tokenizer.eos_token_id).sum() == 1, "the real end-of-turn token is trained"


def test_the_collator_takes_encoded_rows_and_survives_pickling():
    collator = pickle.loads(pickle.dumps(SFTCollator(CHATML, max_length=30, train_on="last")))
    encoded = [encode_chat(row, CHATML, train_on="last") for row in ROWS]
    for rows in (encoded, [{"input_ids": item.input_ids, "labels": item.labels} for item in encoded]):
        assert_same(collator(rows), collator(ROWS))


def test_filter_rows_counts_by_reason():
    off, silent = chat("a", "b"), chat("a" * 100, "b")
    off["messages"][1]["train"] = False
    encoded = EncodedChat([1, 2], [IGNORE_INDEX] * 2)
    rows = [*ROWS, off, silent, encoded, {"input_ids": [1, 2], "labels": [1, IGNORE_INDEX]}]
    kept, counts = filter_rows(rows, CHATML, max_length=80)
    assert (kept, counts) == ([ROWS[0], ROWS[2]], {"kept": 2, "no_target": 4, "truncated_away": 1})
    counts = filter_rows([chat("a", ""), chat("a", "b")], TOKENIZERS["glm"])[1]
    assert counts == {"kept": 1, "no_target": 1, "no_end_of_turn": 1}
    counts = filter_rows([*ROWS, chat(("system", "s"), "b")], CHATML, train_on={"system"})[1]
    assert counts == {"kept": 1, "no_target": 3}


SILENT = chat("a", "b")
SILENT["messages"][1]["reasoning"] = "c"


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([chat("a", "b"), chat(("bot", "x"))], ValueError, r"row 1: messages\[0\] has the role 'bot'"),
        ([chat("a", "b"), SILENT], ChatTemplateError, r"row 1: the chat template of .* does not print"),
        ([ROWS[1]], ValueError, r"no row has a target; .*counted \{'kept': 0, 'no_target': 1\}"),
        ([], ValueError, "no row has a target"),
    ],
)
def test_filter_rows_names_a_malformed_row_and_refuses_to_keep_nothing(rows, error, message):
    with pytest.raises(error, match=message):
        filter_rows(rows, CHATML)


def test_render_labels():
    encoded = encode_chat(chat("é", "日本🙂"), CHATML)
    plain = render_labels(CHATML, encoded.input_ids, encoded.labels, color=False)
    assert plain == "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n⟦日本🙂<|im_end|>⟧\n"
    colored = render_labels(CHATML, torch.tensor(encoded.input_ids), torch.tensor(encoded.labels))
    assert "\x1b[32;4m日本🙂<|im_end|>\x1b[0m\x1b[2m\n\x1b[0m" in colored
    split = [label if index % 2 else IGNORE_INDEX for index, label in enumerate(encoded.input_ids)]
    assert bare(render_labels(CHATML, encoded.input_ids, split, color=False)) == bare(plain)
    escaped = encode_chat(chat("\x1b[2J", "b"), CHATML)
    assert "\x1b[2J" not in render_labels(CHATML, escaped.input_ids, escaped.labels)
    assert render_labels(CHATML, [], []) == ""


@pytest.mark.parametrize("labels", [[IGNORE_INDEX], [1, 1], [IGNORE_INDEX, 5]])
def test_render_labels_refuses_labels_of_something_else(labels):
    with pytest.raises(ValueError, match="each label must be -100 or the id at its position"):
        render_labels(CHATML, [3, 4], labels)


@pytest.mark.parametrize(
    ("ids", "labels", "says"),
    [
        ([1, 1 << 70], [1, 2], "must be"),
        ([1, 2], [1, -(1 << 70)], "must be"),
        ([1, 2.5], [1, 2], "must be"),
        ([1, None], [1, 2], "must be"),
        ([1, 2, 3], [1, 2], "one length"),
    ],
    ids=range(5),
)
def test_encoded_rows_that_no_batch_can_hold(ids, labels, says):
    collate = SFTCollator(CHATML, max_length=8)
    for one in ({"input_ids": ids, "labels": labels}, EncodedChat(ids, labels)):
        with pytest.raises(ValueError, match=says):
            collate([one])


# --- variables of the template: of a row, of a data set; in the probe as in the rendering -------------------

# The prompt opens a think block, or writes an empty one, which the answer then has as well.
TEMPLATE = (
    "{{ '[' + (date or 'no date') + ']' }}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think></think>' }}{% endif %}{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)


@pytest.fixture
def own() -> Any:
    return ct.byte_tokenizer("chatml", template=TEMPLATE)


def with_variables(**variables: Any) -> dict[str, Any]:
    return {**chat("q", "a"), "chat_template_kwargs": variables}


def test_variables_of_the_row_go_before_those_of_the_call(own: Any) -> None:
    row, today = with_variables(date="now", enable_thinking=None), {"date": "today"}
    assert shown(chat("q", "a"), own).startswith("[no date]")
    assert shown(chat("q", "a"), own, chat_template_kwargs=today).startswith("[today]")
    assert shown(row, own, chat_template_kwargs=today).startswith("[now]")
    assert own.decode(encode_chat(row, own).input_ids) == own.apply_chat_template(
        row["messages"], tokenize=False, date="now"
    )


def test_what_the_prompt_writes_with_them_is_not_trained(own: Any) -> None:
    silent = shown(with_variables(enable_thinking=False), own)
    assert shown(chat("q", "a"), own).endswith("assistant\n⟦a<|im_end|>⟧\n")
    assert silent.endswith("assistant\n<think></think>⟦a<|im_end|>⟧\n")
    assert shown(chat("q", "a"), own, chat_template_kwargs={"enable_thinking": False}) == silent


def test_rows_of_one_batch_may_have_their_own(own: Any) -> None:
    rows = [with_variables(date=str(day)) for day in range(3)]
    batch = SFTCollator(own, max_length=99)(rows)
    assert [own.decode(ids)[:3] for ids in batch["input_ids"]] == ["[0]", "[1]", "[2]"]
    of_all = SFTCollator(own, max_length=99, chat_template_kwargs={"date": "7"})([chat("q", "a")])
    assert own.decode(of_all["input_ids"][0]).startswith("[7]")
    assert filter_rows(rows, own, chat_template_kwargs={"date": "7"})[0] == rows


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
def test_names_that_come_from_elsewhere_are_refused(given: Any, says: str, own: Any) -> None:
    for call in (
        lambda: encode_chat(chat("q", "a"), own, chat_template_kwargs=given),
        lambda: encode_chat({**chat("q", "a"), "chat_template_kwargs": given}, own),
        lambda: SFTCollator(own, max_length=9, chat_template_kwargs=given)([chat("q", "a")]),
    ):
        with pytest.raises(ValueError, match=says):
            call()


NEEDS_TOOLS = (
    "{% for tool in tools %}{{ tool.function.name + '\n' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_template_that_takes_no_conversation_without_tools() -> None:
    row = {**chat("q", "a"), "tools": [{"name": "f", "parameters": {}}]}
    needing = ct.byte_tokenizer("chatml", template=NEEDS_TOOLS)
    assert shown(row, needing).endswith("assistant\n⟦a<|im_end|>⟧\n")
