import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from fsdp_sft import _compat
from fsdp_sft.collate import (
    IGNORE_INDEX,
    ChatTemplateError,
    EncodedChat,
    SFTCollator,
    encode_chat,
    filter_rows,
    render_labels,
)
from tests import chat_templates as ct

TOKENIZERS = {name: ct.byte_tokenizer(name) for name in ct.FAMILIES}


def chat(*turns: str | tuple[str, str]) -> dict:
    """A row; bare strings alternate between user and assistant."""
    roles = itertools.cycle(["user", "assistant"])
    pairs = [(next(roles), turn) if isinstance(turn, str) else turn for turn in turns]
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def shown(row: dict, tokenizer=TOKENIZERS["chatml"], **options) -> str:
    encoded = encode_chat(row, tokenizer, **options)
    return render_labels(tokenizer, encoded.input_ids, encoded.labels, color=False)


def marks(encoded: EncodedChat) -> list[bool]:
    assert all(
        label in (IGNORE_INDEX, token) for token, label in zip(encoded.input_ids, encoded.labels, strict=True)
    )
    return [label != IGNORE_INDEX for label in encoded.labels]


def assert_matches_hand_written(name: str, messages: list[dict]) -> None:
    encoded = encode_chat({"messages": messages}, TOKENIZERS[name])
    text, expected = ct.expected_marks(ct.FAMILIES[name].write(messages))
    assert TOKENIZERS[name].decode(encoded.input_ids) == text
    assert marks(encoded) == expected
    assert encoded.num_targets == sum(expected[1:])


# --- which tokens are trained -----------------------------------------------------------------------------

CONVERSATIONS = {
    "one turn": ("hi", "hello"),
    "two turns": ("hi", "hello", "more?", "yes"),
    "ends with the user": ("hi", "hello", "more?"),
    "white space at the edges": ("  hi\n", " \n hello \n\n", "\tmore", "yes "),
    "emoji at the edges": ("🙂hi🙂", "🙂 café 👩‍👩‍👧", "é", "日本"),
    "user says the same": ("hello", "hello", "hello", "hello"),
    "answer inside the question": ("say hello twice", "hello", "hello hello", "hello"),
    "headers in the user's text": (
        "<|im_start|>assistant\nno<|im_end|>\n<|assistant|>\nno</s>[/INST] no <start_of_turn>model\nno",
        "yes",
        "<|start_header_id|>assistant<|end_header_id|>\n\nno<|eot_id|>",
        "yes",
    ),
    "stop token in the answer": ("hi", "a<|im_end|>b</s>c<end_of_turn>d<|eot_id|>e", "more", "f"),
    "empty answer": ("hi", "", "more", "yes"),
    "empty answer at the end": ("hi", "yes", "more", ""),
    "blank answer": ("hi", "  \n", "more", "yes"),
    "empty question": ("", "yes", "", "yes"),
    "template syntax": ("{{ messages }}", "{% generation %}x{% endgeneration %}"),
    "quotes and backslashes": ('a "b" \\n', "c 'd' \\u0041 \"e\""),
}


@pytest.mark.parametrize("name", ct.FAMILIES)
@pytest.mark.parametrize("case", CONVERSATIONS)
def test_labels_are_those_of_the_format_written_by_hand(name, case):
    assert_matches_hand_written(name, chat(*CONVERSATIONS[case])["messages"])


@pytest.mark.parametrize("name", [name for name, family in ct.FAMILIES.items() if family.system])
def test_a_system_message_is_not_trained(name):
    assert_matches_hand_written(name, chat(("system", "hello"), "hi", "hello")["messages"])


PIECES = st.sampled_from([
    "hello", "a", " ", "\n", "\t", "🙂", "é", "\u00a0", "<|im_start|>assistant\n", "<|im_end|>", "[/INST]",
    "</s>", "<|assistant|>\n", "<|user|>", "<|end|>", "<start_of_turn>model\n", "<|eot_id|>", "<think>",
    "</think>", "\n\n", "{{ x }}", '"', "\\",
])  # fmt: skip
CONTENTS = st.lists(PIECES, max_size=5).map("".join)


def may_be_refused(name: str, turns: list[str]) -> bool:
    """A thought without an answer leaves nothing to be found once the template has dropped the thought."""
    return name == "qwen3" and any("</think>" in answer for answer in turns[1::2])


@settings(max_examples=250, deadline=None)
@given(
    st.sampled_from(sorted(ct.FAMILIES)),
    st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=4),
    st.booleans(),
)
def test_random_conversations_match_the_format_written_by_hand(name, pairs, open_ended):
    turns = list(itertools.chain(*pairs))
    turns = turns[:-1] if open_ended else turns
    try:
        assert_matches_hand_written(name, chat(*turns)["messages"])
    except ChatTemplateError:
        assert may_be_refused(name, turns)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(ct.FAMILIES)), st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=3))
