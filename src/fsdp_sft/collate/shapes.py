"""The shapes of rows that data sets have, a line each: how a row is recognised, and its messages.

A new shape is a reader here and a line in `SHAPES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from fsdp_sft.collate.media import refuse_media
from fsdp_sft.collate.messages import Message, as_list, as_text, parse_json, read_message, shortened

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "system": "system",
}
_MARKS = {"messages": "role", "conversations": "from"}  # by which a list of turns is told
_ANSWERS = ("answer", "response", "output", "completion", "solution", "reply", "assistant")
_CHATS = ("chat", "dialog", "dialogue", "conversation", "turns", *_MARKS)
_ALSO_CALLED = {
    "messages": _CHATS,
    "conversations": _CHATS,
    "prompt": ("question", "query", "problem", "input", "user"),
    "completion": _ANSWERS,
    "input": ("context",),
    "output": _ANSWERS,
    "text": ("content", "document", "article", "body"),
}  # by keys that are read: what other data sets call them


@dataclass(frozen=True)
class RowShape:
    """A shape of chat rows.

    Attributes:
        name: What ``row_format=`` calls it.
        key: The key by which a row is recognised.
        says: The keys in words, for messages.
        read: Function from a row to its messages.
        answer: The key of what is trained.
        others: Further keys that ``read`` looks at.
    """

    name: str
    key: str
    says: str
    read: Callable[[Mapping[str, Any]], list[Message]]
    answer: str
    others: tuple[str, ...] = ()


def _read_messages(row: Mapping[str, Any]) -> list[Message]:
    items = as_list(row["messages"], "messages")
    return _with_system(row, [read_message(item, f"messages[{i}]") for i, item in enumerate(items)])


def _read_conversations(row: Mapping[str, Any]) -> list[Message]:
    items = as_list(row["conversations"], "conversations")
    messages = [_read_turn(item, f"conversations[{i}]") for i, item in enumerate(items)]
    return _with_system(row, messages)


def _read_turn(item: Any, where: str) -> Message:
    """One ShareGPT turn as a message."""
    if isinstance(item, dict) and "role" in item:
        return read_message(item, where)
    if not isinstance(item, dict) or "from" not in item:
        raise ValueError(f"{where} must be a dict with from and value, got {shortened(item)}")
    refuse_media(item, where)
    speaker = item["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise ValueError(f"{where} has the role {speaker!r}; known roles: {', '.join(SHAREGPT_ROLES)}")
    message: Message = {key: value for key, value in item.items() if key not in ("from", "value")}
    message["role"] = SHAREGPT_ROLES[speaker]
    value = as_text(item.get("value"), f"{where}.value")
    if speaker != "function_call":
        return read_message({**message, "content": value}, where)
    calls = parse_json(value, f"{where}: function_call")
    calls = calls if isinstance(calls, list) else [calls]
    return read_message({**message, "content": "", "tool_calls": calls}, where)


def _read_alpaca(row: Mapping[str, Any]) -> list[Message]:
    """Messages of an Alpaca row, with its history."""
    if row.get("output") is None:
        told = repair(row, *(("input", "output") if row.get("context") else ("output",)))
        raise ValueError(f'an Alpaca row needs "instruction" and "output", got the keys {sorted(row)}{told}')
    if row.get("corrected") is not None:
        raise ValueError(
            '"corrected" is not read, and "output" would be trained in its place: give what is to be learnt '
            "as messages"
        )
    messages: list[Message] = []
    for number, pair in enumerate(as_list(row.get("history") or [], "history")):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"history[{number}] must be a [user, assistant] pair, got {shortened(pair)}")
        messages += _pair(pair[0], pair[1], f"history[{number}]")
    parts = [as_text(row.get(key) or "", key) for key in ("instruction", "input")]
    messages += _pair("\n".join(part for part in parts if part), row["output"], "output")
    return _with_system(row, messages)


def _read_prompt(row: Mapping[str, Any]) -> list[Message]:
    """Messages of a prompt/completion row; a prompt given as a list of messages is not trained."""
    if row.get("completion") is None:
        told = repair(row, "completion")
        raise ValueError(f'a prompt row needs "prompt" and "completion", got the keys {sorted(row)}{told}')
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) or isinstance(completion, str):
        return _with_system(row, _pair(prompt, completion, "prompt/completion"))
    given, wanted = (
        [read_message(item, f"{key}[{i}]") for i, item in enumerate(as_list(row[key], key))]
        for key in ("prompt", "completion")
    )
    return _with_system(row, [{**message, "train": 0} for message in given] + wanted)


def repair(row: Mapping[str, Any], *wanted: str) -> str:
    """The keys that are nearest to those wanted, with the line that renames them; "" if none is near."""
    found: dict[str, str] = {}
    for key in wanted:
        mark, kind = repr(_MARKS.get(key, "")), list if key in _MARKS else str
        names = {
            str(own).lower(): own
            for own, value in row.items()
            if isinstance(value, kind) and (kind is str or mark in repr(value[:1]))
        }
        near = [one for name in (key, *_ALSO_CALLED[key]) for one in get_close_matches(name, names, 1, 0.8)]
        found.update((key, names[one]) for one in near[:1])
    like = ", ".join(f"{own!r} is nearest to {key!r}" for key, own in found.items())
    line = ", ".join(f'"{key}": row["{own}"]' for key, own in found.items())
    whole = f": rows.map(lambda row: {{{line}}})" if len(found) == len(wanted) else ""
    return f"; {like}{whole}" if found else ""


def _with_system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """The messages, with the row's ``system`` in front unless they begin with a system message."""
    system = row.get("system")
    if not system or (messages and messages[0]["role"] in ("system", "developer")):
        return messages
    return [{"role": "system", "content": as_text(system, "system")}, *messages]


def _pair(user: Any, assistant: Any, where: str) -> list[Message]:
    """A user's message and the assistant's answer."""
    return [
        {"role": "user", "content": as_text(user, f"{where} (user side)")},
        {"role": "assistant", "content": as_text(assistant, f"{where} (assistant side)")},
    ]


SHAPES = (
    RowShape("messages", "messages", '"messages" (role/content)', _read_messages, "messages", ("system",)),
    RowShape(
        "sharegpt",
        "conversations",
        '"conversations" (from/value)',
        _read_conversations,
        "conversations",
        ("system",),
    ),
    RowShape(
        "alpaca",
        "instruction",
        '"instruction" + "output" (Alpaca)',
        _read_alpaca,
        "output",
        ("input", "history", "system"),
    ),
    RowShape(
        "prompt_completion", "prompt", '"prompt" + "completion"', _read_prompt, "completion", ("system",)
    ),
)
"""Every shape of chat rows, in the order in which they are tried; tokenised rows come before, texts after."""
MESSAGE_LISTS = {key for shape in SHAPES for key in (shape.key, shape.answer)}
"""Keys of a row that may hold a list of messages."""
