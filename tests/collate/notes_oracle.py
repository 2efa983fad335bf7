"""Notes and warnings on every template of some folders: ``python -m tests.collate.notes_oracle FOLDER...``

Each template encodes conversations of four kinds: answers of text, with a tool call, with reasoning, with
both. Whether a note holds is judged by ``apply_chat_template`` alone, on the messages before an answer with
and without a generation prompt, on the whole conversation, and with answers of other kinds in the same place.
Each text is a word that no template has, so that it is found by searching. A template without its vocabulary
gets one of bytes, some pairs of them, and the special tokens that it writes.

A note that does not hold is *false*: a person who follows it changes a template that is right. One that holds
and is not given is *missing*.
"""

import argparse
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_sft.collate import IGNORE_INDEX, ChatTemplateError, EncodedChat, encode_chat
from tests.collate.mask_oracle import TOOLS, Render
from tests.collate.template_tokenizers import forms, tokenizer_for

KINDS = ("text", "tool call", "reasoning", "both")
# What a generation prompt opens, and may close again, for answers with reasoning.
THINKS = re.compile(
    r"(?:\s|</?think[^<>]*>|\[/?THINK\]|<\|(?:START|END)_THINKING\|>|<\|channel>thought|<channel\|>)*"
)
CLOSES = re.compile(r"(?:</think[^<>]*>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>)\s*")
FIRST = ("Firstzq", "Secondzq", "Thirdzq")

Messages = list[dict[str, Any]]