def test_merged_tokens_are_trained_if_all_in_front_of_them_is_a_prompt(name, pairs):
    """With merges a token may reach over an edge; the rest follows from the characters."""
    tokenizer, turns = BPE[name], list(itertools.chain(*pairs))
    messages = chat(*turns)["messages"]
    try:
        encoded = encode_chat({"messages": messages}, tokenizer)
    except ChatTemplateError:
        assert may_be_refused(name, turns)
        return
    by_char = [on for piece, on in ct.FAMILIES[name].write(messages) for _ in piece.encode()]
    position = 0
    for token, on in zip(encoded.input_ids, marks(encoded), strict=True):
        text = tokenizer.convert_ids_to_tokens(token)
        width = len(text.encode()) if text in ct.SPECIALS else len(text)
        assert on == by_char[position], (text, position)
        position += width
    assert position == len(by_char)


BPE = {name: ct.bpe_tokenizer(name) for name in ct.FAMILIES}


def test_a_token_over_the_start_is_not_trained():
    tokenizer = BPE["chatml"]
    encoded = encode_chat(chat("hi", "\n\nfine"), tokenizer)
    trained = tokenizer.convert_ids_to_tokens([label for label in encoded.labels if label != IGNORE_INDEX])
    assert "ĊĊ" in tokenizer.convert_ids_to_tokens(encoded.input_ids)
    assert trained == ["Ċ", "fine", "<|im_end|>"]


def test_offsets_that_leave_out_spaces_are_repaired():
    from tokenizers import processors

    plain, trimmed = ct.bpe_tokenizer("llama2"), ct.bpe_tokenizer("llama2")
    trimmed.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    for row in (chat("hello", "hello there"), chat("a  b", "x   y")):
        assert trimmed("hello there", return_offsets_mapping=True)["offset_mapping"][1] == (6, 11)
        assert encode_chat(row, trimmed) == encode_chat(row, plain)
    row = chat("hello", " there")
    plain.chat_template = trimmed.chat_template = ct.ZEPHYR.replace("|>\\n' + message", "|> ' + message")
    assert encode_chat(row, trimmed) == encode_chat(row, plain)


def test_a_stop_token_that_takes_the_white_space_around_it():
    from tokenizers import AddedToken

    tokenizer = ct.byte_tokenizer("phi3")
    tokenizer.add_tokens([AddedToken("<|stop|>", lstrip=True, rstrip=True, special=True)])
    tokenizer.chat_template = ct.PHI3.replace("<|end|>", "<|stop|>")
    encoded = encode_chat(chat("hi", "yes  "), tokenizer)
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    assert [label for label in encoded.labels if label != IGNORE_INDEX] == [
        *tokenizer("yes")["input_ids"],
        stop,
    ]
    without = encode_chat(chat("hi", "yes  "), tokenizer, train_eot=False)
    assert [label for label in without.labels if label != IGNORE_INDEX] == tokenizer("yes")["input_ids"]


def test_an_end_of_turn_token_that_was_added_as_an_ordinary_one():
    tokenizer = ct.byte_tokenizer("chatml")
    tokenizer.add_tokens(["<stop>", "</tool>"])
    tokenizer.chat_template = ct.CHATML.replace("<|im_end|>", "<stop>")
    assert shown(chat("a", "b", "c", "d"), tokenizer).count("⟦b<stop>⟧") == 1


def test_a_token_that_closes_the_answer_in_front_of_the_stop_token():
    tokenizer = ct.byte_tokenizer("chatml-eos")
    tokenizer.chat_template = ct.CHATML.replace("'<|im_end|>\\n'", "'<|end|><|im_end|>\\n'")
    assert "⟦b<|end|><|im_end|>⟧\n" in shown(chat("a", "b", "c", "d"), tokenizer)


def test_thinking_that_the_generation_prompt_opens_is_not_trained():
    tokenizer = ct.byte_tokenizer("chatml-eos")
    tokenizer.chat_template = ct.QWEN3.replace(
        ct._PROMPT, ct._PROMPT.replace("assistant\\n", "assistant\\n<think>\\n")
    )
    text = shown(chat("a", "<think>\nold\n</think>\n\nb", "c", "<think>\nnew\n</think>\n\nd"), tokenizer)
    assert "<|im_start|>assistant\n⟦b<|im_end|>⟧\n" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n⟦new\n</think>\n\nd<|im_end|>⟧\n")


def test_an_empty_think_block_of_the_template_is_trained():
    assert shown(chat("a", "b"), TOKENIZERS["qwen3"]).endswith(
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nb<|im_end|>⟧\n"
    )


def test_tags_leave_out_what_they_do_not_cover():
    tokenizer = ct.byte_tokenizer("chatml")
    tokenizer.chat_template = ct.CHATML_TAGGED.replace(
        "{% generation %}{{ message.content }}",
        "{{ '(note)' }}{% generation %}{{ message.content }}{% endgeneration %}{{ '(note)' }}{% generation %}"
        "{% if message.reasoning_content %}{{ message.reasoning_content }}{% endif %}",
    )
    row = chat("a", "b")
    row["messages"][1]["reasoning_content"] = "why"
    assert shown(row, tokenizer).endswith("(note)⟦b⟧(note)⟦why<|im_end|>⟧\n")


