"""Labels begin where the generation prompt ends, and it is said where that is not what rows have."""

import re
import warnings
from typing import Any

import pytest
import tokenizers
import transformers as tf

from fsdp_sft import ChatTemplateError, encode_chat, filter_rows
from tests.collate.template_tokenizers import ROW, tokenizer, tokenizer_for, turns
from tests.harness import chat_templates as ct
from tests.harness.chats import chat, shown


@pytest.mark.filterwarnings("error")
def test_a_question_without_an_answer_has_no_prompt_to_differ() -> None:
    template = turns("'<|' + message.role + '|>'", "<|end|>").replace("'assistant' + '|>' }}", "'a|>' }}")
    own = tokenizer(template, "<|user|>", "<|assistant|>", "<|end|>")
    assert "prompt_differs" not in filter_rows([chat("q")], own, train_on={"user"})[1]


def trained(row: dict[str, Any], own: Any) -> list[str]:
    return re.findall(r"⟦(.*?)⟧", shown(row, own), re.DOTALL)


def joining(*pairs: str) -> Any:
    """A byte-level BPE tokenizer of single bytes and these pairs of them, in its own alphabet."""
    alphabet = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *pairs, "</s>"]
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [(pair[0], pair[1]) for pair in pairs]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return tf.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


def test_a_header_that_ends_with_a_space_is_noted() -> None:
    """One token holds the space and the first letter, and the prompt alone ends with another token."""
    row = chat("Who?", "The one", "Who?", "The other")
    own = joining("ĠT", "ĠI", "Ġa")
    for header, noted, expected in (
        ("message.role + ': '", {"start_in_a_token": 1}, "⟦he one</s>⟧"),
        ("message.role + ':\n'", {}, "⟦The one</s>⟧"),
    ):
        own.chat_template = turns(header, "</s>\n")
        for train_on in ("assistant", "last"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                counts = filter_rows([row], own, train_on=train_on)[1]  # type: ignore[arg-type]
            assert counts == {"kept": 1, **noted}
            heard = [str(one.message) for one in caught]
            assert any("1 of 1 rows are counted as start_in_a_token" in text for text in heard) is bool(noted)
            assert expected in shown(row, own)


@pytest.mark.parametrize("more", ["", "and messages|length > 1"])
def test_a_header_that_no_prompt_writes_is_the_models(more: str) -> None:
    template = turns("'<|' + message.role + '|>\n'", "<|end|>").replace("else ''", "else '<|end|>'")
    if more:
        template = template.replace("add_generation_prompt %}", f"add_generation_prompt {more} %}}")
    else:
        template = template.partition("{% if add_gen")[0]
    own = tokenizer(template, "<|user|>", "<|assistant|>", "<|end|>")
    assert filter_rows([ROW], own)[1] == {"kept": 1}
    assert "⟦<|assistant|>\none<|end|>⟧" in shown(ROW, own)
    assert shown(ROW, own).endswith("<|assistant|>\n⟦two<|end|>⟧" if more else "⟦<|assistant|>\ntwo<|end|>⟧")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("first", [0, 3])
def test_headers_that_number_the_turns(first: int) -> None:
    number = f"(loop.index + {first}) ~ '\n'"
    template = turns(f"'<|' + message.role + '|> ' ~ {number}", "<|end|>").replace(
        f"'<|' + 'assistant' + '|> ' ~ {number}", f"'<|assistant|> ' ~ (messages|length + 1 + {first}) ~ '\n'"
    )
    own = tokenizer(template, "<|user|>", "<|assistant|>", "<|end|>")
    row = chat("q", "4 and 6", "r", "2", "s", "8\nsix")
    assert filter_rows([row], own)[1] == {"kept": 1}
    assert shown(row, own) == "".join(
        f"<|user|> {first + n}\n{question}<|assistant|> {first + n + 1}\n⟦{answer}<|end|>⟧"
        for n, question, answer in ((1, "q", "4 and 6"), (3, "r", "2"), (5, "s", "8\nsix"))
    )


def test_numbers_that_only_rows_have_are_refused() -> None:
    """The prompt has another number than the row, so no rendering shows where the answer begins."""
    numbered = "'|> ' ~ (NUMBER if messages[0].role == 'system' else '')"
    header = "'<|' + message.role + " + numbered
    template = turns(header, "<|end|>").replace("'assistant' + '|> ' ~ (NUMBER", "'assistant|> ' ~ (LATER")
    template = template.replace("NUMBER", "loop.index").replace("LATER", "messages|length + 2")
    own = tokenizer(template, "<|user|>", "<|assistant|>", "<|end|>")
    assert shown(ROW, own).endswith("<|assistant|> ⟦two<|end|>⟧")
    with pytest.raises(ChatTemplateError, match="does not come after the generation prompt"):
        encode_chat(chat(("system", "s"), "q", "one", "r", "two"), own)


BRIEF = ("system", "Be brief.")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
HEADS = {
    "a system message": "('[steered]\n' if messages[0].role == 'system' else '')",
    "tools": "('[tools]\n' if tools else '')",
    "a later turn": "('[reminder]\n' if n > 2 else '')",
    "the first turn": "('' if n > 2 else '[hello]\n')",
    "the message before": "('[result]\n' if before == 'tool' else '')",
    "a count": "'>' * n",
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("depends_on", HEADS)
def test_a_prompt_may_depend_on_anything(depends_on: str) -> None:
    """What the row has in front of an answer is exactly the prompt, so it is never trained."""
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% set n = loop.index0 %}"
        "{% set before = messages[n - 1].role %}{{ HEAD + message.content + '<|end|>' }}{% else %}"
        "{{ '<|user|>' + message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "{% set n = messages|length %}{% set before = messages[-1].role %}{{ HEAD }}{% endif %}"
    ).replace("HEAD", f"'<|assistant|>' + {HEADS[depends_on]}")
    own = tokenizer(template, "<|user|>", "<|assistant|>", "<|end|>")
    said = ("q", "one", "r", "two", ("tool", "result"), "three", "s", "four", ("user", "t"), "five")
    row = {**chat(BRIEF, *said), "tools": TOOLS}
    assert filter_rows([row], own)[1] == {"kept": 1}
    answers = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
    assert trained(row, own) == [f"{answer}<|end|>" for answer in answers]