def rows(kind: str) -> list[Messages]:
    """Conversations of a kind, each text a word of its own."""

    def user(n: int) -> dict[str, Any]:
        return {"role": "user", "content": f"Askzq{n}zq"}

    def answer(n: int, **more: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": f"Tellzq{n}zq", **more}

    def call(n: int, **more: Any) -> dict[str, Any]:
        function = {"name": "weather", "arguments": {"city": f"Cityzq{n}zq"}}
        made = {"id": f"call{n:05d}", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [made], **more}

    def result(n: int) -> dict[str, Any]:
        content = f"Gotzq{n}zq"
        return {"role": "tool", "name": "weather", "tool_call_id": f"call{n:05d}", "content": content}

    def why(n: int) -> dict[str, str]:
        return {"reasoning_content": f"Whyzq{n}zq"}

    system = {"role": "system", "content": "Ruleszq"}
    return {
        "text": [[user(1), answer(2)], [system, user(1), answer(2), user(3), answer(4)]],
        "tool call": [
            [user(1), call(2)],
            [user(1), call(2), result(2), answer(3)],
            [user(1), answer(2), user(3), call(4), result(4), answer(5), user(6), call(7)],
        ],
        "reasoning": [
            [user(1), answer(2, **why(2))],
            [user(1), answer(2, **why(2)), user(3), answer(4, **why(4))],
            [user(1), {"role": "assistant", "content": "<think>\nWhyzq2zq\n</think>\n\nTellzq2zq"}],
        ],
        "both": [
            [user(1), call(2, **why(2))],
            [user(1), call(2, **why(2)), result(2), answer(3, **why(3))],
            [user(1), call(2, **why(2), content="Tellzq2zq"), result(2), answer(3)],
        ],
    }[kind]


def words(message: dict[str, Any]) -> list[str]:
    """The texts of a message, one word each."""
    return re.findall(r"(?:Ask|Tell|City|Got|Why)zq\d+zq|Ruleszq", str(message))


def _after(text: str, message: dict[str, Any]) -> str | None:
    """What follows the last text of a message; None if none of them is printed."""
    ends = [text.rfind(word) + len(word) for word in words(message) if word in text]
    return text[max(ends) :] if ends else None


def _shared(texts: list[str]) -> str:
    """What all texts begin with."""
    same = itertools.takewhile(lambda chars: len(set(chars)) == 1, zip(*texts, strict=False))
    return "".join(chars[0] for chars in same)


def _up_to(text: str, message: dict[str, Any]) -> str:
    """What stands in front of the first text of a message."""
    return text[: min((text.find(word) for word in words(message) if word in text), default=len(text))]


class Answer:
    """An answer to a question or to a tool: what stands around it, as the template renders it.

    Attributes:
        asked: What follows the question without a generation prompt.
        prompted: The same with one.
        told: What follows the question in the conversation.
        begun: What is in front of the answer's first text.
    """

    def __init__(self, render: Render, messages: Messages, index: int) -> None:
        before, question = messages[:index], messages[index - 1]
        texts = (render(before, False), render(before, True), render(messages, False))
        self.asked, self.prompted, self.told = (_after(text, question) or "" for text in texts)
        self.is_printed = all(_after(text, question) is not None for text in texts)
        self.begun = _up_to(self.told, messages[index])

    @property
    def prompt(self) -> str:
        """The prompt, without an opening of reasoning that this answer does not have."""
        ends = range(len(self.prompted), -1, -1)
        rests = {end: self.prompted[end:] for end in ends}
        opened = [
            self.prompted[:end]
            for end, rest in rests.items()
            if not rest or (rest.strip() and THINKS.fullmatch(rest))
        ]
        return next((prompt for prompt in opened if self.told.startswith(prompt)), opened[0])


def answers(render: Render, messages: Messages) -> list[Answer]:
    """The answers that follow a message of another role that is printed."""
    asked = [i for i, m in enumerate(messages) if i and m["role"] == "assistant" != messages[i - 1]["role"]]
    return [answer for answer in (Answer(render, messages, i) for i in asked) if answer.is_printed]


def holds(
    name: str, tokenizer: Any, render: Render, messages: Messages, tools: Any, labels: list[int]
) -> bool:
    """Whether a note is true of a conversation."""
    text = render(messages, False)
    lost = [(i, word) for i, m in enumerate(messages) for word in words(m) if word not in text]
    last_question = max(i for i, message in enumerate(messages) if message["role"] == "user")
    lost_past = [(i, word) for i, word in lost if word.startswith("Why") and i < last_question]
    of_answers = [(i, word) for i, word in lost if messages[i]["role"] == "assistant"]
    if name == "prompt_differs":
        return not all(answer.told.startswith(answer.prompt) for answer in answers(render, messages))
    if name == "start_in_a_token":
        return any(_cuts_a_token(tokenizer, text, labels, answer) for answer in answers(render, messages))
    if name in ("no_end_of_turn", "end_of_turn_is_text"):
        tokens, ending = _endings(tokenizer, render)
        if name == "end_of_turn_is_text":
            return bool(ending) and not tokens
        told = _after(text, messages[-1]) or ""
        return not told.rstrip().endswith(tuple(_added(tokenizer))) and not any(
            end in told for end in (*tokens, str(tokenizer.eos_token), *([ending] if ending else []))
        )
    if name == "dropped":
        return len(of_answers) > len(lost_past)
    if name == "context_dropped":
        question = {"role": "user", "content": "Askzq1zq"}
        return len(lost) > len(of_answers) or (bool(tools) and "weather" not in render([question], False))
    if name == "empty_reasoning":
        return any(CLOSES.search(each.begun, len(each.prompt)) for each in answers(render, messages))
    raise ValueError(f"no judgement of {name}; write one")


def _endings(tokenizer: Any, render: Render) -> tuple[list[str], str]:
    """(tokens, text) with which the last answer ends, or else one before another question."""
    roles = ("user", "assistant", "user")
    chat = [{"role": role, "content": word} for role, word in zip(roles, FIRST, strict=True)]
    ending = render(chat[:2], False).partition(FIRST[1])[2]
    added = _added(tokenizer)
    if ending.strip():
        return [token for token in added if token in ending], ending.strip()
    past = render(chat, False).partition(FIRST[1])[2].partition(FIRST[2])[0]
    header = render(chat[:1], False).partition(FIRST[0])[0]
    same = _shared([header[::-1], past[::-1]])
    return [token for token in added if past.lstrip().startswith(token)], past[
        : len(past) - len(same)
    ].strip()


def _added(tokenizer: Any) -> list[str]:
    return [token.content for token in tokenizer.added_tokens_decoder.values()]


def _cuts_a_token(tokenizer: Any, text: str, labels: list[int], answer: Answer) -> bool:
    """Whether a token that is not trained begins before the answer, and ends within it.

    The answer begins behind the prompt, or behind what both have; with generation tags perhaps at its text.
    """
    shared = answer.prompt if answer.told.startswith(answer.prompt) else _shared([answer.prompt, answer.told])
    block = CLOSES.search(answer.begun, len(shared))  # an empty one is not trained
    edges = {len(text) - len(answer.told) + (block.end() if block else len(shared))}
    if "generation" in tokenizer.chat_template.replace("add_generation", ""):
        edges.add(len(text) - len(answer.told) + len(answer.begun))
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    untrained = [span for span, label in zip(spans, labels, strict=True) if label == IGNORE_INDEX]
    return any(start < edge < end for start, end in untrained for edge in edges)


def said(tokenizer: Any, messages: Messages, tools: Any) -> tuple[EncodedChat, list[str]] | None:
    """(the encoded row, warnings) of the library; None for a row that it refuses."""
    row = {"messages": messages, **({"tools": tools} if tools else {})}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            chat = encode_chat(row, tokenizer, on_dropped="count")
        except (ChatTemplateError, ValueError):
            return None
    return chat, [str(one.message) for one in caught]


# The note that a warning of a template comes with, by words of the warning.
WARNED = {
    "add_generation_prompt=True), and prints": "prompt_differs",
    "one token holds": "start_in_a_token",
    "is no token of": "end_of_turn_is_text",
    "does not print": "context_dropped",
}


JUDGED = (
    "dropped", "no_end_of_turn", "end_of_turn_is_text", "prompt_differs", "start_in_a_token",
    "context_dropped", "empty_reasoning",
)  # fmt: skip


def verdicts(tokenizer: Any) -> Iterator[tuple[str, str, str, str]]:
    """(kind, note, verdict, details) of each note and warning of a template, and of those that are missing.

    A verdict is "true", "false" or "missing"; rows as a whole are "encoded", "refused" or "not judged".
    """
    for kind, messages in ((each, row) for each in KINDS for row in rows(each)):
        tools = TOOLS if kind in ("tool call", "both") else None
        found, render = said(tokenizer, messages, tools), _rendering(tokenizer, messages, tools)
        yield kind, "", "encoded" if found else "refused", ""
        if found is None or render is None:
            if found is not None:
                yield kind, "", "not judged", str(messages)
            continue
        chat, heard = found
        if tokenizer(render(messages, False), add_special_tokens=False)["input_ids"] != chat.input_ids:
            continue  # reasoning was given under its key
        told = {*chat.notes, *(name for text in heard for words_, name in WARNED.items() if words_ in text)}
        for name in sorted({*told, *JUDGED}):
            is_true = holds(name, tokenizer, render, messages, tools, chat.labels)
            if name in told or is_true:
                yield (
                    kind,
                    name,
                    ("true" if is_true else "false") if name in told else "missing",
                    str(messages),
                )


def _rendering(tokenizer: Any, messages: Messages, tools: Any) -> Render | None:
    """The first form of the messages that the template takes, whole and cut in front of each answer."""
    for form in forms(tokenizer, tools, {}):
        try:
            answers(form, messages)
            _endings(tokenizer, form)
            if any(word in form(messages, False) for word in words(messages[-1])):
                return form
        except Exception:
            continue
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    total: Counter[tuple[str, ...]] = Counter()
    for path in sorted(path for folder in parser.parse_args().folders for path in folder.glob("*.jinja")):
        for kind, name, verdict, details in verdicts(tokenizer_for(path.read_text(), pairs=True)[0]):
            total[name or "rows", verdict] += 1
            if verdict in ("false", "missing", "not judged"):
                print("   ", path.stem, kind, name, verdict, details[:200])
    print(*(f"{name} {verdict} {number}" for (name, verdict), number in sorted(total.items())), sep="\n")


if __name__ == "__main__":
    main()