def test_tags_inside_a_macro_are_ignored():
    tokenizer = ct.byte_tokenizer("chatml")
    new = "{{ message.content }}{% endgeneration %}(note){% generation %}{{ message.reasoning_content }}"
    tokenizer.chat_template = ct.CHATML_TAGGED_IN_MACRO.replace("{{ message.content }}", new, 1)
    row = chat("a", "hello there, all of you out there", "a", "general")
    for message in row["messages"][1::2]:
        message["reasoning_content"] = "for a long and winding reason"
    text = shown(row, tokenizer)
    assert "⟦hello there, all of you out there(note)for a long and winding reason<|im_end|>⟧\n" in text
    assert text.endswith("⟦general(note)for a long and winding reason<|im_end|>⟧\n")


@pytest.mark.parametrize("capture", ["macro", "set", None])
def test_tags_that_count_from_elsewhere_do_not_tell_a_start(capture):
    """Without a header only the tag tells where the second answer starts, if its offset can be trusted."""
    tokenizer = ct.byte_tokenizer("chatml")
    body = (
        "{% if message.role == 'assistant' %}(note){% generation %}{{ message.content }}<|im_end|>"
        "{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
    )
    macro = "{% macro turn(message) %}" + body + "{% endmacro %}" if capture == "macro" else ""
    use = {
        "macro": "{{ turn(message) }}",
        "set": "{% set text %}" + body + "{% endset %}{{ text }}",
        None: body,
    }
    first = "{% if not loop.index0 or messages[loop.index0 - 1].role != message.role %}"
    header = first + ct._ROLE + "{% endif %}"
    loop = "{% for message in messages %}" + header + use[capture] + "{% endfor %}"
    tokenizer.chat_template = macro + loop + ct._PROMPT
    row = chat("a", "b", ("assistant", "c"))
    if capture is None:
        assert shown(row, tokenizer).endswith("(note)⟦b<|im_end|>⟧(note)⟦c<|im_end|>⟧")
    else:
        with pytest.raises(ChatTemplateError, match="second assistant message in a row"):
            encode_chat(row, tokenizer)


def test_a_header_quoted_by_the_template_itself():
    tokenizer = ct.byte_tokenizer("chatml")
    tokenizer.chat_template = "{{ 'Write after <|im_start|>assistant\n.' }}" + ct.CHATML
    assert shown(chat("", "b"), tokenizer).endswith("<|im_start|>assistant\n⟦b<|im_end|>⟧\n")


def test_templates_that_depend_on_what_the_user_wrote():
    tokenizer = ct.byte_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% if 'please' in messages[0].content %}{{ '<|user|>polite\\n' }}{% endif %}" + ct.CHATML
    )
    assert "⟦b<|im_end|>⟧" in shown(chat("a, please", "b"), tokenizer)
    # Now the user's own text stays in the second rendering, so it must not look like a header.
    with pytest.raises(ChatTemplateError, match="depends on the message's content"):
        encode_chat(chat("please <|im_start|>assistant\nc", "b"), tokenizer)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("{{ message.content }}", "{{ message.content | upper }}", "does not match the first"),
        ("{{ message.content }}", "{{ message.content }}{{ message.content }}", "exactly once"),
        ("{{ message.content }}", "{{ message.content[:2] }}", "exactly once"),
        ("{{ message.content }}", "{% if message.content != 'b' %}{{ message.content }}{% endif %}", "match"),
        ("{% for message in messages %}", "{% for message in messages[:4] %}", "does not print message 5"),
        (ct._CALLS, "", "leaves out tool calls"),
        (ct._PROMPT, ct._PROMPT + "{% if messages[-1].content == 'f' %}END{% endif %}", "match the first"),
    ],
)
def test_a_template_that_cannot_be_followed_is_refused(old, new, reason):
    tokenizer = ct.byte_tokenizer("chatml", name_or_path="some/model")
    assert old in ct.CHATML
    tokenizer.chat_template = ct.CHATML.replace(old, new)
    row = chat("a", "b", "c", "d", "e", "f")
    if old == ct._CALLS:
        row["messages"][3]["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    with pytest.raises(ChatTemplateError, match=reason) as caught:
        encode_chat(row, tokenizer)
    assert "some/model" in str(caught.value)
    assert "chat_template=" in str(caught.value)


def test_a_second_answer_in_a_row_without_a_header_is_refused():
    tokenizer = ct.byte_tokenizer("chatml")
    tokenizer.chat_template = ct.CHATML.replace(
        ct._ROLE,
        "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != message.role %}"
        + ct._ROLE
        + "{% endif %}",
    )
    with pytest.raises(ChatTemplateError, match="second assistant message in a row"):
        encode_chat(chat("a", "b", ("assistant", "c")), tokenizer)


def test_a_template_that_refuses_the_conversation_names_itself():
    tokenizer = ct.byte_tokenizer("gemma")
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + ct.GEMMA
    )
    with pytest.raises(ChatTemplateError, match="System role not supported; change the row"):
        encode_chat(chat(("system", "s"), "a", "b"), tokenizer)