@pytest.mark.parametrize(
    ("prompt", "past", "expected"),
    [
        ("AI: ", "Assistant: ", None),
        ("### Response:\n", "### Result:\n", "Result:\none<|end|>"),
        ("<|a|>{plan}", "<|a|>{answer}", "{answer}one<|end|>"),
    ],
)
def test_no_header_is_cut_in_a_word_or_tag(prompt: str, past: str, expected: str | None) -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        f"{{{{ ({prompt!r} if loop.last else {past!r}) + message.content + '<|end|>' }}}}"
        "{% else %}{{ '<|user|>' + message.content + '\n' }}{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ {prompt!r} }}}}{{% endif %}}"
    )
    own = tokenizer(template, "<|user|>", "<|end|>", "<|a|>")
    if expected is None:
        with pytest.raises(ChatTemplateError, match="message 1 does not come after the generation prompt"):
            filter_rows([ROW], own)
        return
    assert filter_rows([ROW], own)[1] == {"kept": 1, "prompt_differs": 1}
    assert trained(ROW, own) == [expected, "two<|end|>"]


@pytest.mark.parametrize(
    ("when", "row", "noted"),
    [
        ("messages[0].role == 'system'", chat(BRIEF, "q", "one"), {}),
        ("messages|length == 1", chat("q", "one"), {}),
        # The template does not print the tools.
        ("tools", {**chat("q", "one"), "tools": TOOLS}, {"context_dropped": 1}),
    ],
)
def test_a_prompt_that_differs_in_some_conversations_only(
    when: str, row: dict[str, Any], noted: dict[str, int]
) -> None:
    prompt = f"{{{{ '<|assistant|>\n' + ('In French: ' if {when} else '') }}}}"
    template = turns("'<|' + message.role + '|>\n'", "<|end|>")
    template = template.replace("{{ '<|' + 'assistant' + '|>\n' }}", prompt)
    own = tokenizer(template, "<|user|>", "<|assistant|>", "<|end|>")
    with pytest.warns(
        UserWarning, match=r"1 of 1 rows are counted as prompt_differs: .*add_generation_prompt=True"
    ):
        assert filter_rows([row], own)[1] == {"kept": 1, "prompt_differs": 1, **noted}
    assert shown(row, own).endswith("<|assistant|>\n⟦one<|end|>⟧")


