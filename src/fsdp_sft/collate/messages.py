"""Messages of a row in the forms that chat templates take: their roles, parts and tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import count
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
IN_PARTS = "reasoning given as a part of type thinking"
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
            message[IN_PARTS] = bool(parts["thinking"])
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
    function = {"name": inner["name"], "arguments": dict(arguments or {})}
    call_id = {"id": call["id"]} if call.get("id") is not None else {}
    return {"type": "function", **call_id, "function": function}


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


def other_forms(messages: list[Message]) -> Iterator[list[Message]]:
    """Alternative forms of the messages, the smallest change first; none without tool calls.

    - Arguments of tool calls as a JSON string, for templates that concatenate them with other strings.
    - Ids of nine characters for tool calls, and for each result the id and the name of its call, which the
      templates of Mistral's models require and most data sets lack.
    - Both.
    """
    if not any("tool_calls" in message for message in messages):
        return
    as_json = _with_json_arguments(messages)
    yield from (as_json, _with_call_ids(messages), _with_call_ids(as_json))


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
    waiting: list[tuple[dict[str, Any], str]] = []  # calls without a result, and their ids for the template
    number = count()
    for message in messages:
        if "tool_calls" in message:
            named = [(call, f"call{next(number):05d}") for call in message["tool_calls"]]
            message = {**message, "tool_calls": [{**call, "id": name} for call, name in named]}
            waiting += named
        elif message["role"] == "tool" and waiting:
            given = message.get("tool_call_id")
            answered = next(
                (item for item in waiting if given is not None and item[0].get("id") == given), waiting[0]
            )
            waiting.remove(answered)
            message = {"name": answered[0]["function"]["name"], **message, "tool_call_id": answered[1]}
        changed.append(message)
    return changed


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
