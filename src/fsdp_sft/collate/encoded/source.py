"""Read rows from a sequence, a Hugging Face data set, or files of JSON lines."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_sft._compat import data
from fsdp_sft._tensors.disk import full_path
from fsdp_sft.collate import EncodedChat


class JsonLines(Sequence[Any]):
    """Rows of files of JSON lines, each read when it is indexed; a line that is no JSON stays a text.

    Args:
        paths: The files.

    Memory: 16 bytes a row.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._files, self._begins = array("q"), array("q")
        for number, path in enumerate(paths):
            begin = 0
            with open(path, "rb") as file:
                for line in file:
                    if line.strip():
                        self._files.append(number)
                        self._begins.append(begin)
                    begin += len(line)

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: Any) -> Any:
        with open(self.paths[self._files[index]], "rb") as file:
            file.seek(self._begins[index])
            line = file.readline()
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return line.decode(errors="replace")


def rows_to_read(given: Any) -> Any:
    """The rows that the user has given, as a sequence or a ``datasets.Dataset``.

    Raises:
        ValueError: If they cannot be read, or there are none.
        FileNotFoundError: If a file does not exist.
    """
    if isinstance(given, str | os.PathLike):
        given = [given]
    if isinstance(given, Sequence) and given and all(isinstance(one, str | os.PathLike) for one in given):
        given = JsonLines([full_path(one) for one in given])
    if not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        raise ValueError(
            "encode_dataset reads a sequence of rows, a datasets.Dataset, or .jsonl files, got "
            f"{type(given).__name__}; write a stream to a .jsonl file, or encode its rows "
            "with encode_chat, for PackedStream"
        )
    if not len(given):
        raise ValueError("there are no rows to encode")
    if data.is_hub_dataset(given) and given.format["type"] not in (None, "custom"):
        # Slices of other formats are tables or arrays. A transform stays.
        given = given.with_format(None, columns=given.format["columns"])
    return given


def rows_of(rows: Any, start: int, stop: int) -> list[Any]:
    """Rows [start, stop) as a list."""
    # A Hugging Face data set returns columns for a slice, and a slice is far faster than single rows.
    if data.is_hub_dataset(rows):
        columns = rows[start:stop]
        return [{name: column[i] for name, column in columns.items()} for i in range(stop - start)]
    return [rows[index] for index in range(start, stop)]


def portable(rows: Any, start: int, stop: int) -> tuple[Any, int]:
    """(rows to be pickled for another process, which needs those from start to stop; index of the first)."""
    if isinstance(rows, JsonLines) or data.is_hub_dataset(rows):
        return rows, 0
    return rows_of(rows, start, stop), start


def digest_of(source: Any) -> str:
    """A digest of all rows."""
    fingerprint = data.dataset_fingerprint(source)
    if fingerprint is not None:
        return f"fingerprint {fingerprint}"
    digest = hashlib.sha256()
    for path in source.paths if isinstance(source, JsonLines) else ():
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    for row in () if isinstance(source, JsonLines) else source:
        content = _row_bytes(row)
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _row_bytes(row: Any) -> bytes:
    """Bytes of a row that are equal for equal rows."""
    if isinstance(row, EncodedChat):
        row = [row.input_ids, row.labels, row.notes]
    try:
        # Keys are not sorted: templates print objects in the order of their keys, so the order matters.
        return json.dumps(row, default=_plain).encode()
    except (TypeError, ValueError, RecursionError):  # a key that is no str, or a row that contains itself
        return repr(row).encode()


def _plain(value: Any) -> Any:
    """The value in a form that JSON can hold."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
