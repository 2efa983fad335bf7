"""Convert the rows of data sets to one list of chat messages, without a tokenizer or template.

A new shape of rows is a reader and a line in `SHAPES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import Any

from fsdp_sft.errors import RowError

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

_FLAG_KEYS = {
    *("train", "loss_weight", "weight", "loss_scale", "loss", "training", "trainable"),
    *("train_detail", "training_detail"),  # axolotl's, which are for parts of a message
}
_ORDER = ("thinking", "reasoning", "text", "tool_call")  # of the parts of a content
_MEANT = {
    "role",
    "content",
    "tool_calls",
    "weight",
    "train",
    *REASONING_KEYS,
}  # by keys that are spelt nearly so
_KNOWN = {*_MEANT, *_FLAG_KEYS, "function_call", "tool_call_id", "name"}
_NEAR = 0.83  # difflib's ratio: "tool_call", "toolCalls", and not "reason"
# Key under which a message carries a note while its row is read, which removes it.
_IN_PARTS = "reasoning given as a part of type thinking"
# Keys of rows and messages, as LLaVA, LLaMA-Factory, ms-swift, TRL and the docs of datasets name them.
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# Types of content parts, in OpenAI's and transformers' formats.
_MEDIA_PARTS = (*_MEDIA, "image_url", "video_url", "audio_url", "input_image", "input_audio")
# Keys that a processor adds to a tokenised row, for the vision or audio encoder of a model.
KEYS_OF_TOWERS = (
    "pixel_values",
    "pixel_values_videos",
    "pixel_values_images",
    "image_grid_thw",
    "video_grid_thw",
    "image_sizes",
    "input_features",
    "input_values",
    "audio_values",
)
_MEDIA_KEYS = {*_MEDIA, *KEYS_OF_TOWERS}

Message = dict[str, Any]

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
    in_parts = [message.pop(_IN_PARTS, False) for message in messages]
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


# One message, its parts and calls.


def read_message(item: Any, where: str) -> Message:
    """A message in the form that templates take, but with the flags that say whether it is trained."""
    if not isinstance(item, dict):
        raise ValueError(f"{where} must be a dict with role and content, got {shortened(item)}")
    # In a row from an Arrow table each message has the keys of all, with None for those that it lacks.
    message = {str(key): value for key, value in item.items() if value is not None}
    refuse_media(message, where)
    for key in message.keys() - _KNOWN:
        if (meant := _meant_by(key)) and meant not in message:
            raise ValueError(f"{where} has the key {key!r}, which is not read: is it {meant}?")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where} has the role {role!r}; known roles: {', '.join(ROLES)}")
    calls = message.pop("tool_calls", None) or []
    if "function_call" in message:  # OpenAI's form before tool_calls
        calls = [*calls, message.pop("function_call")]
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = _read_parts(content, where)
        content = "".join(parts["text"])
        calls = [*calls, *(parse_json(call, f"{where}: tool_call") for call in parts["tool_call"])]
        if reasoning := "".join([*parts["thinking"], *parts["reasoning"]]):
            if any(key in message for key in REASONING_KEYS):
                raise ValueError(f"{where} has reasoning twice: in its parts and beside its content")
            message["reasoning_content"] = reasoning
            message[_IN_PARTS] = bool(parts["thinking"])
    if content is None and not calls:
        raise ValueError(f"{where} has neither content nor tool_calls, got the keys {sorted(message)}")
    message["content"] = "" if content is None else as_text(content, f"{where}.content")
    if calls:
        message["tool_calls"] = [_read_call(call, where) for call in calls]
    return message


@lru_cache(maxsize=1024)  # messages of a data set have the same keys
def _meant_by(key: str) -> str:
    """The key that is read and is spelt nearly as this one; "" if there is none."""
    return next(iter(get_close_matches(key.lower(), _MEANT, 1, _NEAR)), "")


def _read_parts(parts: Sequence[Any], where: str) -> dict[str, list[str]]:
    """The texts of a content that is a list of parts, by the type of the part."""
    found: dict[str, list[str]] = {kind: [] for kind in _ORDER}
    last = 0
    for number, part in enumerate(parts):
        kind, place = part.get("type") if isinstance(part, dict) else None, f"{where}.content[{number}]"
        if kind not in _ORDER or not take_flag(
            {key: part[key] for key in part if part[key] is not None}, place
        ):
            raise RowError(
                f"{place} is a part of type {kind}: only text is encoded here, in parts of type text, "
                "reasoning, thinking and tool_call, and a message is trained as a whole, or not (make "
                f"messages of the parts); got {shortened(part)}",
                reason="media" if kind in _MEDIA_PARTS else "malformed",
            )
        given = [part[key] for key in (kind, "text", "value") if part.get(key) is not None]
        value = next((one for one in given if one), given[0] if given else None)
        if kind == "thinking" and isinstance(value, list):
            value = "".join(_read_parts(value, place)["text"])
        text = as_text(value, place)
        rank = _ORDER.index(kind)
        if text and rank < last:
            raise ValueError(
                f"{place} is {kind} after {_ORDER[last]}: a message has its reasoning, then its text, then "
                "its calls; make messages of the parts"
            )
        last = max(rank, last) if text else last
        found[kind].append(text)
    return found


def _read_call(call: Any, where: str) -> dict[str, Any]:
    """One tool call in OpenAI's format, with arguments as a dict."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise ValueError(f"{where}: a tool call needs a name and arguments, got {shortened(call)}")
    given = {str(key): value for key, value in inner.items() if value is not None}
    arguments = given.get("arguments", given.get("parameters"))  # the latter in Llama's own format of a call
    others = sorted(given.keys() - {"name", "id", "type", "index"})
    if arguments is None and others:
        raise ValueError(f"{where}: a tool call's arguments belong under 'arguments', got {others}")
    if isinstance(arguments, str):
        # Templates print arguments with tojson, which would quote a string of JSON a second time.
        arguments = parse_json(arguments or "{}", f"{where}: arguments")
    if arguments is not None and not isinstance(arguments, dict):
        raise ValueError(f"{where}: tool call arguments must be an object, got {shortened(arguments)}")
    return {
        "type": "function",
        **({"id": call["id"]} if call.get("id") is not None else {}),
        "function": {"name": inner["name"], "arguments": dict(arguments or {})},
    }


