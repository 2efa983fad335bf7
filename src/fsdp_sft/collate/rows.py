"""Convert the rows of data sets to one list of chat messages, without a tokenizer or template.

A new shape of rows is a reader and a line in `SHAPES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fsdp_sft.collate.messages import (
    IN_PARTS,
    Message,
    as_text,
    parse_json,
    read_message,
    refuse_media,
    take_flag,
)

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


def _read_list(row: Mapping[str, Any], key: str) -> list[Message]:
    """Messages of a list under a key, each of which has role and content, or is a ShareGPT turn."""
    return [_read_turn(item, f"{key}[{i}]") for i, item in enumerate(row[key])]


def _read_turn(item: Any, where: str) -> Message:
    if not isinstance(item, dict) or "role" in item or "from" not in item:
        return read_message(item, where)
    speaker = item["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise ValueError(f"{where} has the role {speaker!r}; known roles: {', '.join(SHAREGPT_ROLES)}")
    message: Message = {**item, "role": SHAREGPT_ROLES[speaker], "from": None, "value": None}
    value = as_text(item.get("value"), f"{where}.value")
    if speaker != "function_call":
        return read_message({**message, "content": value}, where)
    calls = parse_json(value, f"{where}: function_call")
    message["tool_calls"] = calls if isinstance(calls, list) else [calls]
    return read_message({**message, "content": ""}, where)


def _read_alpaca(row: Mapping[str, Any]) -> list[Message]:
    """Messages of an Alpaca row, with its history."""
    messages: list[Message] = []
    # Of a dict its keys would be taken for the two texts, of a text its letters.
    for number, (question, answer) in enumerate(
        pair if isinstance(pair, list) else (pair, None) for pair in row.get("history") or []
    ):
        messages += _pair(question, answer, f"history[{number}]")
    texts = filter(None, (as_text(row.get(key) or "", key) for key in ("instruction", "input")))
    return messages + _pair("\n".join(texts), row.get("output"), "output")


def _read_prompt(row: Mapping[str, Any]) -> list[Message]:
    """Messages of a prompt/completion row; a prompt given as a list of messages is not trained."""
    prompt, completion = row["prompt"], row.get("completion")
    if isinstance(prompt, str) or isinstance(completion, str):
        return _pair(prompt, completion, "prompt/completion")
    return [{**given, "train": 0} for given in _read_list(row, "prompt")] + _read_list(row, "completion")


def _pair(user: Any, assistant: Any, where: str) -> list[Message]:
    """A user's message and the assistant's answer."""
    return [
        {"role": "user", "content": as_text(user, f"{where} (user side)")},
        {"role": "assistant", "content": as_text(assistant, f"{where} (assistant side)")},
    ]


SHAPES: dict[str, Callable[[Mapping[str, Any]], list[Message]]] = {
    "messages": partial(_read_list, key="messages"),
    "conversations": partial(_read_list, key="conversations"),
    "instruction": _read_alpaca,
    "prompt": _read_prompt,
}
"""Readers of chat rows, by the key that shows the shape; tokenised rows come before, texts after."""

_OF_THE_ROW = ("label", "kto_tag")  # TRL's, LLaMA-Factory's: whether the answer is one to learn
_MESSAGE_LISTS = {*SHAPES, "completion", "output"}  # keys of a row that may hold a list of messages
_READ = {*_MESSAGE_LISTS, "input", "history", "system", "tools", "chat_template_kwargs"}
_ACCEPTED = (
    '"messages" (role/content), "conversations" (from/value), "instruction" + "output" (Alpaca), '
    '"prompt" + "completion", "text", or "input_ids" + "labels"'
)
_PLAIN = {str, int, float, bool, type(None)}


@dataclass(slots=True)
class Conversation:
    """One row in the form that chat templates take.

    Attributes:
        messages: Messages with `role`, `content` (always a str) and, where given, `tool_calls`,
            `reasoning_content` and other template fields.
        trained: Whether each message may be trained; False where the row switches it off.
        tools: Tool schemas for the template, or None.
        template_kwargs: Further variables for the template.
        thinks_in_parts: Whether reasoning was given as a part of type "thinking", as for Mistral's models.
    """

    messages: list[Message]
    trained: list[bool]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    thinks_in_parts: bool = False


def shape_of(row: Any) -> str:
    """The key of a row that decides how it is read.

    Raises:
        ValueError: For no dict, a dict of no known shape, and a row that is marked as unwanted.
        RowError: For a row with more than text.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"a row must be a dict, got {type(row).__name__}; accepted shapes: {_ACCEPTED}")
    shape = next((key for key in ("input_ids", *SHAPES, "text") if row.get(key) is not None), None)
    if shape is None:
        raise ValueError(
            f"no known row shape in the keys {sorted(map(str, row))}; accepted shapes: {_ACCEPTED}. Rename "
            "the columns, or make messages of them"
        )
    # The text of a False is that of numpy's and torch's, which a data set with a format has.
    unwanted = {key for key in _OF_THE_ROW if str(row.get(key)) in ("False", "tensor(False)")}
    if unwanted and shape != "input_ids":
        raise ValueError(
            f'"{min(unwanted)}" is False, which marks an answer that is not wanted, and it would be trained: '
            "leave such rows out, or the column, if it means something else"
        )
    refuse_media(row)
    return shape


