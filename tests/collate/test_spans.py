"""Which tokens of a chat are trained, on any template: against formats written by hand."""

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from fsdp_sft import IGNORE_INDEX, ChatTemplateError, EncodedChat, encode_chat, filter_rows
from fsdp_sft.collate import spans, template
from fsdp_sft.collate.encode import tokenise
from fsdp_sft.collate.options import EncodeOptions
from fsdp_sft.collate.rows import read_row
from fsdp_sft.collate.template import ChatTemplate
from tests.harness import chat_templates as ct
from tests.harness.chats import TOKENIZERS, assert_matches_hand_written, chat, marks, shown

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


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *itertools.product(ct.FAMILIES, CONVERSATIONS),
        *((name, "a system message") for name, family in ct.FAMILIES.items() if family.system),
    ],
)
def test_labels_are_those_of_the_format_written_by_hand(name, case):
    turns = {**CONVERSATIONS, "a system message": (("system", "hello"), "hi", "hello")}[case]
    assert_matches_hand_written(name, chat(*turns)["messages"])


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


def trained(encoded: EncodedChat) -> list[int]:
    return [label for label in encoded.labels if label != IGNORE_INDEX]


def test_a_token_over_the_start_is_not_trained():
    tokenizer = BPE["chatml"]
    encoded = encode_chat(chat("hi", "\n\nfine"), tokenizer)
    assert "ĊĊ" in tokenizer.convert_ids_to_tokens(encoded.input_ids)
    assert tokenizer.convert_ids_to_tokens(trained(encoded)) == ["Ċ", "fine", "<|im_end|>"]


def test_offsets_that_leave_out_spaces_are_repaired():
    plain, trimmed = ct.bpe_tokenizer("llama2"), ct.bpe_tokenizer("llama2")
    trimmed.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    for row in (chat("hello", "hello there"), chat("a  b", "x   y")):
        assert trimmed("hello there", return_offsets_mapping=True)["offset_mapping"][1] == (6, 11)
        assert encode_chat(row, trimmed) == encode_chat(row, plain)
    row = chat("hello", " there")
    plain.chat_template = trimmed.chat_template = ct.ZEPHYR.replace("|>\\n' + message", "|> ' + message")
    assert encode_chat(row, trimmed) == encode_chat(row, plain)


def test_a_stop_token_that_takes_the_white_space_around_it():
    tokenizer = ct.byte_tokenizer("phi3", template=ct.PHI3.replace("<|end|>", "<|stop|>"))
    tokenizer.add_tokens([AddedToken("<|stop|>", lstrip=True, rstrip=True, special=True)])
    encoded = encode_chat(chat("hi", "yes  "), tokenizer)
    assert trained(encoded) == [*tokenizer("yes")["input_ids"], tokenizer.convert_tokens_to_ids("<|stop|>")]


