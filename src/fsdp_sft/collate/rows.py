"""Convert the rows of data sets to one list of chat messages, without a tokenizer or template."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_sft.collate.media import refuse_media
from fsdp_sft.collate.messages import MAX_WEIGHT, Message, as_list, as_text, parse_json, shortened, take_notes
from fsdp_sft.collate.shapes import MESSAGE_LISTS, SHAPES, RowShape, repair

# Tell the nulls of a row from those with which an Arrow table fills keys that the row does not have.
#
# A column of structs in an Arrow table gives every struct the keys of all the others, with null for those it
# did not have. Whether a row comes from such a table shows in the row itself:
#
# - Structs in one list that have different keys cannot come from a table.
# - A null where nobody writes one (a message's ``tool_calls``, a tool's ``type``) can only come from a table.
#
# In a row that shows neither, nulls are kept.

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


FORMATS = ("tokenized", *(shape.name for shape in SHAPES), "text")
"""Names of the row formats, for ``row_format=``."""
_TOKENIZED = "input_ids"
_OF_THE_ROW = ("label", "kto_tag")  # TRL's, LLaMA-Factory's: whether the answer is one to learn
_TAKEN = {
    *("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
}
_READ = {"tools", "chat_template_kwargs"}.union(*((one.key, one.answer, *one.others) for one in SHAPES))
_ACCEPTED = f'{", ".join(shape.says for shape in SHAPES)}, "text", or "input_ids" + "labels"'
_PLAIN = {str, int, float, bool, type(None)}


@dataclass(slots=True)
class Conversation:
    """One row in the form that chat templates take.

    Attributes:
        messages: Messages with `role`, `content` (always a str) and, where given, `tool_calls`,
            `reasoning_content` and other template fields.
        weights: Factor of each message's loss; 0 where the row switched the message off.
        tools: Tool schemas for the template, or None.
        template_kwargs: Further variables for the template.
        thinks_in_parts: Whether reasoning was given as a part of type "thinking", as for Mistral's models.
    """

    messages: list[Message]
    weights: list[float]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    thinks_in_parts: bool = False


def is_encoded(row: Any, row_format: str | None = None) -> bool:
    """Whether `row` needs no chat template: it has input_ids, and no other format is asked for, or a text."""
    is_tokenised = row_format in (None, "tokenized") and isinstance(row, Mapping) and _TOKENIZED in row
    return is_tokenised or is_text(row, row_format)


def is_text(row: Any, row_format: str | None = None) -> bool:
    """Whether `row` is one text: `row_format` says so, or it has no key of another shape."""
    if row_format is not None or not isinstance(row, Mapping) or row.get("text") is None:
        return row_format == "text" and isinstance(row, Mapping)
    return _TOKENIZED not in row and all(row.get(shape.key) is None for shape in SHAPES)


def read_text(row: Mapping[str, Any]) -> str:
    """The text of a row that is one.

    Raises:
        ValueError: If it is no str, or the row is marked as unwanted.
        RowError: If the row has more than text.
    """
    _refuse_undesired(row)
    refuse_media(row)
    return as_text(row.get("text"), '"text"')


def read_encoded(row: Mapping[str, Any]) -> tuple[list[int], list[int], list[float] | None]:
    """(input_ids, labels, loss_weights or None) of a tokenised row.

    Raises:
        ValueError: If `labels` are missing, lengths differ, the row is empty, or a weight is negative or not
            finite.
    """
    if row.get("labels") is None:
        raise ValueError(
            f'a tokenised row needs "input_ids" and "labels", got the keys {sorted(row)}; add labels '
            "aligned with input_ids (-100 where nothing is trained), or pass the chat row itself"
        )
    refuse_media(row)
    ids, labels = (_numbers(row[key], key) for key in ("input_ids", "labels"))
    weights = (
        None if row.get("loss_weights") is None else _numbers(row["loss_weights"], "loss_weights", float)
    )
    check_encoded(ids, labels, weights)
    return ids, labels, None if weights is None else [float(weight) for weight in weights]


def check_encoded(ids: Sequence[int], labels: Sequence[int], weights: Sequence[float] | None) -> None:
    """Refuse ids, labels and weights that do not belong together, or that no tensor can hold.

    Raises:
        ValueError: If their lengths differ or are 0, an id or a label is no integer of 64 bits, or a weight
            is negative or not finite.
    """
    for key, values in (("input_ids", ids), ("labels", labels)):
        try:
            array("q", values)
        except (TypeError, OverflowError):
            raise ValueError(
                f'"{key}" must be a flat list of integers of 64 bits, got {shortened(values)}'
            ) from None
    if weights is not None:
        _check_weights(weights, len(ids))
    if len(ids) != len(labels) or not ids:
        raise ValueError(
            "a tokenised row needs input_ids and labels of one length of at least 1, "
            f"got {len(ids)} and {len(labels)}"
        )


def read_row(row: Any, row_format: str | None = None) -> Conversation:
    """Convert a chat row of any format.

    Args:
        row: A dict.
        row_format: One of `FORMATS`; None detects it.

    Raises:
        ValueError: For an unknown format, an empty row, an unknown role, content that is not text, or a
            weight that is negative or not finite.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"a row must be a dict, got {type(row).__name__}; accepted shapes: {_ACCEPTED}")
    _refuse_undesired(row)
    shape = _shape_of(row, row_format)
    refuse_media(row)
    try:
        plain = {key: _plain(value) if key in _READ else value for key, value in row.items()}
        row = without_fillers(plain, MESSAGE_LISTS)
        messages = shape.read(row)
    except RecursionError:
        raise ValueError("the row is nested too deeply to be read") from None
    if not messages:
        raise ValueError("the row has no messages; a conversation needs at least one")
    notes = [take_notes(message, f"message {index}") for index, message in enumerate(messages)]
    return Conversation(
        messages,
        [note.weight for note in notes],
        _read_tools(row.get("tools")),
        check_template_kwargs(row.get("chat_template_kwargs")),
        any(note.thinks_in_parts for note in notes),
    )