def test_an_added_token_may_hold_the_end_of_the_prompt_too() -> None:
    own = joining()
    own.add_tokens(["\n-"])
    own.chat_template = turns("message.role + '\n'", "</s>\n")
    assert filter_rows([chat("q", "-Hello")], own)[1] == {"kept": 1, "start_in_a_token": 1}
    taking = tokenizers.AddedToken("<|assistant|>", rstrip=True, special=True)
    own.add_special_tokens({"additional_special_tokens": [taking]})
    own.chat_template = turns("'<|' + message.role + '|>\n'", "</s>\n")
    assert filter_rows([chat("q", " Hello")], own)[1] == {"kept": 1}, "it is the same token in the prompt"


@pytest.mark.filterwarnings("error")
def test_a_few_first_letters_are_no_reason_to_warn() -> None:
    own = joining(":a")
    own.chat_template = turns("message.role + ':'", "</s>\n")
    rows = [chat("q", "The answer"), ROW, ROW, chat("q", "all")]
    assert filter_rows(rows, own)[1] == {"kept": 4, "start_in_a_token": 1}


def test_numbered_rounds_end_no_answer() -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'user' %}"
        "{{ '[Round ' ~ (loop.index0 // 2 + 1) ~ ']\n问：' + message.content + '\n' }}{% else %}"
        "{{ '答：' + message.content + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '答：' }}{% endif %}"
    )
    own = tokenizer(template)
    with pytest.warns(UserWarning, match="no_end_of_turn"):
        assert filter_rows([ROW], own)[1] == {"kept": 1, "no_end_of_turn": 1}
    assert "Round" not in "".join(trained(ROW, own))


_HEADERS = {
    "numbers": ("<|assistant|>{{ n }}\n",) * 2,
    "a number inside": ("<|assistant turn={{ n }}|>", "<|assistant turn={{ n }}|>\n"),
    "words": ("<|assistant|>{{ 'opening' if n == 1 else 'first' if n <= 2 else 'later' }}: ",) * 2,
}


def _varying(header: str, prompt: str) -> str:
    return (
        "{% for m in messages %}{% set n = loop.index %}{% if m.role == 'assistant' %}"
        + header
        + "{% else %}"
        "<|{{ m.role }}|>\n{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}{% set n = messages|length + 1 %}" + prompt + "{% endif %}"
    )


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("name", _HEADERS)
def test_of_prompts_that_vary_from_turn_to_turn_no_part_is_trained(name: str, opens: bool) -> None:
    """What two of them have in common is no header: right, or refused."""
    own, _ = tokenizer_for(_varying(*_HEADERS[name]))
    row = {"messages": chat("Q", "hello", "Q", "later answer")["messages"][opens:]}
    try:
        found = "".join(trained(row, own))
    except ChatTemplateError:
        return
    assert found.replace("\n", "") == "hello<|end|>later answer<|end|>"


# --- where an answer begins, and what ends it, is found, or it is said that nothing does --------------------

_OPENING = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}{% if message.reasoning_content %}"
    "{{ '{{plan}}' + message.reasoning_content + '{{/plan}}' }}{% endif %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>{{plan}}' }}{% endif %}"
)
# In Harmony's manner: an answer may have a channel of reasoning, and the prompt names no channel.
_CHANNELS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + (message.reasoning_content or '') }}"
    "{{ '<|end|>' }}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}"
    "{% else %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
_FIRST = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ '[INST]' + message.content + "
    "('\n\nReply in French' if loop.first else '') + '[/INST]' }}{% else %}"
    "{{ message.content + '</s>' }}{% endif %}{% endfor %}"
)
_TELLING = (
    "{% set ns = namespace(name='') %}{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ '<|tool|>' + ns.name + ':' + message.content }}{% else %}"
    "{{ '<|' + message.role + '|>' + message.content }}{% for call in message.tool_calls or [] %}"
    "{% set ns.name = call.function.name %}{{ ns.name + (call.function.arguments | tojson) }}{% endfor %}"
    "{% if message.role == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_CLOSING = "<|close|>response<|sep|><|open|>end<|msg|>"
_CALLS = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + call.function.name + '</call>' }}"
    "{% endfor %}"
    "{% if message.role == 'assistant' %}{{ '<|close|>x<|msg|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_TAGS = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}{% if message.role == 'assistant' %}"
    "{{ '<|START_TEXT|>' + message.content + '<|END_TEXT|>' }}{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><|START_THINKING|>' }}{% endif %}"
)