_WHY = {"role": "assistant", "content": "b", "reasoning_content": "why"}
_THOUGHTS = ("a", "<think>\nold\n</think>\n\nb", "c", "<think>\nnew\n</think>\n\nd")
# By what is special: the tokens, the template, further tokens, a row, and what is in it once as it is shown.
TEMPLATES = {
    "an end-of-turn token that was added as an ordinary one": (
        "chatml", ct.CHATML.replace("<|im_end|>", "<stop>"), ["<stop>", "</tool>"], chat("a", "b", "c", "d"),
        "⟦b<stop>⟧",
    ),
    "a token that closes the answer in front of the stop token": (
        "chatml-eos", ct.CHATML.replace("'<|im_end|>\\n'", "'<|end|><|im_end|>\\n'"), [],
        chat("a", "b", "c", "d"),
        "⟦b<|end|><|im_end|>⟧\n",
    ),
    "thinking that the generation prompt opens": (
        "chatml-eos",
        ct.QWEN3.replace(ct._PROMPT, ct._PROMPT.replace("assistant\\n", "assistant\\n<think>\\n")), [],
        chat(*_THOUGHTS), "<|im_start|>assistant\n<think>\n⟦new\n</think>\n\nd<|im_end|>⟧\n",
    ),
    "thinking of the past": (
        "chatml-eos",
        ct.QWEN3.replace(ct._PROMPT, ct._PROMPT.replace("assistant\\n", "assistant\\n<think>\\n")), [],
        chat(*_THOUGHTS), "<|im_start|>assistant\n⟦b<|im_end|>⟧\n",
    ),
    "tags that leave something out": (
        "chatml",
        ct.CHATML_TAGGED.replace(
            "{% generation %}{{ message.content }}",
            "{{ '(note)' }}{% generation %}{{ message.content }}{% endgeneration %}{{ '(note)' }}"
            "{% generation %}"
            "{% if message.reasoning_content %}{{ message.reasoning_content }}{% endif %}",
        ),
        [], {"messages": [*chat("a")["messages"], _WHY]}, "(note)⟦b⟧(note)⟦why<|im_end|>⟧\n",
    ),
    "a header quoted by the template itself": (
        "chatml", "{{ 'Write after <|im_start|>assistant\n.' }}" + ct.CHATML, [], chat("", "b"),
        "<|im_start|>assistant\n⟦b<|im_end|>⟧\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TEMPLATES)
def test_what_is_trained_with_a_template_that_has(what):
    family, template, tokens, row, expected = TEMPLATES[what]
    tokenizer = ct.byte_tokenizer(family, template=template)
    tokenizer.add_tokens(tokens)
    assert shown(row, tokenizer).count(expected) == 1


def test_an_empty_think_block_of_the_template_is_trained_on_request_alone():
    row, tokenizer, block = chat("a", "b"), TOKENIZERS["qwen3"], "<think>\n\n</think>\n\n"
    assert shown(row, tokenizer).endswith(f"<|im_start|>assistant\n{block}⟦b<|im_end|>⟧\n")
    assert shown(row, tokenizer, train_on="all").startswith("⟦")
    assert encode_chat(row, tokenizer).notes == ("empty_reasoning",)
    counts = filter_rows([row, chat("a", "<think>c</think>b")], tokenizer)[1]
    assert counts == {"kept": 2, "empty_reasoning": 1}
    assert list(counts.indices["empty_reasoning"]) == [0]


_HEADER_ONCE = (
    "{% if not loop.index0 or messages[loop.index0 - 1].role != message.role %}" + ct._ROLE + "{% endif %}"
)
_BODY = (
    "{% if message.role == 'assistant' %}(note){% generation %}{{ message.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
)
# Without a header only the tag tells where the second answer starts, if its offset can be trusted.
CAPTURES = {
    "in a macro": ("{% macro turn(message) %}" + _BODY + "{% endmacro %}", "{{ turn(message) }}"),
    "in a variable": ("", "{% set text %}" + _BODY + "{% endset %}{{ text }}"),
    "nowhere": ("", _BODY),
}


def tagged(capture: str) -> str:
    macro, use = CAPTURES[capture]
    return macro + "{% for message in messages %}" + _HEADER_ONCE + use + "{% endfor %}" + ct._PROMPT


TWO_ANSWERS = chat("a", "b", ("assistant", "c"))
POLITE = "{% if 'please' in messages[0].content %}{{ '<|user|>polite\\n' }}{% endif %}" + ct.CHATML
_NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
)


# Tags around the last answer; a block of reasoning in front of each, which no prompt has; the id of a call
# where others print its name, as Kimi's templates do; a mode without reasoning, whose prompt closes it,
# as DeepSeek-V4's; a special token that closes an answer before the one that closes its turn, as Kimi K3's.
LAST_ALONE, ALWAYS_A_BLOCK, BY_ID, TWO_MODES, CLOSED_TWICE = (
    ct.CHATML.replace(*change)
    for change in (
        (
            "{{ message.content }}",
            "{% if loop.last %}{% generation %}{{ message.content }}{% endgeneration %}"
            "{% else %}{{ message.content }}{% endif %}",
        ),
        (
            "{{ message.content }}",
            "{{ ('<think></think>' if message.role == 'assistant' else '') + message.content }}",
        ),
        (
            ct._CALLS,
            "{% for c in message.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}"
            "{% endfor %}",
        ),
        (
            "{{ message.content }}",
            "{% if message.role == 'assistant' %}{% if thinking and message.reasoning_content %}<think>"
            "{{ message.reasoning_content }}{% endif %}</think>{% endif %}{{ message.content }}",
        ),
        (
            "{{ message.content }}",
            "{{ message.content }}{% if message.role == 'assistant' %}<|end|>done{% endif %}",
        ),
    )
)
# The second one is found by the text in its arguments, which is not its name.
CALLED, NAMELESS = (
    {
        "messages": [
            *chat("a")["messages"],
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": name, "function": {"name": "find", "arguments": arguments}}],
            },
        ]
    }
    for name, arguments in (("functions.find:0", {"n": 1}), ("c1", {"city": "Rome"}))
)


