"""What ends an answer is trained, or it is said that nothing does."""

import warnings
from typing import Any

import pytest

from fsdp_sft.collate import filter_rows
from tests.collate.written import ROW, tokenizer, turns
from tests.harness import chat_templates as ct
from tests.harness.chats import chat, shown

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


def _calling(arguments: Any, *more: dict[str, str]) -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": arguments}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"messages": [{"role": "user", "content": "q"}, asked, *more]}


# By what ends an answer: a tokenizer with the template and its tokens, a row, and how the row is shown.
ENDS: dict[str, tuple[Any, dict[str, Any], str]] = {
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
        _calling({}, {"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"}),
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


@pytest.mark.parametrize("what", ENDS)
def test_an_answer_is_trained_through_what_ends_it(what: str) -> None:
    own, row, expected = ENDS[what]
    assert shown(row, own).endswith(expected)


def test_an_end_of_turn_that_is_no_token_is_trained_as_text_with_a_warning() -> None:
    own = tokenizer(turns("'<|' + message.role + '|>\n'", "<|stop|>\n"))
    with pytest.warns(
        UserWarning, match=r"1 of 1 rows are counted as end_of_turn_is_text: .* new_vocab_size="
    ):
        text = shown(ROW, own)
    assert text.count("⟦one<|stop|>⟧\n") == text.count("⟦two<|stop|>⟧\n") == 1
    with pytest.warns(UserWarning, match="1 of 1 rows are counted as end_of_turn_is_text"):
        _, counts = filter_rows([ROW], own)
    assert counts == {"kept": 1, "end_of_turn_is_text": 1}
    own.add_special_tokens({"additional_special_tokens": ["<|stop|>"]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shown(ROW, own).count("⟦two<|stop|>⟧\n") == 1
    _, counts = filter_rows([ROW], own)
    assert counts == {"kept": 1}


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
            _, counts = filter_rows([ROW], own)
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


def test_a_call_without_a_text_to_mark() -> None:
    template = (
        "{% set ns = namespace(name='') %}{% for message in messages %}{% if message.role == 'tool' %}"
        "{{ '<|tool|>' + ns.name + ':' + message.content }}{% else %}"
        "{{ '<|' + message.role + '|>' + message.content }}{% for call in message.tool_calls or [] %}"
        "{% set ns.name = call.function.name %}{{ ns.name + (call.function.arguments | tojson) }}{% endfor %}"
        "{% if message.role == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    own = tokenizer(template)
    for arguments, text in (
        ({}, "{}"),
        ({"a": 1, "b": 2.5}, '{"a": 1, "b": 2.5}'),
        ({"on": True}, '{"on": true}'),
    ):
        call = {"function": {"name": "add", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "7351000001537 7351000002 1537"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "a"},
        ]
        assert shown({"messages": messages}, own).endswith(
            f"<|assistant|>⟦add{text}<|im_end|>⟧<|tool|>add:3<|assistant|>⟦a<|im_end|>⟧"
        )


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
        _, counts = filter_rows([ROW], own)
    assert counts == {"kept": 1, "no_end_of_turn": 1}
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
