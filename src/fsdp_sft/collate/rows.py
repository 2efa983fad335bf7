"""Convert the row formats of data sets to one list of chat messages, without a tokenizer or template."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_sft.collate.media import PARTS, refuse_media
from fsdp_sft.collate.nulls import without_fillers
from fsdp_sft.errors import MediaError

ROLES = ("system", "developer", "user", "assistant", "tool")
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
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_FLAG_KEYS = ("train", "loss_weight", "weight", "loss_scale")
_YES_OR_NO = ("loss", "training", "trainable")  # ms-swift's, axolotl's; numbers there are no weights
_BY_CHARACTERS = ("train_detail", "training_detail")  # axolotl's
_ANSWERS = ("messages", "conversations", "output", "completion")
_OF_THE_ROW = ("label", "kto_tag")  # TRL's, LLaMA-Factory's: whether the answer is one to learn
_MOST = 3.4e38  # largest weight: weights become float32
# Keys under which a message carries notes while its row is read; read_row removes them.
_IN_PARTS = "reasoning given as a part of type thinking"
_WEIGHED = "characters and weights of a content's parts"
FORMATS = {
    "tokenized": "input_ids",
    "messages": "messages",
    "sharegpt": "conversations",
    "alpaca": "instruction",
    "prompt_completion": "prompt",
}
"""Each row format and the key by which it is recognised."""
_SHAPES = (
    '"messages" (role/content), "conversations" (from/value), "instruction" + "output" (Alpaca), '
    '"prompt" + "completion", or "input_ids" + "labels"'
)

Message = dict[str, Any]


@dataclass(slots=True)
class Conversation:
    """One row in the form that chat templates take.

    Attributes:
        messages: Messages with `role`, `content` (always a str) and, where given, `tool_calls`,
            `reasoning_content` and other template fields.
        weights: Factor of each message's loss; 0 where the row switched the message off.
        part_weights: Weights of parts of texts: by message index and key of the text, (characters, weight) of
            each part.
        tools: Tool schemas for the template, or None.
        template_kwargs: Further variables for the template.
        thinks_in_parts: Whether reasoning was given as a part of type "thinking", as for Mistral's models.
    """

    messages: list[Message]
    weights: list[float]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    thinks_in_parts: bool = False
    part_weights: dict[int, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)


def is_encoded(row: Any, row_format: str | None = None) -> bool:
    """Whether `row` is tokenised: it has input_ids, and `row_format` names no other format."""
    return row_format in (None, "tokenized") and isinstance(row, Mapping) and "input_ids" in row


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
    ids, labels = (_int_list(row[key], key) for key in ("input_ids", "labels"))
    weights = None if row.get("loss_weights") is None else _weight_list(row["loss_weights"])
    check_encoded(ids, labels, weights)
    return ids, labels, weights


def check_encoded(ids: Sequence[int], labels: Sequence[int], weights: Sequence[float] | None) -> None:
    """Refuse ids, labels and weights that do not belong together.

    Raises:
        ValueError: If their lengths differ or are 0.
    """
    if weights is not None and len(weights) != len(ids):
        raise ValueError(f"loss_weights has {len(weights)} entries, input_ids {len(ids)}: give one a token")
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
        raise ValueError(f"a row must be a dict, got {type(row).__name__}; accepted shapes: {_SHAPES}")
    _refuse_undesired(row)
    keys = [FORMATS[row_format]] if row_format else list(_READERS)
    key = next((key for key in keys if row.get(key) is not None), None)
    if key is None or key not in _READERS:
        found = f"the keys {sorted(map(str, row))}"
        if row_format:
            raise ValueError(f'a row of the format {row_format} needs "{keys[0]}", got {found}')
        raise ValueError(f"no known row shape in {found}; accepted shapes: {_SHAPES}")
    refuse_media(row)
    row = without_fillers({key: _plain(value) if key in _READ else value for key, value in row.items()})
    messages = _READERS[key](row)
    if not messages:
        raise ValueError("the row has no messages; a conversation needs at least one")
    weights = [_pop_weight(message, f"message {index}") for index, message in enumerate(messages)]
    in_parts = [message.pop(_IN_PARTS, False) for message in messages]
    weighed = {index: message.pop(_WEIGHED) for index, message in enumerate(messages) if _WEIGHED in message}
    kwargs = check_template_kwargs(row.get("chat_template_kwargs"))
    return Conversation(messages, weights, _read_tools(row.get("tools")), kwargs, any(in_parts), weighed)


def check_template_kwargs(given: Any) -> dict[str, Any]:
    """The variables for a chat template that a row or a caller gives, without those that are None.

    Raises:
        ValueError: If `given` is no dict with str keys, or has a name that the template gets from elsewhere.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(f"chat_template_kwargs must be a dict with str keys, got {_short(given)}")
    taken = sorted(_TAKEN & set(given))
    if taken:
        raise ValueError(
            f"chat_template_kwargs cannot set {', '.join(taken)}: messages and tools come from the row, the "
            "template from chat_template=, and generation prompts are not trained"
        )
    return {key: value for key, value in given.items() if value is not None}


