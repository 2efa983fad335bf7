"""Odd safetensors files: what other programs, damage or a stranger might write, by name."""

import json
import struct


def file_of(header: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of a header and data; the length that it claims may be another."""
    text = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(dtype: object = "F32", shape: object = None, offsets: object = None, more: str = "") -> str:
    """A header of one tensor; values are JSON as text, or are turned into it."""
    parts = {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": offsets or [0, 8]}
    texts = {
        key: value if key != "dtype" and isinstance(value, str) else json.dumps(value)
        for key, value in parts.items()
    }
    return '{"a":{' + ",".join(f'"{key}":{text}' for key, text in texts.items()) + more + "}}"


def _named(*names: str) -> str:
    return "{" + ",".join(f'"{name}":{_entry()[5:-1]}' for name in names) + "}"


_EIGHT, _SOUND = bytes(8), _entry()
_META = '{"__metadata__":%s,' + _SOUND[1:]
_HUGE = 1 << 62

ODD: dict[str, bytes] = {
    "sound": file_of(_SOUND, _EIGHT),
    "padded with spaces": file_of(_SOUND + "   ", _EIGHT),
    "a space in front": file_of(" " + _SOUND, _EIGHT),
    "padded with a new line": file_of(_SOUND + "\n", _EIGHT),
    "padded with NUL": file_of(_SOUND + "\0", _EIGHT),
    "nothing": b"",
    "two bytes": b"\1\2",
    "no header": struct.pack("<Q", 0),
    "a cut header": file_of(_SOUND[:-1], _EIGHT),
    "a header that claims too much": file_of(_SOUND, _EIGHT, length=1 << 40),
    "a header that claims 2^64 - 1": file_of(_SOUND, _EIGHT, length=(1 << 64) - 1),
    "a header that claims too little": file_of(_SOUND, _EIGHT, length=10),
    "a header that claims some data": file_of(_SOUND, _EIGHT, length=len(_SOUND) + 4),
    "no tensors": file_of("{}"),
    "a list": file_of("[]"),
    "null": file_of("null"),
    "a number": file_of("3"),
    "a text": file_of('"x"'),
    "two values": file_of(_SOUND + "{}", _EIGHT),
    "a byte order mark": file_of("\ufeff" + _SOUND, _EIGHT),
    "a trailing comma": file_of(_SOUND[:-1] + ",}", _EIGHT),
    "a comment": file_of(_SOUND[:-1] + "/**/}", _EIGHT),
    "single quotes": file_of(_SOUND.replace('"', "'"), _EIGHT),
    "5,000 deep": file_of("[" * 5000 + "]" * 5000),
    "NaN as a size": file_of(_entry(shape="[NaN]"), _EIGHT),
    "NaN in the metadata": file_of(_META % '{"x":NaN}', _EIGHT),
    "NaN beside the entry": file_of(_entry(more=',"x":NaN'), _EIGHT),
    "Infinity beside the entry": file_of(_entry(more=',"x":Infinity'), _EIGHT),
    "a further key": file_of(_entry(more=',"x":1'), _EIGHT),
    "a further object": file_of(_entry(more=',"x":{"y":[1]}'), _EIGHT),
    "a further value 200 deep": file_of(_entry(more=',"x":' + "[" * 200 + "]" * 200), _EIGHT),
    "half of a surrogate pair": file_of(_named("\\ud800"), _EIGHT),
    "the other half": file_of(_named("\\udc00a"), _EIGHT),
    "half a pair in the metadata": file_of(_META % '{"x":"\\ud800"}', _EIGHT),
    "a surrogate pair": file_of(_named("\\ud83d\\ude00"), _EIGHT),
    "no UTF-8": file_of(_SOUND.replace('"a"', '"?"').encode().replace(b"?", b"\xff"), _EIGHT),
    "a control character": file_of(_named("a\x01"), _EIGHT),
    "an escaped NUL": file_of(_named("a\\u0000"), _EIGHT),
    "an empty name": file_of(_named(""), _EIGHT),
    "a name twice": file_of(_named("a", "a"), _EIGHT),
    "a field twice": file_of(_SOUND.replace('"dtype"', '"dtype":"F32","dtype"'), _EIGHT),
    "metadata twice": file_of('{"__metadata__":{},' + (_META % "{}")[1:], _EIGHT),
    "metadata null": file_of(_META % "null", _EIGHT),
    "metadata of a number": file_of(_META % '{"x":1}', _EIGHT),
    "metadata as a list": file_of(_META % "[]", _EIGHT),
    "metadata nested": file_of(_META % '{"x":{}}', _EIGHT),
    "no dtype": file_of('{"a":{"shape":[2],"data_offsets":[0,8]}}', _EIGHT),
    "no shape": file_of('{"a":{"dtype":"F32","data_offsets":[0,8]}}', _EIGHT),
    "no place": file_of('{"a":{"dtype":"F32","shape":[2]}}', _EIGHT),
    "null for a tensor": file_of('{"a":null}'),
    "a text for a tensor": file_of('{"a":"F32"}'),
    "an unknown dtype": file_of(_entry("F33"), _EIGHT),
    "a dtype in small letters": file_of(_entry("f32"), _EIGHT),
    "a list of dtypes": file_of(_entry(["F32"]), _EIGHT),
    "no dtype at all": file_of(_entry(None), _EIGHT),
    "a size of 2.0": file_of(_entry(shape="[2.0]"), _EIGHT),
    "a size of 2e0": file_of(_entry(shape="[2e0]"), _EIGHT),
    "a size of -2": file_of(_entry(shape="[-2]"), _EIGHT),
    "a size of -0": file_of(_entry(shape="[-0]", offsets=[0, 0])),
    "a size of +2": file_of(_entry(shape="[+2]"), _EIGHT),
    "a size of 02": file_of(_entry(shape="[02]"), _EIGHT),
    "a size of true": file_of(_entry(shape="[true,2]"), _EIGHT),
    "a size in quotes": file_of(_entry(shape='["2"]'), _EIGHT),
    "a shape as an object": file_of(_entry(shape="{}"), _EIGHT),
    "a shape as a number": file_of(_entry(shape="2"), _EIGHT),
    "a shape of null": file_of(_entry(shape="null", offsets=[0, 4]), bytes(4)),
    "a scalar": file_of(_entry(shape="[]", offsets=[0, 4]), bytes(4)),
    "2^124 elements, and a 0": file_of(_entry(shape=[_HUGE, _HUGE, 0], offsets=[0, 0])),
    "2^64 elements": file_of(_entry(shape=[1 << 64], offsets=[0, 0])),
    "2^64 bits, and a 0": file_of(_entry("F64", shape=[1 << 58, 0], offsets=[0, 0])),
    "5,000 digits": file_of(_entry(shape="[" + "1" * 5000 + "]", offsets=[0, 4]), bytes(4)),
    "100,000 dimensions": file_of(_entry(shape=[1] * 100_000, offsets=[0, 4]), bytes(4)),
    "one offset": file_of(_entry(offsets=[0]), _EIGHT),
    "three offsets": file_of(_entry(offsets=[0, 8, 8]), _EIGHT),
    "offsets as an object": file_of(_entry(offsets="{}"), _EIGHT),
    "an end before the begin": file_of(_entry(offsets=[8, 0]), _EIGHT),
    "an end after the file's": file_of(_entry(shape=[4], offsets=[0, 16]), _EIGHT),
    "a place of another size": file_of(_entry(shape=[1]), _EIGHT),
    "a byte too many": file_of(_SOUND, bytes(9)),
    "a byte too few": file_of(_SOUND, bytes(7)),
    "a gap in front": file_of(_entry(offsets=[4, 12]), bytes(12)),
    "a gap between": file_of(
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}',
        bytes(12),
    ),
    "an overlap": file_of(
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}',
        bytes(12),
    ),
    "two names for the same bytes": file_of(_named("a", "b"), _EIGHT),
    "an empty tensor inside another": file_of(
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"e":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}}',
        _EIGHT,
    ),
    "an empty tensor between two": file_of(
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"e":{"dtype":"F32","shape":[0],"data_offsets":[4,4]},'
        '"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        _EIGHT,
    ),
    "not in the order of the bytes": file_of(
        '{"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        _EIGHT,
    ),
    "half a byte": file_of(_entry("F4", shape=[3], offsets=[0, 1]), bytes(1)),
}