def test_private_use_characters_of_the_sentinels_are_refused():
    with pytest.raises(ChatTemplateError, match="private-use"):
        encode_chat(chat("a", "\U000f5b010\U000f5b02"), TOKENIZERS["chatml"])


def test_a_long_conversation_takes_as_many_renderings_as_a_short_one(monkeypatch):
    counts, render = [], _compat.render_chat
    monkeypatch.setattr(_compat, "render_chat", lambda *a, **k: counts.append(1) or render(*a, **k))
    for turns in (2, 64):
        counts.clear()
        row = chat(*(f"text {number}" for number in range(turns)))
        encoded = encode_chat(row, TOKENIZERS["chatml"])
        assert len(counts) <= 2 + 3 * (turns == 2), "a probe once, then two renderings"
        assert sum(marks(encoded)) == sum(len(f"text {n}") + 1 for n in range(1, turns, 2))


def test_special_tokens_are_not_added_a_second_time():
    from tokenizers import processors

    tokenizer = ct.byte_tokenizer("llama3")
    bos = ("<|begin_of_text|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[bos]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    assert encode_chat(chat("a", "b"), tokenizer).input_ids.count(tokenizer.bos_token_id) == 1


# --- options ----------------------------------------------------------------------------------------------


def test_train_on():
    row = chat(("system", "s"), "a", "b", "c", "d")
    assert shown(row, train_on="last").count("⟦") == 1
    assert "⟦d<|im_end|>⟧" in shown(row, train_on="last")
    assert shown(row, train_on="all") == "⟦" + shown(row).replace("⟦", "").replace("⟧", "") + "⟧"
    both = shown(row, train_on={"user", "assistant"})
    assert [both.count(f"⟦{text}<|im_end|>⟧") for text in "sabcd"] == [0, 1, 1, 1, 1]
    assert "⟦s<|im_end|>⟧" in shown(row, train_on={"system"})


def test_train_eot():
    text = shown(chat("a", "b \n", "c", "d"), train_eot=False)
    assert "⟦b \n⟧<|im_end|>\n" in text
    assert "⟦d⟧<|im_end|>\n" in text


@pytest.mark.parametrize(
    ("key", "off", "on"), [("train", False, True), ("weight", 0, 1), ("loss_weight", 0.0, 1.0)]
)
def test_messages_can_be_switched_off(key, off, on):
    row = chat("a", "b", "c", "d")
    row["messages"][1][key], row["messages"][3][key] = off, on
    text = shown(row)
    assert "b<|im_end|>" in text
    assert text.count("⟦") == 1
    assert "⟦d<|im_end|>⟧" in text
    assert shown(row, train_on="all").endswith(
        "⟧b<|im_end|>⟦\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n⟧"
    )
    row["messages"][3][key] = off
    assert encode_chat(row, TOKENIZERS["chatml"], train_on="last").num_targets == 0


@pytest.mark.parametrize("weight", [0.5, -1, 2, "1", float("nan")])
def test_other_weights_are_refused(weight):
    row = chat("a", "b")
    row["messages"][1]["weight"] = weight
    with pytest.raises(ValueError, match="weight must be 0 or 1"):
        encode_chat(row, TOKENIZERS["chatml"])


def test_truncation():
    tokenizer, row = TOKENIZERS["chatml"], chat("a", "hello", "b", "c")
    whole = encode_chat(row, tokenizer)
    first = marks(whole).index(True)
    right = encode_chat(row, tokenizer, max_length=first + 2)
    assert (right.input_ids, right.labels) == (whole.input_ids[: first + 2], whole.labels[: first + 2])
    assert right.num_targets == 2
    into_answer = len(whole.input_ids) - first - 2
    left = encode_chat(row, tokenizer, max_length=into_answer, truncation="left")
    assert (left.input_ids, left.labels) == (whole.input_ids[first + 2 :], whole.labels[first + 2 :])
    # The first token is a target without anything in front of it, so the shift takes it away.
    assert left.labels[0] != IGNORE_INDEX
    assert left.num_targets == whole.num_targets - 3
    assert encode_chat(row, tokenizer, max_length=len(whole.input_ids), truncation="error") == whole
    with pytest.raises(ValueError, match=r"max_length is 5; raise max_length, drop the row"):
        encode_chat(row, tokenizer, max_length=5, truncation="error")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_on": "answer"}, "train_on must be one of 'assistant', 'last', 'all', got 'answer'"),
        ({"train_on": {"model"}}, r"train_on must be a set of roles out of .*got \['model'\]"),
        ({"train_on": set()}, "train_on must be a set of roles"),
        ({"train_on": None}, "train_on must be a str or a set of roles, got None"),
        ({"train_eot": 1}, "train_eot must be True or False, got 1"),
        ({"max_length": 0}, "max_length must be an integer of at least 1, got 0"),
        ({"max_length": True}, "max_length must be an integer"),
        ({"truncation": "middle"}, "truncation must be one of 'right', 'left', 'error', got 'middle'"),
        ({"chat_template": 3}, "chat_template must be a Jinja template as a str, got int"),
        ({"padding": "short"}, "padding must be one of 'longest', 'max_length', got 'short'"),
        ({"padding_side": "both"}, "padding_side must be one of 'right', 'left', got 'both'"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of must be an integer of at least 1, got 0"),
    ],
)
def test_options_are_checked_before_any_row_is_seen(options, message):
    with pytest.raises(ValueError, match=message):
        SFTCollator(TOKENIZERS["chatml"], **{"max_length": 8, **options})
    if not {"padding", "padding_side", "pad_to_multiple_of"} & set(options):
        with pytest.raises(ValueError, match=message):
            encode_chat(chat("a", "b"), TOKENIZERS["chatml"], **options)
        with pytest.raises(ValueError, match=message):
            filter_rows([chat("a", "b")], TOKENIZERS["chatml"], **options)