def _shape_of(row: Mapping[str, Any], row_format: str | None) -> RowShape:
    """The shape of a row: the one asked for, or the first whose key the row has."""
    tried = [shape for shape in SHAPES if row_format in (None, shape.name)]
    found = next((shape for shape in tried if row.get(shape.key) is not None), None)
    if found is not None:
        return found
    keys = f"the keys {sorted(map(str, row))}"
    if row_format:
        key = tried[0].key if tried else _TOKENIZED
        raise ValueError(f'a row of the format {row_format} needs "{key}", got {keys}')
    by_name = (("messages",), ("conversations",), ("prompt", "completion"), ("text",))
    told = max((repair(row, *names) for names in by_name), key=len)
    raise ValueError(f"no known row shape in {keys}; accepted shapes: {_ACCEPTED}{told}")


def check_template_kwargs(given: Any) -> dict[str, Any]:
    """The variables for a chat template that a row or a caller gives, without those that are None.

    Raises:
        ValueError: If `given` is no dict with str keys, or has a name that the template gets from elsewhere.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(f"chat_template_kwargs must be a dict with str keys, got {shortened(given)}")
    taken = sorted(_TAKEN & set(given))
    if taken:
        raise ValueError(
            f"chat_template_kwargs cannot set {', '.join(taken)}: messages and tools come from the row, the "
            "template from chat_template=, and generation prompts are not trained"
        )
    return {key: value for key, value in given.items() if value is not None}


def _plain(value: Any) -> Any:
    """The value with containers and numbers of numpy and others converted to Python's own."""
    if type(value) in _PLAIN:
        return value
    # Most items are plain, so testing them here saves a call each. isinstance with Mapping is slow.
    if isinstance(value, list | tuple):
        return [item if type(item) in _PLAIN else _plain(item) for item in value]
    if isinstance(value, dict | Mapping):
        return {key: item if type(item) in _PLAIN else _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return [_plain(item) for item in value] if is_list else value


def _numbers(values: Any, key: str, kind: type[Any] = int) -> list[Any]:
    """The values as a list, or ValueError if they are no flat list of integers, or of floats too."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    # A set of types, since a Python loop over the items would take as long as the rest of a collator.
    if not isinstance(values, Sequence) or not set(map(type, values)) <= {int, kind}:
        named = "integers" if kind is int else "numbers"
        raise ValueError(f'"{key}" must be a flat list of {named}, got {shortened(values)}')
    return list(values)


def _check_weights(weights: Sequence[float], number: int) -> None:
    """Refuse weights that are not one for each of ``number`` tokens."""
    if len(weights) != number:
        raise ValueError(f"loss_weights has {len(weights)} entries, input_ids {number}: give one a token")
    try:
        wrong = [weight for weight in array("d", weights) if not 0 <= weight <= MAX_WEIGHT]
    except (TypeError, OverflowError):
        raise ValueError(f'"loss_weights" must be a flat list of numbers, got {shortened(weights)}') from None
    if wrong:
        raise ValueError(f"loss_weights must be finite and not negative, got {wrong[0]}")


def _refuse_undesired(row: Mapping[str, Any]) -> None:
    """Refuse a row marked as unwanted, or with two answers of which one is preferred."""
    marked = next((key for key in _OF_THE_ROW if row.get(key) is False), None)
    if marked is not None:
        raise ValueError(
            f'"{marked}" is False, which marks an answer that is not wanted, and it would be trained: leave '
            "such rows out, or the column, if it means something else"
        )
    both = row.get("chosen") is not None and row.get("rejected") is not None
    if both and all(row.get(shape.answer) is None for shape in SHAPES):
        raise ValueError(
            "a row of two answers (chosen, rejected) is for learning a preference: for supervised "
            "fine-tuning give the one that is to be learnt, as messages or as prompt and completion"
        )


def tool_name(schema: Mapping[str, Any]) -> str:
    """The name in a tool's schema; "" if it has none."""
    function = schema.get("function")
    return str((function if isinstance(function, Mapping) else schema).get("name") or "")


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tool schemas as a list of dicts; None if there are none."""
    if isinstance(tools, str):
        tools = parse_json(tools, "tools") if tools.strip() else None
    if not tools:
        return None
    schemas = []
    for number, tool in enumerate(as_list(tools, "tools")):
        tool = parse_json(tool, f"tools[{number}]") if isinstance(tool, str) else tool
        if not isinstance(tool, dict):
            raise ValueError(f"tools[{number}] must be a JSON schema (a dict), got {shortened(tool)}")
        # Templates read tool.function.name; many data sets have the inner object alone.
        bare = "function" not in tool and "name" in tool
        schemas.append({"type": "function", "function": dict(tool)} if bare else dict(tool))
    return schemas
