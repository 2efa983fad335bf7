"""Chat templates, tokenizers without a download, and conversations written out by hand.

A family's `write` builds the conversation piece by piece from the format's description and knows for each
piece whether it is trained. It shares nothing with the library: no template, no offsets, no search.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Piece = tuple[str, bool]
SPECIALS = (
    "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]",
    "[TOOL_CALLS]", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<pad>",
)  # fmt: skip

_ROLE = "{{ '<|im_start|>' + message.role + '\\n' }}"
_CALLS = (
    "{% for call in message.tool_calls or [] %}{{ '\\n<tool_call>\\n' + "
    "({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\\n</tool_call>' }}"
    "{% endfor %}"
)
_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
)

CHATML = (
    _TOOLS
    + "{% for message in messages %}"
    + _ROLE
    + "{{ message.content }}"
    + _CALLS
    + "{{ '<|im_end|>\\n' }}"
    "{% endfor %}" + _PROMPT
)
CHATML_REASONING = CHATML.replace(
    "{{ message.content }}",
    "{% if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}"
    "{% endif %}{{ message.content }}",
)
CHATML_TAGGED = (
    "{% for message in messages %}" + _ROLE + "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}" + _PROMPT
)
# The tag starts before the header and ends before the end-of-turn token.
CHATML_TAGGED_BADLY = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}" + _ROLE
    + "{{ message.content }}{% endgeneration %}{% else %}" + _ROLE + "{{ message.content }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}" + _PROMPT
)  # fmt: skip
CHATML_TAGGED_IN_MACRO = (
    "{% macro turn(message) %}" + _ROLE + "{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}"
    "{% endif %}{{ '\\n' }}{% endmacro %}{% for message in messages %}{{ turn(message) }}{% endfor %}"
    + _PROMPT
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
    "{{ message.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message.role == 'assistant' else "
    "message.role %}{{ '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ message.content + eos_token }}{% else %}{{ '[INST]' + message.content + '[/INST]' }}{% endif %}"
    "{% endfor %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ bos_token + '[INST] ' + "
    "message.content.strip() + ' [/INST]' }}{% else %}"
    "{{ ' ' + message.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# No end-of-turn token: generation stops at the next header, which is not the assistant's.
GLM = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
# Without a generation prompt the text is closed with another token.
PHI3 = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# Thinking is dropped from answers before the last question and is never left out after it.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}{% set content = message.content %}"
    "{% set thought = '' %}{% if message.reasoning_content is string %}"
    "{% set thought = message.reasoning_content %}{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}{{ '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + "
    "'\\n</think>\\n\\n' + content.lstrip('\\n') }}{% else %}{{ '<|im_start|>assistant\\n' + content }}"
    "{% endif %}{% else %}"
    + _ROLE
    + "{{ message.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    + _PROMPT
)


def _turns(
    head: Callable[[str], str], stop: str, tail: str, *, bos: str = "", trim: bool = False, close: str = ""
) -> Callable[[list[dict[str, Any]]], list[Piece]]:
    def write(messages: list[dict[str, Any]]) -> list[Piece]:
        pieces: list[Piece] = [(bos, False)]
        for message in messages:
            answer = message["role"] == "assistant"
            text = message["content"].strip() if trim else message["content"]
            pieces += [(head(message["role"]), False), (text, answer), (stop, answer), (tail, False)]
        return [*pieces, (close, False)]

    return write


def _instructions(
    question: str, answer: str, *, bos: str = "", trim: bool = False
) -> Callable[[list[dict[str, Any]]], list[Piece]]:
    def write(messages: list[dict[str, Any]]) -> list[Piece]:
        pieces: list[Piece] = [(bos, False)]
        for message in messages:
            trained = message["role"] == "assistant"
            text = message["content"].strip() if trim else message["content"]
            pieces.append(((answer if trained else question).format(text), trained))
        return pieces

    return write


def _write_qwen3(messages: list[dict[str, Any]]) -> list[Piece]:
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    pieces: list[Piece] = []
    for index, message in enumerate(messages):
        pieces.append((f"<|im_start|>{message['role']}\n", False))
        text = message["content"]
        if message["role"] == "assistant":
            thought = ""
            if "</think>" in text:
                thought = text.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
                text = text.split("</think>")[-1].lstrip("\n")
            if index > last:  # an empty block is no answer's
                text = text.lstrip("\n")
                block = "<think>\n" + thought.strip("\n") + "\n</think>\n\n"
                pieces.append((block, bool(thought.strip("\n"))))
        answer = message["role"] == "assistant"
        pieces += [(text, answer), ("<|im_end|>", answer), ("\n", False)]
    return pieces


@dataclass(frozen=True)
class Family:
    """A chat format: its template, its special tokens, and how a conversation looks in it."""

    template: str
    write: Callable[[list[dict[str, Any]]], list[Piece]]
    bos: str | None = None
    eos: str = "<|endoftext|>"
    system: bool = True


_bar = "<|{}|>\n".format
_chatml = _turns("<|im_start|>{}\n".format, "<|im_end|>", "\n")
FAMILIES = {
    "chatml": Family(CHATML, _chatml),
    "chatml-eos": Family(CHATML, _chatml, eos="<|im_end|>"),
    "chatml-tagged": Family(CHATML_TAGGED, _chatml),
    "chatml-tagged-badly": Family(CHATML_TAGGED_BADLY, _chatml),
    "chatml-tagged-in-macro": Family(CHATML_TAGGED_IN_MACRO, _chatml),
    "llama3": Family(
        LLAMA3,
        _turns(lambda role: f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "",
               bos="<|begin_of_text|>", trim=True),
        bos="<|begin_of_text|>", eos="<|eot_id|>",
    ),
    "gemma": Family(
        GEMMA,
        _turns(lambda role: f"<start_of_turn>{'model' if role == 'assistant' else role}\n",
               "<end_of_turn>", "\n", bos="<bos>", trim=True),
        bos="<bos>", eos="</s>", system=False,
    ),
    "zephyr": Family(ZEPHYR, _turns(_bar, "</s>", "\n"), eos="</s>"),
    "mistral": Family(
        MISTRAL, _instructions("[INST]{}[/INST]", "{}</s>", bos="<s>"),
        bos="<s>", eos="</s>", system=False,
    ),
    "llama2": Family(
        LLAMA2, _instructions("<s>[INST] {} [/INST]", " {} </s>", trim=True),
        bos="<s>", eos="</s>", system=False,
    ),
    "glm": Family(GLM, _turns(_bar, "", "")),
    "phi3": Family(PHI3, _turns(_bar, "<|end|>", "\n", close="<|endoftext|>")),
    "qwen3": Family(QWEN3, _write_qwen3, eos="<|im_end|>"),
}  # fmt: skip


def byte_tokenizer(family: Family | str = "chatml", **changes: Any) -> PreTrainedTokenizerFast:
    """One token per byte and per special token, so that the expected labels can be counted out.

    ``template`` takes the place of the family's.
    """
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return _wrap(Tokenizer(models.BPE(vocab=vocabulary, merges=[])), family, **changes)


def bpe_tokenizer(family: Family | str = "chatml", **changes: Any) -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges over spaces, words and newlines."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    lines = [
        "hello there world",
        "the answer is\n\nfine\n",
        "assistant\n\n\nuser\n",
        "what is the answer?",
    ] * 20
    tokenizer.train_from_iterator(lines, trainer)
    return _wrap(tokenizer, family, **changes)


def _wrap(
    tokenizer: Tokenizer, family: Family | str, template: str | None = None, **changes: Any
) -> PreTrainedTokenizerFast:
    family = FAMILIES[family] if isinstance(family, str) else family
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    settings: dict[str, Any] = {"eos_token": family.eos, "pad_token": "<pad>"}
    if family.bos:
        settings["bos_token"] = family.bos
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**settings, **changes})
    wrapped.chat_template = template or family.template
    return wrapped


def expected_marks(pieces: Iterable[Piece]) -> tuple[str, list[bool]]:
    """(text, one flag per token of `byte_tokenizer`) of a conversation written by hand."""
    pattern = re.compile("(" + "|".join(map(re.escape, sorted(SPECIALS, key=len, reverse=True))) + ")")
    text, marks = "", []
    for piece, trained in pieces:
        text += piece
        for part in pattern.split(piece):
            marks += [trained] * (1 if part in SPECIALS else len(part.encode()))
    return text, marks