_PLAIN = {str, int, float, bool, type(None)}


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


def _int_list(values: Any, key: str) -> list[int]:
    """The values as a list, or ValueError if they are no flat list of integers."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    # A set of types, since a Python loop over the items would take as long as the rest of a collator.
    if not isinstance(values, Sequence) or not set(map(type, values)) <= {int}:
        raise ValueError(f'"{key}" must be a flat list of integers, got {_short(values)}')
    return list(values)


def _weight_list(values: Any) -> list[float]:
    """The values as a list of floats, or ValueError if one is no weight."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or not set(map(type, values)) <= {int, float}:
        raise ValueError(f'"loss_weights" must be a flat list of numbers, got {_short(values)}')
    wrong = next((value for value in values if not 0 <= value <= _MOST), None)
    if wrong is not None:
        raise ValueError(f"loss_weights must be finite and not negative, got {wrong}")
    return [float(value) for value in values]


def _short(value: Any, limit: int = 60) -> str:
    """Type and shortened repr of a value, for error messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= limit else text[:limit] + '...'}"


def _text(value: Any, where: str) -> str:
    """The value, or ValueError with its place if it is no str."""
    if not isinstance(value, str):
        raise ValueError(f"{where} must be a string, got {_short(value)}")
    return value


def _read_messages(row: Mapping[str, Any]) -> list[Message]:
    return [
        _read_message(item, f"messages[{i}]") for i, item in enumerate(_as_list(row["messages"], "messages"))
    ]


def _as_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f'"{where}" must be a list, got {_short(value)}')
    return list(value)


def _read_message(item: Any, where: str) -> Message:
    """A message in the form that templates take, but with its weights."""
    if not isinstance(item, dict):
        raise ValueError(f"{where} must be a dict with role and content, got {_short(item)}")
    # In a row from an Arrow table each message has the keys of all, with None for those that it lacks.
    message = {str(key): value for key, value in item.items() if value is not None}
    refuse_media(message, where)
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where} has the role {role!r}; known roles: {', '.join(ROLES)}")
    calls = message.pop("tool_calls", None) or []
    if not isinstance(calls, list):
        raise ValueError(f"{where}.tool_calls must be a list, got {_short(calls)}")
    if "function_call" in message:  # OpenAI's form before tool_calls
        calls = [*calls, message.pop("function_call")]
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = _read_parts(content, where)
        content, calls = parts.text, [*calls, *parts.calls]
        if parts.reasoning:
            if any(key in message for key in REASONING_KEYS):
                raise ValueError(f"{where} has reasoning twice: in its parts and beside its content")
            message["reasoning_content"] = parts.reasoning
            message[_IN_PARTS] = parts.is_thinking
        if any(weight != 1 for pieces in parts.weighed.values() for _, weight in pieces):
            message[_WEIGHED] = parts.weighed
    if content is None and not calls:
        raise ValueError(f"{where} has neither content nor tool_calls, got the keys {sorted(message)}")
    message["content"] = "" if content is None else _text(content, f"{where}.content")
    if calls:
        if role != "assistant":
            raise ValueError(f"{where} has tool calls but the role {role!r}; only the assistant calls tools")
        message["tool_calls"] = [_read_call(call, where) for call in calls]
    for key in REASONING_KEYS:
        if key in message:
            _text(message[key], f"{where}.{key}")
    return message


_ORDER = ("thinking", "reasoning", "text", "tool_call")


@dataclass
class _Parts:
    """A content in parts, sorted out.

    Attributes:
        text: The parts of type "text", joined.
        reasoning: The parts of type "reasoning" or "thinking", joined.
        is_thinking: Whether some were of type "thinking".
        calls: Tool calls.
        weighed: (characters, weight) of each part, by the key of the text ("content", "reasoning_content").
    """

    text: str = ""
    reasoning: str = ""
    is_thinking: bool = False
    calls: list[Any] = field(default_factory=list)
    weighed: dict[str, list[tuple[int, float]]] = field(default_factory=dict)


def _read_parts(parts: Sequence[Any], where: str) -> _Parts:
    """Sort out a content that is a list of parts."""
    found, last = _Parts(), 0
    for number, part in enumerate(parts):
        kind, place = part.get("type") if isinstance(part, dict) else None, f"{where}.content[{number}]"
        if kind in PARTS:
            raise MediaError(f"{place} is a part of type {kind}: only text is encoded here")
        if kind not in _ORDER:
            raise ValueError(
                f"{place} must be a part of type text, reasoning, thinking or tool_call, got {_short(part)}"
            )
        weight = _pop_weight({key: value for key, value in part.items() if value is not None}, place)
        given = [part[key] for key in (kind, "text", "value") if part.get(key) is not None]
        value = next((one for one in given if one), given[0] if given else None)
        if kind == "thinking" and isinstance(value, list):
            inner = _read_parts(value, place)
            _refuse_weight(math.prod(w for _, w in inner.weighed.get("content", ())), f"a part of {place}")
            value = inner.text
        text = _text(value, place)
        if kind == "tool_call" or not text.strip():
            _refuse_weight(weight, place)
        rank = _ORDER.index(kind)
        if text and rank < last:
            raise ValueError(
                f"{place} is {kind} after {_ORDER[last]}: a message has its reasoning, then its text, then "
                "its calls; make messages of the parts"
            )
        last = max(rank, last) if text else last
        if kind == "tool_call":
            found.calls.append(_parse_json(text, f"{where}: tool_call"))
        elif kind == "text":
            found.text += text
            found.weighed.setdefault("content", []).append((len(text), weight))
        else:
            found.reasoning += text
            found.is_thinking |= kind == "thinking"
            found.weighed.setdefault("reasoning_content", []).append((len(text), weight))
    return found


def _refuse_weight(weight: float, place: str) -> None:
    """Raise ValueError unless the weight is 1."""
    if weight != 1:
        raise ValueError(
            f"{place} has the weight {weight:g}: a weight is of a message, or of a part of it that is text "
            "or reasoning and more than white space; give it to the message, or make messages of the parts"
        )


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} must be JSON, got {_short(text)} ({error})") from error


def _read_call(call: Any, where: str) -> dict[str, Any]:
    """One tool call in OpenAI's format, with arguments as a dict."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise ValueError(f"{where}: a tool call needs a name and arguments, got {_short(call)}")
    arguments = inner.get("arguments")
    if arguments is None:
        arguments = inner.get("parameters")  # Llama's own format of a call
        others = sorted(set(map(str, inner)) - {"name", "arguments", "parameters", "id", "type", "index"})
        if arguments is None and any(inner[key] is not None for key in others if key in inner):
            raise ValueError(f"{where}: a tool call's arguments belong under 'arguments', got {others}")
    if isinstance(arguments, str):
        # Templates print arguments with tojson, which would quote a string of JSON a second time.
        arguments = _parse_json(arguments or "{}", f"{where}: arguments")
    if arguments is not None and not isinstance(arguments, dict):
        raise ValueError(f"{where}: tool call arguments must be an object, got {_short(arguments)}")
    function = {"name": inner["name"], "arguments": dict(arguments or {})}
    call_id = {"id": call["id"]} if call.get("id") is not None else {}
    return {"type": "function", **call_id, "function": function}