def test_tokenizers_that_cannot_be_used_are_refused():
    bare = ct.byte_tokenizer("chatml")
    bare.chat_template = None
    with pytest.raises(ValueError, match="has no chat template; pass chat_template="):
        encode_chat(chat("a", "b"), bare)
    assert encode_chat(chat("a", "b"), bare, chat_template=ct.CHATML) == encode_chat(
        chat("a", "b"), TOKENIZERS["chatml"]
    )

    class Slow(PreTrainedTokenizerFast):
        is_fast = property(lambda self: False)

    slow = Slow(tokenizer_object=bare.backend_tokenizer)
    slow.chat_template = ct.CHATML
    with pytest.raises(ValueError, match="gives no character offsets"):
        encode_chat(chat("a", "b"), slow)
    with pytest.raises(ValueError, match=r"no padding token; .*tokenizer.pad_token = tokenizer.eos_token"):
        SFTCollator(ct.byte_tokenizer("chatml", pad_token=None), max_length=8)


def test_named_templates_and_a_template_for_tools():
    tokenizer = ct.byte_tokenizer("chatml")
    tokenizer.chat_template = {"default": ct.ZEPHYR, "tool_use": ct.CHATML}
    assert "<|assistant|>" in shown(chat("a", "b"), tokenizer)
    assert "<|im_start|>" in shown(chat("a", "b") | {"tools": [{"name": "f"}]}, tokenizer)
    assert "<|im_start|>" in shown(chat("a", "b"), tokenizer, chat_template="tool_use")


# --- row shapes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
                      {"role": "assistant", "content": [{"type": "text", "value": "b"}],
                       "tool_calls": None}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"instruction": "a", "output": "b"},
        {"instruction": "a", "input": "", "output": "b", "system": "", "history": None},
        {"prompt": "a", "completion": "b"},
    ],
)  # fmt: skip
def test_row_shapes_of_one_conversation(row):
    before = json.dumps(row)
    assert encode_chat(row, TOKENIZERS["chatml"]) == encode_chat(chat("a", "b"), TOKENIZERS["chatml"])
    assert json.dumps(row) == before, "the row is left as it was"


def test_alpaca_with_everything():
    row = {"instruction": "c", "input": "d", "output": "e", "system": "s", "history": [["a", "b"]]}
    assert encode_chat(row, TOKENIZERS["chatml"]) == encode_chat(
        chat(("system", "s"), "a", "b", "c\nd", "e"), TOKENIZERS["chatml"]
    )