def read_row(row: Mapping[str, Any], shape: str | None = None) -> Conversation:
    """Convert a chat row of one of the `SHAPES`; None looks for it.

    Raises:
        ValueError: For an empty row, an unknown role, content that is not text, or a flag that is neither 0
            nor 1.
    """
    shape = shape or shape_of(row)
    row = _without_fillers({name: _plain(value) if name in _READ else value for name, value in row.items()})
    messages, system = SHAPES[shape](row), row.get("system")
    if not messages:
        raise ValueError("the row has no messages; a conversation needs at least one")
    if system and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": as_text(system, "system")}, *messages]
    in_parts = [message.pop(IN_PARTS, False) for message in messages]
    return Conversation(
        messages,
        [take_flag(message, f"message {index}") for index, message in enumerate(messages)],
        _read_tools(row.get("tools")),
        template_variables(row.get("chat_template_kwargs")),
        any(in_parts),
    )


def _without_fillers(row: dict[str, Any]) -> dict[str, Any]:
    """The row without the nulls with which an Arrow table fills keys in calls and tools that a row lacks.

    A column of structs in a table gives every struct the keys of all the others. So messages with different
    keys come from no table, and a null that is not a content, such as a question's ``tool_calls``, only from
    one. In tools every null does where JSON Schema has none.

    Args:
        row: A chat row of plain Python data, which is not modified.
    """
    lists = {
        key: [message for message in row[key] if isinstance(message, dict)]
        for key in _MESSAGE_LISTS
        if isinstance(row.get(key), list)
    }
    messages = [(key, message) for key, messages in lists.items() for message in messages]
    from_table = any(
        item is None for _, message in messages for key, item in message.items() if key != "content"
    ) and len({(key, *message) for key, message in messages}) == len(lists)
    cleaned = dict(row)
    if isinstance(row.get("tools"), list):
        cleaned["tools"] = _stripped(row["tools"], () if from_table else ("default", "const"))
    for key in lists if from_table else ():
        cleaned[key] = [
            {**item, "tool_calls": _stripped(item["tool_calls"])}
            if isinstance(item, dict) and "tool_calls" in item
            else item
            for item in row[key]
        ]
    return cleaned


def _stripped(value: Any, nullable: tuple[str, ...] = ()) -> Any:
    """The value without keys that are null, at any depth, but for the `nullable` ones."""
    if isinstance(value, dict):
        return {k: _stripped(v, nullable) for k, v in value.items() if v is not None or k in nullable}
    return [_stripped(item, nullable) for item in value] if isinstance(value, list) else value


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The variables for a chat template that a row or a caller gives, without those that are None."""
    return {name: value for name, value in (given or {}).items() if value is not None}


def _plain(value: Any) -> Any:
    """The value with containers and numbers of numpy and others converted to Python's own."""
    if type(value) in _PLAIN:
        return value
    # Most items are plain, so testing them here saves a call each. isinstance with Mapping is slow.
    if isinstance(value, dict | Mapping):
        return {key: item if type(item) in _PLAIN else _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | Sequence) and not isinstance(value, str | bytes):
        return [item if type(item) in _PLAIN else _plain(item) for item in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tool schemas as a list of dicts; None if there are none."""
    if isinstance(tools, str):
        tools = parse_json(tools, "tools") if tools.strip() else None
    if not tools:
        return None
    read = [parse_json(one, f"tools[{i}]") if isinstance(one, str) else one for i, one in enumerate(tools)]
    # Templates read tool.function.name; many data sets have the inner object alone.
    return [
        {"type": "function", "function": dict(one)} if "function" not in one and "name" in one else dict(one)
        for one in read
    ]
