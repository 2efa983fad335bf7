"""What a file may claim: bounds that every reader shares, so that a file costs in proportion to its size.

| what | at most | why |
|---|---|---|
| header of safetensors | ``MAX_HEADER_BYTES`` | the limit of safetensors |
| index of weight files | ``MAX_INDEX_BYTES`` | 256 MiB: 100 times that of a 1T model |
| manifest and other JSON | ``MAX_JSON_BYTES`` | parsed, it takes up to 24 times as much memory |
| settings of a model | ``MAX_SETTINGS_BYTES`` | 64 MiB: a tokenizer with its merges has 20 |
| layers or blocks, by a config | ``MAX_LAYERS`` | transformers builds each |
| experts or labels, by a config | ``MAX_LABELS`` | it makes lists of them |
| dimensions of a tensor | ``MAX_DIMS`` | torch's own |
| a size, an offset, a stride | ``MAX_SIZE`` | torch's own, a signed integer of 64 bits |
| ranks of a checkpoint | ``MAX_RANKS`` | a million |
"""

import json
import re
from typing import Any

MAX_HEADER_BYTES = 100_000_000
MAX_INDEX_BYTES = 1 << 28
MAX_JSON_BYTES = 1 << 27
MAX_SETTINGS_BYTES = 1 << 26
MAX_LAYERS = 4096
MAX_LABELS = 1 << 16
MAX_DIMS = 64
MAX_SIZE = (1 << 63) - 1
MAX_RANKS = 1 << 20
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def check_sizes(numbers: Any, what: str) -> tuple[int, ...]:
    """A shape, an offset or strides from a file, checked.

    Raises:
        ValueError: If no tensor can have it; the message begins with ``what``.
    """
    if (
        not isinstance(numbers, (list, tuple))
        or len(numbers) > MAX_DIMS
        or any(type(n) is not int or not 0 <= n <= MAX_SIZE for n in numbers)
    ):
        raise ValueError(f"{what} is no list of at most {MAX_DIMS} numbers that a tensor has")
    return tuple(numbers)


def parse_json(text: bytes, what: str) -> Any:
    """The value of a JSON text in UTF-8.

    Raises:
        ValueError: If it is not JSON, is nested too deeply, or has half of a surrogate pair in a text; the
            message begins with ``what``.
    """
    try:
        value = json.loads(text.decode())
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON: {error}") from None
    return value