def _read_conversations(row: Mapping[str, Any]) -> list[Message]:
    items = _as_list(row["conversations"], "conversations")
    messages = [_read_turn(item, f"conversations[{i}]") for i, item in enumerate(items)]
    return _with_system(row, messages)


def _read_turn(item: Any, where: str) -> Message:
    """One ShareGPT turn as a message."""
    if isinstance(item, dict) and "role" in item:
        return _read_message(item, where)
    if not isinstance(item, dict) or "from" not in item:
        raise ValueError(f"{where} must be a dict with from and value, got {_short(item)}")
    refuse_media(item, where)
    speaker = item["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise ValueError(f"{where} has the role {speaker!r}; known roles: {', '.join(SHAREGPT_ROLES)}")
    message: Message = {key: value for key, value in item.items() if key not in ("from", "value")}
    message["role"] = SHAREGPT_ROLES[speaker]
    value = _text(item.get("value"), f"{where}.value")
    if speaker != "function_call":
        return _read_message({**message, "content": value}, where)
    calls = _parse_json(value, f"{where}: function_call")
    calls = calls if isinstance(calls, list) else [calls]
    return _read_message({**message, "content": "", "tool_calls": calls}, where)


def _with_system(row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """The messages, with the row's ``system`` in front unless they begin with a system message."""
    system = row.get("system")
    if not system or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": _text(system, "system")}, *messages]


def _read_alpaca(row: Mapping[str, Any]) -> list[Message]:
    """Messages of an Alpaca row, with its history."""
    if row.get("output") is None:
        raise ValueError(f'an Alpaca row needs "instruction" and "output", got the keys {sorted(row)}')
    if row.get("corrected") is not None:
        raise ValueError(
            '"corrected" is not read, and "output" would be trained in its place: give what is to be learnt '
            "as messages"
        )
    messages: list[Message] = []
    for number, pair in enumerate(_as_list(row.get("history") or [], "history")):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"history[{number}] must be a [user, assistant] pair, got {_short(pair)}")
        messages += _pair(pair[0], pair[1], f"history[{number}]")
    parts = [_text(row.get(key) or "", key) for key in ("instruction", "input")]
    messages += _pair("\n".join(part for part in parts if part), row["output"], "output")
    return _with_system(row, messages)


def _read_prompt(row: Mapping[str, Any]) -> list[Message]:
    """Messages of a prompt/completion row; a prompt given as a list of messages is not trained."""
    if row.get("completion") is None:
        raise ValueError(f'a prompt row needs "prompt" and "completion", got the keys {sorted(row)}')
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) or isinstance(completion, str):
        return _with_system(row, _pair(prompt, completion, "prompt/completion"))
    given, wanted = (
        [_read_message(item, f"{key}[{i}]") for i, item in enumerate(_as_list(row[key], key))]
        for key in ("prompt", "completion")
    )
    return _with_system(row, [{**message, "train": 0} for message in given] + wanted)