@pytest.mark.parametrize(
    ("template", "row", "reason"),
    [
        (tagged("in a macro"), TWO_ANSWERS, "second assistant message in a row"),
        (tagged("in a variable"), TWO_ANSWERS, "second assistant message in a row"),
        (ct.CHATML.replace(ct._ROLE, _HEADER_ONCE), TWO_ANSWERS, "second assistant message in a row"),
        # The user's own text stays in the second rendering, so it must not look like a header.
        (POLITE, chat("please <|im_start|>assistant\nc", "b"), "depends on the message's content"),
        (_NO_SYSTEM + ct.GEMMA, chat(("system", "s"), "a", "b"), "System role not supported; change the row"),
        (BY_ID, NAMELESS, "does not print the name of a tool of message 1, 'find'"),
    ],
)
def test_a_row_that_a_template_does_not_take_is_refused(template, row, reason):
    with pytest.raises(ChatTemplateError, match=reason):
        encode_chat(row, ct.byte_tokenizer("gemma", template=template))


@pytest.mark.parametrize(
    ("template", "row", "expected", "options"),
    [
        (tagged("nowhere"), TWO_ANSWERS, "(note)⟦b<|im_end|>⟧(note)⟦c<|im_end|>⟧", {}),
        (POLITE, chat("a, please", "b"), "⟦b<|im_end|>⟧\n", {}),
        (LAST_ALONE, chat("a", "b", "c", "d"), "assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
         "<|im_start|>assistant\n⟦d<|im_end|>⟧\n", {}),
        (ALWAYS_A_BLOCK, chat("a", "b"), "assistant\n<think></think>⟦b<|im_end|>⟧\n", {}),
        (ct.CHATML, chat("a", "<think>\n</think>\nb"), "⟦<think>\n</think>\nb<|im_end|>⟧\n", {}),
        (ct.CHATML, chat("a", "<think>\n</think>\nb"), "</think>\n⟦b<|im_end|>⟧\n",
         {"train_reasoning": False}),
        (ct.CHATML, chat("a", "Close it with </think> here."), "⟦Close it with </think> here.<|im_end|>⟧\n",
         {"train_reasoning": False}),
        (ct.CHATML, chat("a", "Write <think>x</think>."), "⟦Write <think>x</think>.<|im_end|>⟧\n",
         {"train_reasoning": False}),
        (ct.CHATML, chat(" ", "b"), "user\n <|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n",
         {"train_on": {"user", "assistant"}}),
        (BY_ID, CALLED, '⟦functions.find:0{"n": 1}<|im_end|>⟧\n', {}),
        (TWO_MODES + "{% if add_generation_prompt %}{{ '<think>' if thinking else '</think>' }}{% endif %}",
         chat("a", "<think>\nx\n</think>\n\nb"), "\n</think>⟦<think>\nx\n</think>\n\nb<|im_end|>⟧\n", {}),
        (CLOSED_TWICE, chat("a", "b"), "assistant\n⟦b<|end|>done<|im_end|>⟧\n", {}),
    ],
)  # fmt: skip
def test_a_row_that_is_nearly_refused(template, row, expected, options):
    assert shown(row, ct.byte_tokenizer("chatml", template=template, eos_token="<pad>"), **options).endswith(
        expected
    )


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("{{ message.content }}", "{{ message.content | upper }}", "does not match the first"),
        ("{{ message.content }}", "{{ message.content }}{{ message.content }}", "exactly once"),
        ("{{ message.content }}", "{{ message.content[:2] }}", "exactly once"),
        ("{{ message.content }}", "{% if message.content != 'b' %}{{ message.content }}{% endif %}", "match"),
        ("{% for message in messages %}", "{% for message in messages[:4] %}", "does not print message 5"),
        (ct._CALLS, "", "does not print the name of a tool of message 3"),
        (ct._PROMPT, ct._PROMPT + "{% if messages[-1].content == 'f' %}END{% endif %}", "match the first"),
    ],
)
def test_a_template_that_cannot_be_followed_is_refused(old, new, reason):
    assert old in ct.CHATML
    tokenizer = ct.byte_tokenizer("chatml", name_or_path="some/model", template=ct.CHATML.replace(old, new))
    row = chat("a", "b", "c", "d", "e", "f")
    if old == ct._CALLS:
        row["messages"][3]["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    with pytest.raises(ChatTemplateError, match=rf"some/model.*{reason}.*chat_template="):
        encode_chat(row, tokenizer)


def test_private_use_characters_of_the_sentinels_are_texts_like_others():
    sentinel = "\U000f5b010\U000f5b02"
    for question, answer in (
        ("a", sentinel),
        (sentinel, "a"),
        (sentinel, "\U000f5b01 b"),
        (sentinel, sentinel),
    ):
        assert f"<|im_start|>assistant\n⟦{answer}<|im_end|>⟧" in shown(chat(question, answer))


def test_a_long_conversation_takes_as_many_renderings_as_a_short_one(monkeypatch):
    counts, render = [], template.render_chat
    monkeypatch.setattr(template, "render_chat", lambda *a, **k: counts.append(1) or render(*a, **k))
    for turns in (2, 64):
        counts.clear()
        encoded = encode_chat(chat(*(f"text {number}" for number in range(turns))), TOKENIZERS["chatml"])
        # Two, and two of prompts, or fewer of texts between known literals; at first the probe of a template.
        assert 1 <= len(counts) <= (4 if turns == 64 else 20)
        assert sum(marks(encoded)) == sum(len(f"text {n}") + 1 for n in range(1, turns, 2))


def test_special_tokens_are_not_added_a_second_time():
    tokenizer = ct.byte_tokenizer("llama3")
    bos = ("<|begin_of_text|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[bos]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    assert encode_chat(chat("a", "b"), tokenizer).input_ids.count(tokenizer.bos_token_id) == 1


def test_the_worked_example_at_the_top_of_the_module_is_true():
    template = ChatTemplate(TOKENIZERS["chatml"])
    found = spans.find_turns(template, read_row(chat("1 + 1?", "2")), EncodeOptions())
    lines = (spans.__doc__ or "").splitlines()
    text = found.text.replace("\n", "↵")
    (number,) = [n for n, line in enumerate(lines) if line.strip() == text]
    column = lines[number].index(text)
    ruler, leaves, marked = (lines[number + step][column:] for step in (-1, 1, 3))
    (turn,) = found.turns
    question, answer = text.index("1 + 1?"), turn.start
    for place in (0, question, question + len("1 + 1?"), answer, turn.end):
        assert ruler[place:].split()[0] == str(place)
    assert leaves.rstrip() == f"{'^' * 6:>{question + 6}}{'^':>{answer + 1 - question - 6}}"
    assert marked == f"{'':>{turn.start}}{'~' * (turn.end - turn.start)}"
    assert text[turn.start : turn.end] == "2<|im_end|>"


# --- tokens and where they stand, beside the offsets of a tokenizer that trims none -------------------------

TEXTS = [
    "The answer is 42.  And   so on\n\n\n  indented\ttab \n",
    "Größe: 3 µm, naïve café — “quoted” …",
    "東京へ行きました。🙂👩‍👩‍👧 и ещё немного",
    " leading and trailing ",
    "<|start|>user\nWhat?<|end|>\n<|start|>assistant\n  It is 🙂.<|end|>",
    "\u2028line\u00a0no-break\x00nul",
    "",
]


def _trained(normalizer: Any = None, *, trim_offsets: bool = False, **pre: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **pre})
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def _texts(number: int) -> list[str]:
    draw = random.Random(0)
    letters = [*"ab 1.\n\tüß東🙂\u0301", "  ", "<|start|>", "<|end|>", "\r\n", "e\u0301"]
    return TEXTS + ["".join(draw.choices(letters, k=draw.randrange(40))) for _ in range(number)]


def _places(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and characters of each token, by the tokenizer."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return found["input_ids"], found["offset_mapping"]


def test_each_edge_is_where_a_tokenizer_that_trims_nothing_has_it() -> None:
    tokenizer, texts = _trained(), _texts(300)
    for text, tokens in zip(texts, tokenise(tokenizer, texts), strict=True):
        ids, places = _places(tokenizer, text)
        assert tokens.ids == ids
        for position in range(len(text) + 1):
            first = next((i for i, (start, _) in enumerate(places) if start >= position), len(ids))
            assert tokens.first_from(position) == first, (text, position)


def test_many_texts_are_tokenised_as_each_alone() -> None:
    tokenizer, texts = _trained(), [text for text in _texts(50) if text]
    alone = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    tokenizer(texts, split_special_tokens=True)  # which its backend keeps
    assert [tokens.ids for tokens in tokenise(tokenizer, texts)] == alone


def test_with_trimmed_offsets_a_word_begins_with_its_space_all_the_same() -> None:
    texts = [text for text in _texts(100) if text]
    trimmed, plain = (tokenise(_trained(trim_offsets=trim), texts) for trim in (True, False))
    for tokens, expected, text in zip(trimmed, plain, texts, strict=True):
        for position in range(len(text) + 1):
            first = expected.first_from(position)
            assert tokens.first_from(position) == first, (text, position)
            assert tokens.is_cut(position, first) == expected.is_cut(position, first), (text, position)