def _calling(arguments: Any, *more: tuple[str, str], question: str = "q") -> dict[str, Any]:
    row = chat(question, "", *more)
    row["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": arguments}}]
    return row


# By what begins or ends an answer: a tokenizer with the template and its tokens, a row, and how it is shown.
EDGES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a prompt that opens reasoning as rows with reasoning do": (
        tokenizer(_OPENING, "<|user|>", "<|assistant|>", "<|end|>"),
        {
            "messages": [
                *chat("q")["messages"],
                {**chat("q", "one")["messages"][1], "reasoning_content": "why"},
            ]
        },
        "<|user|>q<|assistant|>{{plan}}⟦why{{/plan}}one<|end|>⟧",
    ),
    "the first of two headers": (
        tokenizer(
            _CHANNELS,
            *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
            eos="<|return|>",
        ),
        chat("q", "one"),
        "<|start|>assistant<|channel|>analysis<|message|><|end|>⟦<|start|>assistant<|channel|>final<|message|>"
        "one<|return|>⟧",
    ),
    "a first question with a text of its own": (
        tokenizer(_FIRST, "[INST]", "[/INST]"),
        ROW,
        "[INST]q\n\nReply in French[/INST]⟦one</s>⟧[INST]r[/INST]⟦two</s>⟧",
    ),
    **{
        f"a call of {text}, which has no text to mark": (
            tokenizer(_TELLING),
            _calling(arguments, ("tool", "3"), ("assistant", "a"), question="7351000001537 7351000002 1537"),
            f"<|assistant|>⟦f{text}<|im_end|>⟧<|tool|>f:3<|assistant|>⟦a<|im_end|>⟧",
        )
        for arguments, text in (
            ({}, "{}"),
            ({"a": 1, "b": 2.5}, '{"a": 1, "b": 2.5}'),
            ({"on": True}, '{"on": true}'),
        )
    },
    "the EOS token behind other tokens": (
        tokenizer(
            turns("'<|' + message.role + '|>'", _CLOSING), "<|close|>", "<|sep|>", "<|msg|>", eos="<|msg|>"
        ),
        ROW,
        f"<|user|>q<|assistant|>⟦one{_CLOSING}⟧<|user|>r<|assistant|>⟦two{_CLOSING}⟧",
    ),
    "another token than EOS, which closes the conversation": (
        tokenizer(
            turns("'<|' + message.role + '|>\n'", "<|im_end|>\n", "<|im_end|>\n</s>"),
            "<|user|>",
            "<|assistant|>",
        ),
        ROW,
        "⟦two<|im_end|>⟧\n</s>",
    ),
    "the EOS token behind another one, after calls": (
        tokenizer(_CALLS, "<|close|>", "<|msg|>", "</call>", eos="<|msg|>"),
        _calling({}, ("tool", "r"), ("assistant", "a")),
        "<|user|>q<|assistant|>⟦<call>f</call><|close|>x<|msg|>⟧<|tool|>r<|assistant|>⟦a<|close|>x<|msg|>⟧",
    ),
    "a tag, where one begins the answer as one of the prompt's begins": (
        tokenizer(
            _TAGS,
            *("<|START_TEXT|>", "<|START_THINKING|>", "<|END_TEXT|>", "<|user|>", "<|assistant|>"),
            eos="<|END_TEXT|>",
        ),
        chat("q", "a"),
        "<|user|>q<|assistant|>⟦<|START_TEXT|>a<|END_TEXT|>⟧",
    ),
    "what follows nested arguments printed as Python": (
        tokenizer(
            ct.CHATML.replace(
                "'arguments': call.function.arguments} | tojson)", "'a': call.function.arguments} | string)"
            )
        ),
        _calling({"deep": {"a": ["x y", 1, True], "b": None}}),
        "⟦\n<tool_call>\n{'name': 'f', 'a': {'deep': {'a': ['x y', 1, True], 'b': None}}}\n</tool_call>"
        "<|im_end|>⟧\n",
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("what", EDGES)
def test_an_answer_is_trained_from_its_beginning_through_what_ends_it(what: str) -> None:
    own, row, expected = EDGES[what]
    assert shown(row, own).endswith(expected)
    noted = {"empty_reasoning": 1} if what == "the first of two headers" else {}  # its channel of reasoning
    assert filter_rows([row], own)[1] == {"kept": 1, **noted}


def test_an_end_of_turn_that_is_no_token_is_trained_as_text_with_a_warning() -> None:
    own = tokenizer(turns("'<|' + message.role + '|>\n'", "<|stop|>\n"))
    with pytest.warns(
        UserWarning, match=r"1 of 1 rows are counted as end_of_turn_is_text: .* new_vocab_size="
    ):
        assert trained(ROW, own) == ["one<|stop|>", "two<|stop|>"]
    with pytest.warns(UserWarning, match="1 of 1 rows are counted as end_of_turn_is_text"):
        assert filter_rows([ROW], own)[1] == {"kept": 1, "end_of_turn_is_text": 1}
    own.add_special_tokens({"additional_special_tokens": ["<|stop|>"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shown(ROW, own).count("⟦two<|stop|>⟧\n") == 1
        assert filter_rows([ROW], own)[1] == {"kept": 1}


def test_a_last_answer_without_an_end_is_counted() -> None:
    header = "'<|' + message.role + '|>\n'"
    for template, past in (
        (turns(header, ""), "⟦one⟧<|user|>"),
        (turns(header, "<|end|>", ""), "⟦one<|end|>⟧"),
    ):
        own = tokenizer(template, "<|user|>", "<|assistant|>", "<|end|>")
        assert past in shown(ROW, own)
        assert shown(ROW, own).endswith("⟦two⟧")
        with pytest.warns(UserWarning, match="1 of 1 rows are counted as no_end_of_turn: .* chat_template="):
            counts = filter_rows([ROW], own)[1]
        assert counts == {"kept": 1, "no_end_of_turn": 1}
        assert "pass a chat_template= that writes the token there" in counts.examples["no_end_of_turn"][0]


def test_the_whole_header_of_reasoning_is_left_out_with_it() -> None:
    template = (
        "{% for message in messages %}{% if message.thinking %}"
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}"
        "{{ '<|start|>' + message.role + ('<|channel|>final' if message.role == 'assistant' else '') + "
        "'<|message|>' + message.content + ('<|return|>' if loop.last else '<|end|>') }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
    )
    own = tokenizer(
        template, "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", eos="<|return|>"
    )
    row = chat("q", "a")
    row["messages"][1]["thinking"] = "hm"
    whole = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>a<|return|>"
    assert shown(row, own).endswith(f"<|start|>assistant⟦{whole}⟧")
    reasoning, _, rest = whole.partition("<|start|>")
    assert shown(row, own, train_reasoning=False).endswith(f"<|start|>assistant{reasoning}⟦<|start|>{rest}⟧")


# --- an end that only past answers have -------------------------------------------------------------------


@pytest.mark.parametrize("end", ["</s>", "[[over]]", "@END@"])
@pytest.mark.parametrize("system", ["</x>", "[[x]]", "@XND@", "same"])
def test_the_end_of_the_default_system_message_may_look_alike(end: str, system: str) -> None:
    closed = end if system == "same" else system
    template = (
        f"{{{{ '<s>system\nBe brief.{closed}\n' }}}}"
        "{% for message in messages %}{{ '<s>' + message.role + '\n' + message.content }}"
        f"{{% if not loop.last %}}{{{{ '{end}\n' }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{end}\n<s>assistant\n' }}}}{{% endif %}}"
    )
    own = tokenizer(template, "<s>", end, eos=end)
    with pytest.warns(UserWarning, match="counted as no_end_of_turn"):
        assert filter_rows([ROW], own)[1] == {"kept": 1, "no_end_of_turn": 1}
    assert f"⟦one{end}⟧\n<s>user" in shown(ROW, own)


@pytest.mark.parametrize("end", ["</done>", "[[over]]"])
def test_the_end_of_past_answers_is_whole_where_it_is_text(end: str) -> None:
    closed = "</x>" if end == "</done>" else "[[x]]"
    template = (
        f"{{{{ '<|user|>Be brief.{closed}\n' }}}}"
        "{% for message in messages %}{{ '<|user|>' if message.role == 'user' else '<|assistant|>' }}"
        f"{{{{ message.content }}}}{{% if not loop.last %}}{{{{ '{end}\n' }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{end}\n<|assistant|>' }}}}{{% endif %}}"
    )
    own = tokenizer(template, "<|user|>", "<|assistant|>", eos="<|im_end|>")
    assert end not in own.get_vocab()
    with pytest.warns(UserWarning, match="counted as end_of_turn_is_text"):
        assert f"⟦one{end}⟧" in shown(ROW, own)
