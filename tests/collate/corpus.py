"""Labels on every chat template of some folders: ``python -m tests.collate.corpus FOLDER...``

For each template 40 conversations are made, with tools, arguments of every type, nulls, reasoning, parts and
variables of the template, and judged by the brute force of ``mask_oracle``, to which one thing is left open:
which of the tokens after an answer generation stops on (the first special one must be trained, of what comes
between it and the next message either is right). A template without its vocabulary gets one of bytes with the
special tokens that it writes.

Endings: "exact"; "wrong"; "lossy", where the template itself leaves out what an answer says and the row is
refused for it; "refused", where it prints everything; "not taken", where the template raises or does not show
whose a character is.
"""

import argparse
import copy
import json
import random
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_sft import ChatTemplateError, encode_chat
from tests.collate import mask_oracle as oracle
from tests.collate.template_tokenizers import forms, tokenizer_for

NUMBER = 40
KWARGS: list[dict[str, Any]] = [
    {},
    {},
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"reasoning_effort": "low"},
    {"date": "01 Jan 2026", "date_string": "01 Jan 2026"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "What it does.",
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": kind, "description": "d", "default": None}
                    for key, kind in (("city", "string"), ("limit", "integer"), ("deep", "object"))
                },
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "look_up")
]
WORDS = ["hi", "Ok 7", "a\n\nb", "é ok", "no!", "{x}", "Hello there.", "yes yes", '"q"', "1. one\n2. two"]
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Oslo"},
    {"city": "Rome", "limit": None},
    {"limit": 3},
    {"limit": 2.5, "city": 'a "b"\nc'},
    {},
    {"deep": {"a": ["x", 1, True], "b": None}},
    {"flag": True},
]


def conversation(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]:
    """(messages, tools, variables of the template)."""
    draw = random.Random(seed)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 3)))

    tools = TOOLS if draw.random() < 0.5 else None
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.3:
        messages.append({"role": "system", "content": text()})
    for turn in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": text()})
        if tools and draw.random() < 0.6:
            calls = [
                {
                    "id": f"call{turn}{number:04d}",
                    "type": "function",
                    "function": {
                        "name": draw.choice(["weather", "look_up"]),
                        "arguments": copy.deepcopy(draw.choice(ARGUMENTS)),
                    },
                }
                for number in range(draw.choice([1, 1, 2]))
            ]
            beside = text() if draw.random() < 0.3 else ""
            messages.append({"role": "assistant", "content": beside, "tool_calls": calls})
            _think(messages[-1], draw, text)
            if draw.random() < 0.15:
                break
            messages += [
                {
                    "role": "tool",
                    "name": call["function"]["name"],
                    "tool_call_id": call["id"],
                    "content": json.dumps({"sky": text()}),
                }
                for call in calls
            ]
        messages.append({"role": "assistant", "content": text()})
        _think(messages[-1], draw, text)
    kwargs = draw.choice(KWARGS)
    if kwargs.get("enable_thinking") is False:
        for message in messages:
            message.pop("reasoning_content", None)
    return messages, tools, kwargs


def _think(message: dict[str, Any], draw: random.Random, text: Any) -> None:
    if draw.random() < 0.35:
        message["reasoning_content"] = text()


def judge(tokenizer: Any, seed: int, specials: list[str]) -> tuple[str, str]:
    """(ending, details)."""
    messages, tools, kwargs = conversation(seed)
    row = {"messages": messages, "chat_template_kwargs": kwargs, **({"tools": tools} if tools else {})}
    if seed % 5 == 0:
        row["messages"] = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    adjust = partial(open_after_stops, tokenizer.chat_template)
    expected = oracle.expected(forms(tokenizer, tools, kwargs), messages, specials, adjust)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            encoded = encode_chat(row, tokenizer, on_dropped="count", empty_reasoning="train")
            noted = "dropped" in encoded.notes
            refused = _is_refused(row, tokenizer)
    except (ChatTemplateError, ValueError) as error:
        if isinstance(expected, str):
            return "not taken", expected
        return "lossy" if expected[2] else "refused", str(error)
    if isinstance(expected, str):
        return "not judged", expected
    text, characters, is_lost = expected
    if noted != is_lost or refused != is_lost:
        return "wrong", f"left out: {is_lost}, noted: {noted}, refused: {refused}"
    if found := oracle.difference(tokenizer, text, characters, encoded):
        return "wrong", found
    return ("lossy" if is_lost else "exact"), ""


def _is_refused(row: dict[str, Any], tokenizer: Any) -> bool:
    try:
        encode_chat(row, tokenizer)
    except ChatTemplateError as error:
        return error.reason == "dropped_text"
    return False


def open_after_stops(
    template: str, render: oracle.Render, messages: list[dict[str, Any]], marks: list[Any]
) -> list[Any]:
    """From the end of what each message writes to the end of its turn, either is right."""
    text, marks = render(messages, False), list(marks)
    leaves = oracle.exchanged(render, messages, text)
    for index in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
        own = max((p + 1 for leaf in leaves if leaf.message == index for p in leaf.positions), default=0)
        end = next((i for i in range(own, len(marks)) if not marks[i]), len(marks))
        try:
            ending = render(messages[: index + 1], False)
        except Exception:  # a chat that may not end there
            ending = ""
        same = next((i for i, (a, b) in enumerate(zip(text, ending, strict=False)) if a != b), len(ending))
        if own and same <= end:  # it closes otherwise if more follows
            following = [p for leaf in leaves if leaf.message > index for p in leaf.positions]
            end, same = own, min(following, default=len(marks))
        if own:
            marks[end:same] = [None] * (same - end)
    if any(tag in template for tag in ("{% generation", "{%- generation")):  # which says whose white space is
        marks = [None if char.isspace() else mark for char, mark in zip(text, marks, strict=True)]
    return marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="part of a template's name")
    parser.add_argument("--number", type=int, default=NUMBER)
    arguments = parser.parse_args()
    total: Counter[str] = Counter()
    paths = (path for folder in arguments.folders for path in folder.glob("*.jinja"))
    for path in sorted(path for path in paths if arguments.only in path.stem):
        tokenizer, specials = tokenizer_for(path.read_text())
        counts: Counter[str] = Counter()
        for seed in range(arguments.number):
            ending, details = judge(tokenizer, seed, specials)
            counts[ending] += 1
            if ending in ("wrong", "refused", "not judged"):
                print(f"    {path.stem} {seed}: {ending}: {details}")
        total += counts
        print(f"{path.stem:50s} {dict(counts)}", flush=True)
    print(dict(total))


if __name__ == "__main__":
    main()
