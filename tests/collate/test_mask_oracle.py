"""The labels of the templates written for these tests against the brute force of ``mask_oracle``.

``python -m tests.collate.corpus FOLDER`` does the same on public templates.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from fsdp_sft import IGNORE_INDEX, ChatTemplateError, encode_chat
from fsdp_sft.collate import encode, template
from tests.collate import mask_oracle as oracle
from tests.collate.template_tokenizers import byte_tokenizer, forms
from tests.harness import chat_templates as ct
from tests.harness.chats import chat

# On which tokens a model stops, by its template.
OWN_STOPS = {
    "chatml": ["<|im_end|>"], "chatml-eos": ["<|im_end|>"], "chatml-tagged": ["<|im_end|>"],
    "chatml-tagged-badly": ["<|im_end|>"], "chatml-tagged-in-macro": ["<|im_end|>"],
    "llama3": ["<|eot_id|>"], "gemma": ["<end_of_turn>"], "zephyr": ["</s>"], "mistral": ["</s>"],
    "llama2": ["</s>"], "glm": [], "phi3": ["<|end|>"], "qwen3": ["<|im_end|>"],
}  # fmt: skip


def _judge(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], tools: Any, stops: list[str]
) -> tuple[str, str]:
    expected = oracle.expected(forms(tokenizer, tools, {}), messages, stops)
    row = {"messages": messages, **({"tools": tools} if tools else {})}
    try:
        encoded = encode_chat(row, tokenizer, on_dropped="count", empty_reasoning="train")
        masked = encode_chat(row, tokenizer, on_dropped="count")
    except (ChatTemplateError, ValueError) as error:
        return ("refused rightly", expected) if isinstance(expected, str) else ("refused", str(error))
    if isinstance(expected, str):
        return "not judged", expected
    text, characters, is_lost = expected
    if ("dropped" in encoded.notes) != is_lost:
        return "wrong", f"a text is left out: {is_lost}, noted: {encoded.notes}"
    found = oracle.difference(tokenizer, text, characters, encoded)
    if found == "the tokens are others":
        for key in ("reasoning_content", "thinking"):  # where the template reads it
            apart = [_apart(message, key) for message in messages]
            if apart != messages and encode_chat({"messages": apart}, tokenizer) == masked:
                return _judge(tokenizer, apart, tools, stops)
    if found:
        return "wrong", found
    block = [a for a, b in zip(encoded.labels, masked.labels, strict=True) if a != b]
    if not re.fullmatch(r"(?:<[^<>]*>|thought|\s)*", tokenizer.decode(block)):
        return "wrong", f"no empty block: {tokenizer.decode(block)!r}"
    return "exact", ""


def _apart(message: dict[str, Any], key: str) -> dict[str, Any]:
    found = re.fullmatch(r"\s*<think>(.*?)</think>(.*)", message["content"], re.DOTALL)
    return {**message, key: found[1].strip(), "content": found[2].lstrip()} if found else message


def _check(name: str, tokenizer: PreTrainedTokenizerFast, stops: list[str]) -> None:
    bare, prompted = (next(forms(tokenizer, None, {}))(chat("q")["messages"], on) for on in (False, True))
    counts: Counter[str] = Counter()
    problems = []
    for kind, messages, tools in oracle.chats(stops, prompted.removeprefix(bare)):
        verdict, detail = _judge(tokenizer, messages, tools, stops)
        counts[verdict] += 1
        if verdict in ("wrong", "refused", "not judged"):
            problems.append(f"{kind}: {verdict}: {detail}")
    print(f"{name:34s} {dict(counts)}", *problems, sep="\n    ")
    assert counts["wrong"] == counts["refused"] == counts["not judged"] == 0, problems
    assert counts["exact"] >= 18


@pytest.mark.parametrize("name", OWN_STOPS)
def test_labels_are_those_of_the_brute_force(name: str) -> None:
    assert OWN_STOPS.keys() == ct.FAMILIES.keys()
    _check(name, ct.byte_tokenizer(name), OWN_STOPS[name])


# Of each message, so that many conversations have the same texts of the template around others of their own.
CHANGES: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (
    lambda _: {},
    lambda message: {"content": message["content"].swapcase() + "!"},
    lambda message: {"content": "" if message["role"] == "assistant" else "b"},
    lambda message: {"content": " \n" if message["role"] == "assistant" else "c"},
    lambda message: {"train": int(message["content"] > "m")},
)


@pytest.mark.parametrize("name", OWN_STOPS)
def test_conversations_alike_get_the_labels_that_each_gets_alone(name: str) -> None:
    tokenizer, options = ct.byte_tokenizer(name), encode.EncodeOptions(on_dropped="count")
    rows = [
        {"messages": [{**message, **change(message)} for message in messages], "tools": tools}
        for (_, messages, tools), change in product(oracle.chats(OWN_STOPS[name], "assistant\n"), CHANGES)
    ]
    for row, chat_of_many in zip(rows, encode.encode_rows(rows, tokenizer, options), strict=True):
        template._KNOWN.clear()
        assert list(map(repr, encode.encode_rows([row], tokenizer, options))) == [repr(chat_of_many)]


MISTAKES: dict[str, Any] = {
    "one token late": lambda turn: replace(turn, start=turn.start + 1),
    "header trained": lambda turn: replace(turn, start=turn.start - 1),
    "stop left out": lambda turn: replace(turn, end=turn.stop_start),
    "all": lambda turn: replace(turn, start=0),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_brute_force_finds_mistakes(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_turns = encode.find_turns

    def wrong(*args: Any, **options: Any) -> Any:
        found = find_turns(*args, **options)
        return replace(found, turns=[MISTAKES[mistake](turn) for turn in found.turns])

    monkeypatch.setattr(encode, "find_turns", wrong)
    with pytest.raises(AssertionError):
        _check("chatml", ct.byte_tokenizer("chatml"), OWN_STOPS["chatml"])


# --- reasoning: what a prompt supplies in some mode is not trained -----------------------------------------

_BLOCK = "<think>\n\n</think>\n\n"
_THINK = ("<think>\n", "\n</think>\n\n", _BLOCK)
# Of each kind of template: the key that it reads, the texts before and behind reasoning and in its absence,
# the ends of its prompt by default, with enable_thinking=True and =False, and whether it reads think tags.
THINKERS: dict[str, tuple[Any, ...]] = {
    "qwen3": ("reasoning_content", *_THINK, "", "", _BLOCK, True),
    "qwen3.5": ("reasoning_content", *_THINK, "<think>\n", "<think>\n", _BLOCK, True),
    "qwen3.5 off": ("reasoning_content", *_THINK, _BLOCK, "<think>\n", _BLOCK, True),
    "qwen3.8": ("reasoning_content", *_THINK, "<think>\n", "<think>\n", _BLOCK, False),
    "glm": ("reasoning", "\n<think>", "</think>\n", "\n<think></think>\n", "", "", "\n<think></think>", True),
    "nemotron": ("reasoning", *_THINK[:2], "<think></think>", *["<think>\n"] * 2, "<think></think>", False),
    "gpt-oss": ("thinking", "<|think|>", "<|end|><|final|>", "<|final|>", "", "", "", False),
    "minicpm": ("reasoning_content", *_THINK[:2], "", "", "<think>\n", _BLOCK, True),
    "gemma": ("reasoning", "<|channel>thought\n", "\n<channel|>", "", "", "", "", False),
    "no modes": ("reasoning_content", *_THINK, "", "", "", True),
    "no key": ("", "", "", "", "", "", "", False),
}
KINDS = {
    "none": {"content": "ANS"},
    "field": {"content": "ANS", **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "WHY")},
    "inline": {"content": "<think>\nWHY\n</think>\n\nANS"},
    "closing tag": {"content": "WHY\n</think>\n\nANS"},
}


def _thinker(name: str) -> PreTrainedTokenizerFast:
    *texts, reads = THINKERS[name]
    key, opening, closing, empty, plain, on, off = (json.dumps(text) for text in texts)
    cut = (
        "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}"
        "{% set said = said.split('</think>')[-1].lstrip() %}"
    )
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
        "{% set said = message.content %}"
        f"{{% if message.role == 'assistant' %}}{{% set thought = message[{key}] %}}"
        f"{{% if {json.dumps(reads)} and '</think>' in said %}}{cut}{{% endif %}}"
        f"{{{{ {opening} + thought + {closing} if thought else {empty} }}}}{{% endif %}}"
        "{{ said + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        f"{{{{ {plain} if enable_thinking is not defined else {on} if enable_thinking else {off} }}}}"
        "{% endif %}"
    )
    return byte_tokenizer(template, ["<|im_end|>"], "<|im_end|>")


def _trained(tokenizer: PreTrainedTokenizerFast, kind: str, option: str, stops: list[str], block: str) -> str:
    """What is to be trained of an answer: what no prompt supplies, through the token that stops."""

    def after_the_question(answer: dict[str, str] | None, **mode: bool) -> str:
        chat = [{"role": "user", "content": "QQQ"}, *([{"role": "assistant", **answer}] if answer else [])]
        for render in forms(tokenizer, None, mode):
            with suppress(Exception):
                if "QQQ" in (text := render(chat, not answer)):
                    return text.rpartition("QQQ")[2]
        raise oracle.CannotTellError("the template raises")

    text, field = (after_the_question(KINDS[one]) for one in (kind, "field"))
    if kind != "none" and "WHY" in field and "".join(text.split()) != "".join(field.split()):
        text = field
    prompts = [
        after_the_question(None),
        *(after_the_question(None, enable_thinking=on) for on in (True, False)),
    ]
    # Where another mode goes on from the row's own prompt, the model is to open reasoning by itself.
    others = prompts if kind == "none" else [one for one in prompts if not one.startswith(prompts[0])]
    supplied = [prompts[0], prompts[0].partition("<think>")[0], *others]
    if kind == "none" and option == "train":
        supplied = [*supplied[:2], *(prompt for prompt in prompts if "</think>" not in prompt)]
    elif kind == "none":
        supplied.append(supplied[1] + block)
    start = max(n for prompt in supplied for n in range(len(text) + 1) if prompt.endswith(text[:n]))
    ends = [at + len(stop) for stop in stops if (at := text.find(stop, text.index("ANS"))) >= 0]
    return text[start : min(ends, default=text.index("ANS") + 3)]


def _check_reasoning(tokenizer: PreTrainedTokenizerFast, stops: list[str], block: str = "") -> Counter[str]:
    found: Counter[str] = Counter()
    for kind, option in product(KINDS, ("mask", "train")):
        row = [{"role": "user", "content": "QQQ"}, {"role": "assistant", **KINDS[kind]}]
        chat = encode_chat({"messages": row}, tokenizer, empty_reasoning=option, on_dropped="count")  # type: ignore[arg-type]
        trained = tokenizer.decode([label for label in chat.labels if label != IGNORE_INDEX])
        noted = {"dropped"} & {*chat.notes}
        if kind == "field" and "WHY" in trained:  # of three keys at most one is printed
            noted.discard("dropped")
        expected = _trained(tokenizer, kind, option, stops, block)
        assert noted or trained == expected, f"{kind}, {option}: {trained!r} for {expected!r}"
        found["noted" if noted else "equal"] += 1
    return found


@pytest.mark.parametrize("name", [*THINKERS, *(f"family {name}" for name in OWN_STOPS)])
def test_what_a_prompt_supplies_is_not_trained(name: str) -> None:
    family = name.removeprefix("family ")
    # What "no modes" and the family "qwen3" print in the place of reasoning is in no prompt of theirs.
    if name in THINKERS:
        found = _check_reasoning(_thinker(name), ["<|im_end|>"], _BLOCK * (name == "no modes"))
    else:
        found = _check_reasoning(ct.byte_tokenizer(family), OWN_STOPS[family], _BLOCK * (family == "qwen3"))
    # Those of templates that read no reasoning.
    assert found["noted"] == 2 * (name == "no key" or (name not in THINKERS and family != "qwen3"))
