"""Alternative forms of the same messages, for templates that refuse the usual one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fsdp_sft.collate.messages import Message


def other_forms(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield alternative forms of the messages, the smallest change first; none without tool calls.

    - Arguments of tool calls as a JSON string, for templates that concatenate them with other strings.
    - Ids of nine characters for tool calls, and for each result the id and the name of its call, which the
      templates of Mistral's models require and most data sets lack.
    - Both.
    """
    if not any("tool_calls" in message for message in messages):
        return
    as_json = _with_json_arguments(messages)
    yield as_json
    yield _with_call_ids(messages)
    yield _with_call_ids(as_json)


def _with_json_arguments(messages: list[Message]) -> list[Message]:
    """The messages with arguments of tool calls as JSON strings."""

    def changed(call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": [changed(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_call_ids(messages: list[Message]) -> list[Message]:
    """Give each call an id, and each result the id and name of its call.

    A result belongs to the call with the same id in the row, or else to the first call without a result.
    """
    changed: list[Message] = []
    waiting: list[tuple[Any, str, str]] = []  # (id in the row, id for the template, name)
    count = 0
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                calls.append({**call, "id": f"call{count:05d}"})
                waiting.append((call.get("id"), calls[-1]["id"], call["function"]["name"]))
                count += 1
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and waiting:
            given = message.get("tool_call_id")
            found = next((item for item in waiting if given is not None and item[0] == given), waiting[0])
            waiting.remove(found)
            message = {"name": found[2], **message, "tool_call_id": found[1]}
        changed.append(message)
    return changed