def take_flag(message: Message, place: str) -> bool:
    """Whether a message is trained, by its flags, which are removed from it.

    Raises:
        ValueError: If a flag says neither yes nor no.
    """
    given = {key: message.pop(key) for key in sorted(_FLAG_KEYS & message.keys())}
    flags = {key: value for key, value in given.items() if value != []}  # parts of an answer that has none
    for key, value in flags.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise ValueError(
                f"{place}: {key} says whether it is trained and must be 0 or 1 (False or True), got "
                f"{value!r}; a message is trained as a whole, or not: make messages of parts, and other "
                "factors of a loss loss_weights of a batch"
            )
    return all(flags.values())


def refuse_media(row: Mapping[Any, Any], where: str = "the row") -> None:
    """Refuse a row or message with an image, a video or a sound.

    Raises:
        RowError: If it has one that is not empty.
    """
    found = [key for key, value in row.items() if key in _MEDIA_KEYS and not _is_empty(value)]
    if found:
        raise RowError(
            f"{where} has {' and '.join(map(repr, found))}: only text is encoded here, and the row would be "
            "trained without it. Leave the column out of the data set if the model is not to see it, or "
            "give train_step batches of the model's own processor",
            reason="media",
        )


def _is_empty(value: Any) -> bool:
    """Whether a value is null, False or blank, or holds nothing else, as in a row from an Arrow table."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return all(map(_is_empty, value))
    return value is None or value is False or (isinstance(value, str | bytes) and not value.strip())


def as_text(value: Any, where: str) -> str:
    """The value, or ValueError with its place if it is no str."""
    if not isinstance(value, str):
        raise ValueError(f"{where} must be a string, got {shortened(value)}")
    return value


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text, or ValueError with its place."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be JSON, got {shortened(text)} ({error})") from None


def shortened(value: Any) -> str:
    """Type and shortened repr of a value, for error messages."""
    return f"{type(value).__name__} {value!r:.60}"