CALL = '{"name": "weather", "arguments": {"city": "Oslo \\"x\\"", "days": 3}}'
TOOLS = [{"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}]


def test_sharegpt_with_tools():
    row = {
        "conversations": [
            {"from": "human", "value": "sun?"},
            {"from": "function_call", "value": CALL},
            {"from": "observation", "value": "[INST] sunny <|im_end|>"},
            {"from": "gpt", "value": "yes"},
        ],
        "tools": json.dumps(TOOLS),
        "system": "s",
    }
    text = shown(row)
    tool = {"type": "function", "function": TOOLS[0]}
    assert text == (
        f"<|im_start|>system\n# Tools\n{json.dumps(tool)}\n<|im_end|>\n<|im_start|>system\ns<|im_end|>\n"
        "<|im_start|>user\nsun?<|im_end|>\n"
        f"<|im_start|>assistant\n⟦\n<tool_call>\n{CALL}\n</tool_call><|im_end|>⟧\n"
        "<|im_start|>tool\n[INST] sunny <|im_end|><|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
    )
    assert shown(row | {"tools": TOOLS}) == text
    assert shown(row | {"tools": [tool]}) == text
    # A result of a tool is trained only when asked for.
    assert "⟦[INST] sunny <|im_end|>" in shown(row, train_on={"tool"})


@pytest.mark.parametrize(
    "arguments", ['{"city": "Oslo \\"x\\"", "days": 3}', {"city": 'Oslo "x"', "days": 3}]
)
def test_openai_tool_calls(arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "sun?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": "I look", "tool_calls": [{"function": {"name": "noargs"}}]},
    ]
    text = shown({"messages": messages})
    assert f"⟦\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call><|im_end|>⟧\n" in text
    assert text.endswith(
        '⟦I look\n<tool_call>\n{"name": "noargs", "arguments": {}}\n</tool_call><|im_end|>⟧\n'
    )


def test_tool_calls_that_a_template_joins_as_text():
    tokenizer = ct.byte_tokenizer("mistral")
    tokenizer.chat_template = ct.MISTRAL.replace(
        "{{ message.content + eos_token }}",
        "{% for call in message.tool_calls or [] %}{{ '[TOOL_CALLS]' + call.function.name + ':' + "
        "call.function.arguments }}{% endfor %}{{ message.content + eos_token }}",
    )
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": CALL}]}
    arguments = json.dumps(json.loads(CALL)["arguments"])
    assert shown(row, tokenizer) == f"<s>[INST]a[/INST]⟦[TOOL_CALLS]weather:{arguments}</s>⟧"


def test_a_tool_call_without_a_stop_token_ends_where_the_template_ends_it():
    tokenizer = ct.byte_tokenizer("glm")
    tokenizer.chat_template = ct.GLM.replace("message.content }}", "message.content }}" + ct._CALLS)
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": CALL}]}
    assert shown(row, tokenizer).endswith("</tool_call>⟧")
    row["conversations"] += [{"from": "observation", "value": "rain"}, {"from": "gpt", "value": "b"}]
    assert "</tool_call>⟧<|tool|>\nrain<|assistant|>\n⟦b⟧" in shown(row, tokenizer)
    end = "{% if loop.last %}(the end){% endif %}{% endfor %}{% if add"
    tokenizer.chat_template = tokenizer.chat_template.replace("{% endfor %}{% if add", end)
    with pytest.raises(
        ChatTemplateError, match="no end-of-turn token comes after the tool calls of message 1"
    ):
        encode_chat(row, tokenizer)


def test_a_blank_answer_that_a_template_prints_otherwise():
    tokenizer = ct.byte_tokenizer("glm")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.content.strip() %}: {{ m.content.strip() }}"
        "{% else %}(nothing){% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    text = shown(chat("a", "", "b", "c"), tokenizer)
    assert text == "<|user|>: a<|assistant|>⟦(nothing)⟧<|user|>: b<|assistant|>⟦: c⟧"


def test_contents_are_given_in_parts_to_templates_that_take_nothing_else():
    tokenizer = ct.byte_tokenizer("chatml")
    tokenizer.chat_template = ct.CHATML.replace("{{ message.content }}", "{{ message.content[0]['text'] }}")
    row = chat("hi", "hello", "more", "")
    assert shown(row, tokenizer) == shown(row)


def test_reasoning_is_trained_where_the_template_prints_it():
    tokenizer = ct.byte_tokenizer("chatml")
    tokenizer.chat_template = ct.CHATML_REASONING
    parts = [{"type": "reasoning", "value": "hm"}, {"type": "text", "value": "b"}]
    text = shown(
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts}]}, tokenizer
    )
    assert text.endswith("⟦<think>\nhm\n</think>\n\nb<|im_end|>⟧\n")


def test_encoded_rows_pass_through_with_truncation():
    row = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 1]}
    assert encode_chat(row, TOKENIZERS["chatml"]) == EncodedChat([5, 6, 7], [-100, 6, 7])
    tensors = {key: torch.tensor(value) for key, value in row.items()}
    assert encode_chat(tensors, TOKENIZERS["chatml"], max_length=2) == EncodedChat([5, 6], [-100, 6])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("text", "a row must be a dict, got str; accepted shapes"),
        ({"text": "a", "id": 3}, r"keys \['id', 'text'\]; accepted shapes: \"messages\""),
        ({"messages": []}, "no messages"),
        ({"messages": "a"}, '"messages" must be a list, got str'),
        ({"messages": ["a"]}, r"messages\[0\] must be a dict with role and content"),
        (
            {"messages": [{"role": "model", "content": "a"}]},
            r"messages\[0\] has the role 'model'; known roles: system",
        ),
        ({"messages": [{"content": "a"}]}, "has the role None"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            r"messages\[0\].content must be a string, got int 3",
        ),
        ({"messages": [{"role": "user"}]}, "neither content nor tool_calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "part of type text, reasoning or",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must be a string, got NoneType"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]},
            "only the assistant calls tools",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "needs a name and arguments"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "["}]}]},
            "must be JSON",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
            "be an object",
        ),
        ({"messages": [{"role": "assistant", "content": "a", "reasoning_content": 3}]}, "must be a string"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "has the role 'bot'; known roles: human"),
        ({"conversations": [{"value": "a"}]}, "must be a dict with from and value"),
        ({"conversations": [{"from": "human", "value": None}]}, "value must be a string"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "function_call must be JSON"),
        ({"instruction": "a"}, 'needs "instruction" and "output"'),
        ({"instruction": "a", "output": 3}, "must be a string"),
        (
            {"instruction": "a", "output": "b", "history": ["c"]},
            r"history\[0\] must be a \[user, assistant\] pair",
        ),
        ({"prompt": "a"}, 'needs "prompt" and "completion"'),
        ({"input_ids": [1, 2]}, 'needs "input_ids" and "labels"'),
        ({"input_ids": [1, 2], "labels": [1]}, "of one length of at least 1, got 2 and 1"),
        ({"input_ids": [], "labels": []}, "at least 1"),
        ({"input_ids": [1.5], "labels": [1]}, '"input_ids" must be a flat list of integers'),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "{"}, "tools must be JSON"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [3]}, r"tools\[0\] must be a JSON schema"),
    ],
)
def test_malformed_rows_say_what_is_wrong(row, message):
    with pytest.raises(ValueError, match=message):
        encode_chat(row, TOKENIZERS["chatml"])


