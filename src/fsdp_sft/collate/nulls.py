"""Tell the nulls of a row from those with which an Arrow table fills keys that the row does not have.

A column of structs in an Arrow table gives every struct the keys of all the others, with null for those that
it did not have. Whether a row comes from such a table shows in the row itself:

- Structs in one list that have different keys cannot come from a table.
- A null where nobody writes one (a message's ``tool_calls``, a tool's ``type``) can only come from a table.

In a row that shows neither, nulls are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

# The only keywords of JSON Schema whose value may be null.
_NULL_IN_A_SCHEMA = ("default", "const")


def without_fillers(row: dict[str, Any], message_lists: Collection[str]) -> dict[str, Any]:
    """The row without nulls from a table in the arguments of calls and in tools.

    Args:
        row: A chat row of plain Python data, which is not modified.
        message_lists: Its keys that may hold a list of messages.
    """
    lists = [row[key] for key in message_lists if isinstance(row.get(key), list)]
    calls = [call for items in lists for call in _calls(items)]
    tools = row["tools"] if isinstance(row.get("tools"), list) else []
    if not calls and not tools:
        return row
    known = dict(_parameters(tools))
    from_table = _comes_from_a_table(lists, calls, tools)
    cleaned = dict(row)
    for key in message_lists:
        if isinstance(row.get(key), list):
            cleaned[key] = [_clean_message(item, from_table, known) for item in row[key]]
    if from_table and tools:
        cleaned["tools"] = _stripped(tools)
    return cleaned


def _dicts(values: Iterable[Any]) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, dict)]


def _calls(messages: list[Any]) -> Iterator[Mapping[str, Any]]:
    """The tool calls of all messages."""
    for message in _dicts(messages):
        if isinstance(calls := message.get("tool_calls"), list):
            yield from _dicts(calls)


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object with the name and the arguments or parameters: the inner one, or the call or tool itself."""
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call


def _parameters(tools: list[Any]) -> Iterator[tuple[str, Any]]:
    """(name of a tool, set of the names of its parameters) for each tool whose schema lists them."""
    for tool in _dicts(tools):
        inner = _function(tool)
        schema = inner.get("parameters")
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if isinstance(inner.get("name"), str) and isinstance(properties, dict):
            yield inner["name"], {name for name, value in properties.items() if value is not None}


def _comes_from_a_table(lists: list[list[Any]], calls: list[Mapping[str, Any]], tools: list[Any]) -> bool:
    """Whether the row shows that it comes from an Arrow table, by the rules at the top of this module."""
    functions = [_function(call) for call in calls]
    arguments = _dicts(function.get("arguments") for function in functions)
    groups = [*map(_dicts, lists), calls, functions, arguments, _dicts(tools)]
    if any(len({frozenset(item) for item in group}) > 1 for group in groups):
        return False
    messages = [item for items in lists for item in _dicts(items)]
    # In OpenAI's format a message that calls a tool has content: null, so that null shows nothing.
    hints = [{k: v for k, v in message.items() if k != "content"} for message in messages]
    if any(value is None for item in [*hints, *calls, *functions] for value in item.values()):
        return True
    names = {function.get("name") for function in functions}
    if len(names) > 1 and any(value is None for item in arguments for value in item.values()):
        return True  # different functions have arguments with the same keys, which a table has given them
    return any(_has_impossible_null(tool) for tool in tools)


def _has_impossible_null(schema: Any) -> bool:
    """Whether a tool's JSON schema has a null where JSON Schema allows none."""
    if isinstance(schema, dict):
        return any(
            key not in _NULL_IN_A_SCHEMA if value is None else _has_impossible_null(value)
            for key, value in schema.items()
        )
    return isinstance(schema, list) and any(_has_impossible_null(item) for item in schema if item is not None)


def _clean_message(message: Any, from_table: bool, known: dict[str, Any]) -> Any:
    """The message without filled-in nulls in the arguments of its calls."""
    if not isinstance(message, dict) or not isinstance(message.get("tool_calls"), list):
        return message
    return {**message, "tool_calls": [_clean_call(call, from_table, known) for call in message["tool_calls"]]}


def _clean_call(call: Any, from_table: bool, known: dict[str, Any]) -> Any:
    """The call without filled-in nulls in its arguments."""
    function = _function(call) if isinstance(call, dict) else {}
    arguments = function.get("arguments")
    if not isinstance(arguments, dict):
        return call
    if from_table:
        arguments = _stripped(arguments)
    elif function.get("name") in known:
        # A null for a parameter that the tool's schema does not have can only come from a table.
        names = known[function["name"]]
        arguments = {key: value for key, value in arguments.items() if value is not None or key in names}
    changed = {**function, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def _stripped(value: Any) -> Any:
    """The value without keys that are null, at any depth."""
    if isinstance(value, dict):
        return {key: _stripped(item) for key, item in value.items() if item is not None}
    return [_stripped(item) for item in value] if isinstance(value, list) else value