def _pair(user: Any, assistant: Any, where: str) -> list[Message]:
    """A user's message and the assistant's answer."""
    return [
        {"role": "user", "content": _text(user, f"{where} (user side)")},
        {"role": "assistant", "content": _text(assistant, f"{where} (assistant side)")},
    ]


_READERS: dict[str, Callable[[Mapping[str, Any]], list[Message]]] = {
    "messages": _read_messages,
    "conversations": _read_conversations,
    "instruction": _read_alpaca,
    "prompt": _read_prompt,
}
_READ = {*_READERS, "input", "output", "history", "system", "completion", "tools", "chat_template_kwargs"}
_TAKEN = {
    *("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
}


def _refuse_undesired(row: Mapping[str, Any]) -> None:
    """Refuse a row marked as unwanted, or with two answers of which one is preferred."""
    marked = next((key for key in _OF_THE_ROW if row.get(key) is False), None)
    if marked is not None:
        raise ValueError(
            f'"{marked}" is False, which marks an answer that is not wanted, and it would be trained: leave '
            "such rows out, or the column, if it means something else"
        )
    both = row.get("chosen") is not None and row.get("rejected") is not None
    if both and all(row.get(key) is None for key in _ANSWERS):
        raise ValueError(
            "a row of two answers (chosen, rejected) is for learning a preference: for supervised "
            "fine-tuning give the one that is to be learnt, as messages or as prompt and completion"
        )


def _pop_weight(message: Message, place: str) -> float:
    """Product of a message's weights, which are removed from it."""
    total = 1.0
    for key in _YES_OR_NO:
        value = message.pop(key, None)
        if not isinstance(value, bool | None):
            raise ValueError(
                f"{place}: {key} says whether it is trained and must be True or False, got {value!r}"
            )
        total *= value is not False
    given = next((key for key in _BY_CHARACTERS if message.pop(key, None)), None)
    if given is not None:
        raise ValueError(
            f"{place}: {given} is not read; give the content in parts, each with a weight: "
            '[{"type": "text", "text": ..., "weight": 0}, ...]'
        )
    for key in _FLAG_KEYS:
        value = message.pop(key, 1)
        if not isinstance(value, int | float) or not 0 <= value <= _MOST:
            raise ValueError(
                f"{place}: {key} must be a finite number that is not negative (False or True), got {value!r}"
            )
        total *= float(value)
    return total


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tool schemas as a list of dicts; None if there are none."""
    if isinstance(tools, str):
        tools = _parse_json(tools, "tools") if tools.strip() else None
    if not tools:
        return None
    schemas = []
    for number, tool in enumerate(_as_list(tools, "tools")):
        tool = _parse_json(tool, f"tools[{number}]") if isinstance(tool, str) else tool
        if not isinstance(tool, dict):
            raise ValueError(f"tools[{number}] must be a JSON schema (a dict), got {_short(tool)}")
        # Templates read tool.function.name; many data sets have the inner object alone.
        bare = "function" not in tool and "name" in tool
        schemas.append({"type": "function", "function": dict(tool)} if bare else dict(tool))
    return schemas
