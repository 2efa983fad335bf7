"""Nested Python state to JSON and back, exactly: no pickle, and no value is changed silently."""

import base64
import json
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import torch

from fsdp_sft._process.bounds import MAX_SIZE

MALFORMED = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Errors that reading may raise if JSON holds something unexpected, such as 1e999 for a number."""
# JSON has no tuples, and only strings as keys. Such values become JSON objects with this key.
_TAG = "__fsdp_sft__"
_SEQUENCES = (tuple, deque, torch.Size)
_MOST_NUMBERS = 1024  # of a tensor that is written as JSON, such as a scheduler's rates


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """Turn nested state into values that JSON can hold.

    Args:
        value: Dicts (with string, integer or other plain keys), lists, tuples, strings, numbers, booleans
            and None; NaN and infinities are kept. Plain tensors of 1 to 1,024 numbers come back on the CPU.
        where: Name of ``value`` in an error, such as ``"train_state"``.
        tensors: Dict to which all tensors are added under their key paths, and with which bytes are allowed
            too; None refuses bytes.

    Raises:
        TypeError: For any other value; the message names its key path.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) in (list, *_SEQUENCES):
        items = [encode(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]
        length = {"maxlen": value.maxlen} if type(value) is deque and value.maxlen is not None else {}
        return items if type(value) is list else {_TAG: type(value).__name__, "items": items, **length}
    if type(value) in (dict, OrderedDict, Counter):
        return _encode_dict(value, where, tensors)
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, float):  # NumPy's float64 is a subclass
        return float(value)
    if tensors is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
        tensors[where] = value
        return {_TAG: "tensor", "key": where}
    if type(value) is torch.Tensor and 0 < value.numel() <= _MOST_NUMBERS and not value.is_meta:
        numbers = encode(value.detach().cpu().tolist(), where)
        return {_TAG: "numbers", "dtype": encode(value.dtype, where), "items": numbers}
    if tensors is not None and type(value) is bytes:
        return {_TAG: "bytes", "base64": base64.b64encode(value).decode()}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold: "
        + (
            "plain tensors have 1 to 1,024 numbers; others belong in rank_state, or in the model as buffers"
            if isinstance(value, torch.Tensor) and tensors is None
            else "save a model's shards as a model, or this rank's part alone (DTensor.to_local)"
            if isinstance(value, torch.Tensor)
            else "use dicts, lists, tuples, strings, numbers, booleans and None"
        )
    )


def decode(value: Any, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """The inverse of ``encode``.

    Raises:
        MALFORMED: If ``encode`` cannot have made ``value``.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    kind = value[_TAG]
    if kind == "tensor":
        return (tensors or {})[value["key"]]
    if kind == "bytes":
        return base64.b64decode(value["base64"], validate=True)
    if kind == "numbers":
        return torch.tensor(value["items"], dtype=decode(value["dtype"]))
    if kind == "dtype" and isinstance(dtype := getattr(torch, str(value["name"])), torch.dtype):
        return dtype  # and no other attribute of torch
    if kind in ("dict", "Counter"):
        pairs = {_checked(decode(key)): decode(item, tensors) for key, item in value["items"]}
        return pairs if kind == "dict" else Counter(pairs)
    sequence: Any = {cls.__name__: cls for cls in _SEQUENCES}[kind]
    items = [decode(item, tensors) for item in value["items"]]
    return deque(items, value["maxlen"]) if "maxlen" in value else sequence(items)


def dumps(value: Any, *, canonical: bool = True) -> bytes:
    """JSON as bytes, with NaN and infinities as Python writes them.

    Canonical: with sorted keys, so that equal values give equal bytes.
    """
    return json.dumps(value, sort_keys=canonical, separators=(",", ":")).encode()


def _encode_dict(value: Mapping[Any, Any], where: str, tensors: dict[str, torch.Tensor] | None) -> Any:
    """A dict as a JSON object if all its keys are strings, else as a list of pairs."""
    encoded = [
        (encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]", tensors))
        for key, item in value.items()
    ]
    if type(value) is not Counter and all(type(key) is str for key in value) and _TAG not in value:
        return dict(encoded)
    return {
        _TAG: "Counter" if type(value) is Counter else "dict",
        "items": [list(pair) for pair in encoded],
    }


def _checked(key: Any) -> Any:
    """``key`` itself; raises ValueError for a number of over 64 bits."""
    if isinstance(key, int) and abs(key) > MAX_SIZE:  # which are slow to hash, or chosen to collide
        raise ValueError("a key is an integer of more than 64 bits")
    return key