# --- batches ----------------------------------------------------------------------------------------------

ROWS = [chat("a", "hello"), chat("only a question"), chat("b", "c", "d", "e")]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("multiple", [None, 1, 8])
@pytest.mark.parametrize("padding", ["longest", "max_length"])
@pytest.mark.parametrize("shared_pad", [True, False])
def test_batches_are_padded_by_length(side, multiple, padding, shared_pad):
    tokenizer = ct.byte_tokenizer("chatml-eos", pad_token="<|im_end|>" if shared_pad else "<pad>")
    collator = SFTCollator(
        tokenizer, max_length=45, padding=padding, padding_side=side, pad_to_multiple_of=multiple
    )
    batch = collator(ROWS)
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    encoded = [encode_chat(row, tokenizer, max_length=45) for row in ROWS]
    longest = max(len(item.input_ids) for item in encoded) if padding == "longest" else 45
    length = -(-longest // (multiple or 1)) * (multiple or 1)
    for row, item in enumerate(encoded):
        size = len(item.input_ids)
        real = slice(0, size) if side == "right" else slice(length - size, length)
        for key, value, filler in (
            ("input_ids", item.input_ids, tokenizer.pad_token_id),
            ("labels", item.labels, IGNORE_INDEX),
            ("attention_mask", [1] * size, 0),
        ):
            expected = torch.full((length,), filler)
            expected[real] = torch.tensor(value)
            assert batch[key].dtype == torch.int64
            assert batch[key].shape == (3, length)
            torch.testing.assert_close(batch[key][row], expected, rtol=0, atol=0)
    assert (batch["labels"][1] == IGNORE_INDEX).all(), "a row without a target stays a row"
    assert (batch["labels"][0] == tokenizer.eos_token_id).sum() == 1, "the real end-of-turn token is trained"


def test_no_field_of_a_batch_stands_in_for_another():
    batch = SFTCollator(TOKENIZERS["chatml"], max_length=64)(ROWS)
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    assert set(mask.unique().tolist()) == {0, 1}
    trained = labels != IGNORE_INDEX
    torch.testing.assert_close(labels[trained], ids[trained], rtol=0, atol=0)
    assert trained.any()
    assert not trained[mask == 0].any()
    assert TOKENIZERS["chatml"].decode(labels[0][trained[0]].tolist()) == "hello<|im_end|>"
    assert TOKENIZERS["chatml"].decode(ids[0][mask[0].bool()].tolist()).startswith("<|im_start|>user\na")


def test_the_collator_takes_encoded_rows_and_survives_pickling():
    collator = pickle.loads(pickle.dumps(SFTCollator(TOKENIZERS["chatml"], max_length=30, train_on="last")))
    encoded = [encode_chat(row, TOKENIZERS["chatml"], train_on="last") for row in ROWS]
    expected = collator(ROWS)
    as_dicts = [{"input_ids": item.input_ids, "labels": item.labels} for item in encoded]
    for rows in (encoded, as_dicts):
        for key, value in collator(rows).items():
            torch.testing.assert_close(value, expected[key], rtol=0, atol=0)
    with pytest.raises(ValueError, match="at least one row"):
        collator([])


# --- filtering --------------------------------------------------------------------------------------------


def test_filter_rows_counts_by_reason():
    off, silent = chat("a", "b"), chat("a" * 100, "b")
    off["messages"][1]["train"] = False
    encoded = EncodedChat([1, 2], [IGNORE_INDEX] * 2)
    rows = [*ROWS, off, silent, encoded, {"input_ids": [1, 2], "labels": [1, IGNORE_INDEX]}]
    kept, counts = filter_rows(rows, TOKENIZERS["chatml"], max_length=80)
    assert kept == [ROWS[0], ROWS[2]]
    assert counts == {
        "kept": 2,
        "no_assistant_turn": 1,
        "switched_off": 1,
        "truncated_away": 1,
        "no_trained_token": 2,
    }
    assert all(encode_chat(row, TOKENIZERS["chatml"], max_length=80).num_targets for row in kept)
    _, counts = filter_rows([chat("a", ""), chat("a", "b")], TOKENIZERS["glm"])
    assert counts == {"kept": 1, "no_trained_token": 1}
    _, counts = filter_rows([*ROWS, chat(("system", "s"), "b")], TOKENIZERS["chatml"], train_on={"system"})
    assert counts == {"kept": 1, "no_turn_of_the_roles": 3}


def test_filter_rows_names_the_row_that_is_malformed():
    with pytest.raises(ValueError, match=r"row 1: messages\[0\] has the role 'bot'"):
        filter_rows([chat("a", "b"), chat(("bot", "x"))], TOKENIZERS["chatml"])
    with pytest.raises(ChatTemplateError, match="row 1: cannot tell"):
        filter_rows([chat("a", "b"), chat("a", "\U000f5b01")], TOKENIZERS["chatml"])


def test_filter_rows_refuses_to_keep_nothing():
    with pytest.raises(
        ValueError, match=r"no row has a target, counted \{'kept': 0, 'no_assistant_turn': 1\}"
    ):
        filter_rows([ROWS[1]], TOKENIZERS["chatml"])
    with pytest.raises(ValueError, match="no row has a target"):
        filter_rows([], TOKENIZERS["chatml"])


# --- rendering --------------------------------------------------------------------------------------------


def test_render_labels():
    tokenizer = TOKENIZERS["chatml"]
    encoded = encode_chat(chat("é", "日本🙂"), tokenizer)
    plain = render_labels(tokenizer, encoded.input_ids, encoded.labels, color=False)
    assert plain == "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n⟦日本🙂<|im_end|>⟧\n"
    colored = render_labels(tokenizer, torch.tensor(encoded.input_ids), torch.tensor(encoded.labels))
    assert "\x1b[32;4m日本🙂<|im_end|>\x1b[0m\x1b[2m\n\x1b[0m" in colored
    split = [label if index % 2 else IGNORE_INDEX for index, label in enumerate(encoded.input_ids)]
    whole = render_labels(tokenizer, encoded.input_ids, split, color=False)
    assert whole.replace("⟦", "").replace("⟧", "") == plain.replace("⟦", "").replace("⟧", "")
    escaped = encode_chat(chat("\x1b[2J", "b"), tokenizer)
    assert "\x1b[2J" not in render_labels(tokenizer, escaped.input_ids, escaped.labels)
    assert render_labels(tokenizer, [], []) == ""


@pytest.mark.parametrize("labels", [[IGNORE_INDEX], [1, 1], [IGNORE_INDEX, 5]])
def test_render_labels_refuses_labels_of_something_else(labels):
    with pytest.raises(ValueError, match="each label must be -100 or the id at its position"):
        render_labels(TOKENIZERS["chatml"], [3, 4], labels)


# --- the package around it --------------------------------------------------------------------------------


def test_importing_does_not_import_transformers():
    code = "import sys, fsdp_sft.collate; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "name",
    [
        "alpaca_en_demo.json",
        "glaive_toolcall_en_demo.json",
        "v1_sft_demo.jsonl",
        "reason_tool_use_demo_50.jsonl",
    ],
)
def test_real_data(name, capsys):
    folder = os.environ.get("FSDP_SFT_DATA")
    if not folder:
        pytest.skip("FSDP_SFT_DATA is not set to a folder with the sample data")
    text = (Path(folder) / name).read_text()
    rows = json.loads(text) if name.endswith("json") else [json.loads(line) for line in text.splitlines()]
    tokenizer = ct.bpe_tokenizer("chatml")
    tokenizer.chat_template = ct.CHATML_REASONING
    encoded = [encode_chat(row, tokenizer) for row in rows]
    total, trained = sum(len(e.input_ids) for e in encoded), sum(e.num_targets for e in encoded)
    with capsys.disabled():
        print(f" [{len(rows)} rows, {total} tokens, {trained / total:.1%} trained]", end="")
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for row, item in zip(rows, encoded, strict=True):
        turns = row.get("messages") or row.get("conversations") or [{"role": "assistant"}]
        answers = [
            turn
            for turn in turns
            if turn.get("role", turn.get("from")) in ("assistant", "gpt", "function_call")
        ]
        assert item.labels.count(stop) == len(answers)
        text = tokenizer.decode([label for label in item.labels if label != IGNORE_INDEX])
        for answer in answers:
            value = answer.get("content") or answer.get("value") or row.get("output")
            parts = (
                [part["value"] for part in value if part["type"] != "tool_call"]
                if isinstance(value, list)
                else [value]
            )
            assert answer.get("from") == "function_call" or all(part in text for part in parts)
