"""Read rows from a sequence, a Hugging Face data set, or files of JSON lines, which are read as streams."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fsdp_sft._compat import data
from fsdp_sft._tensors.disk import full_path
from fsdp_sft.collate import EncodedChat

_BLOCK_ROWS = 256


class Unreadable:
    """A line of a file that cannot be read as a row.

    Attributes:
        error: Description of what is wrong with it.
    """

    def __init__(self, error: str) -> None:
        self.error = error


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of a sequence, or lines of a file, for one process.

    Attributes:
        rows: The sequence; None for lines of a file.
        path: The file; None for rows of a sequence.
        start: First row, or first byte of the file.
        stop: The row, or byte, after the last.
    """

    rows: Any
    path: Path | None
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Size in rows or bytes."""
        return self.stop - self.start

    def portable(self) -> RowRange:
        """This range in a form to be pickled for another process, without other rows."""
        if self.path is not None or data.is_hub_dataset(self.rows):
            return self
        return RowRange(_rows_of(self.rows, self.start, self.stop), None, 0, self.size)

    def read(self) -> Iterator[tuple[list[Any], int]]:
        """Blocks of rows, each with its share of ``size``."""
        return self._lines() if self.path is not None else self._rows()

    def _rows(self) -> Iterator[tuple[list[Any], int]]:
        for start in range(self.start, self.stop, _BLOCK_ROWS):
            block = _rows_of(self.rows, start, min(start + _BLOCK_ROWS, self.stop))
            yield block, len(block)

    def _lines(self) -> Iterator[tuple[list[Any], int]]:
        assert self.path is not None
        block: list[Any] = []
        taken = given = 0
        with open(self.path, "rb") as file:
            file.seek(self.start)
            while taken < self.size and (line := file.readline()):
                taken += len(line)
                if line.strip():
                    block.append(_parsed(line))
                if len(block) == _BLOCK_ROWS:
                    yield block, taken - given
                    block, given = [], taken
        if taken > given:
            yield block, taken - given


@dataclass(frozen=True)
class RowSource:
    """All rows of a data set.

    Attributes:
        rows: A sequence, or a ``datasets.Dataset``; None for files.
        paths: Files of JSON lines; empty for a sequence.
    """

    rows: Any
    paths: tuple[Path, ...] = ()

    @classmethod
    def of(cls, given: Any) -> RowSource:
        """The source for what the user has given.

        Raises:
            ValueError: If it cannot be read, or is empty.
            FileNotFoundError: If a file does not exist.
        """
        if isinstance(given, str | os.PathLike):
            return cls(None, (_checked(full_path(given)),))
        if isinstance(given, Sequence) and given and all(isinstance(one, str | os.PathLike) for one in given):
            return cls(None, tuple(_checked(full_path(one)) for one in given))
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
        return cls(given)

    @property
    def unit(self) -> str:
        """Unit of ``size``: "B" (bytes) or "row"."""
        return "B" if self.paths else "row"

    @property
    def size(self) -> int:
        """Number of rows, or bytes of the files."""
        return sum(path.stat().st_size for path in self.paths) if self.paths else len(self.rows)

    def shares(self, count: int) -> list[list[RowRange]]:
        """All rows in at most ``count`` shares of about the same size, in order; none of them is empty."""
        edges = [self.size * i // count for i in range(count + 1)]
        shares: list[list[RowRange]] = [[] for _ in range(count)]
        if not self.paths:
            for share, (start, stop) in zip(shares, pairwise(edges), strict=True):
                share.append(RowRange(self.rows, None, start, stop))
        begin = 0
        for path in self.paths:
            size = path.stat().st_size
            own = [_next_line(path, min(max(edge - begin, 0), size)) for edge in edges]
            for share, (start, stop) in zip(shares, pairwise(own), strict=True):
                share.append(RowRange(None, path, start, stop))
            begin += size
        filled = [[piece for piece in share if piece.size] for share in shares]
        return [share for share in filled if share]

    def sample(self, number: int) -> list[tuple[int, Any]]:
        """(index, row) of rows spread over the data set; for files, the index within the sample."""
        if self.paths:
            found = [
                row for path in self.paths for row in _lines_spread_over(path, number // len(self.paths))
            ]
            return list(enumerate(found[:number]))
        length = len(self.rows)
        indices = range(length) if length <= number else [length * i // number for i in range(number)]
        return [(index, _rows_of(self.rows, index, index + 1)[0]) for index in indices]


def row_bytes(row: Any) -> bytes:
    """Bytes of a row that are equal for equal rows."""
    if isinstance(row, EncodedChat):
        row = [row.input_ids, row.labels, row.loss_weights, row.notes]
    try:
        # Keys are not sorted: templates print objects in the order of their keys, so the order matters.
        return json.dumps(row, default=_plain).encode()
    except (TypeError, ValueError, RecursionError):  # a key that is no str, or a row that contains itself
        return repr(row).encode()


def _plain(value: Any) -> Any:
    """The value in a form that JSON can hold."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _checked(path: Path) -> Path:
    """The absolute path of a file of JSON lines that exists and is not empty."""
    if path.suffix != ".jsonl":
        raise ValueError(
            f"encode_dataset reads files of JSON lines (.jsonl), got {path}; load others with "
            "datasets.load_dataset"
        )
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty")
    return path


def _rows_of(rows: Any, start: int, stop: int) -> list[Any]:
    """Rows [start, stop) as a list."""
    # A Hugging Face data set returns columns for a slice, and a slice is far faster than single rows.
    if data.is_hub_dataset(rows):
        columns = rows[start:stop]
        return [{name: column[i] for name, column in columns.items()} for i in range(stop - start)]
    return [rows[index] for index in range(start, stop)]


def _parsed(line: bytes) -> Any:
    """The row in a line, or an `Unreadable`."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return Unreadable(f"no JSON: {error}")


def _next_line(path: Path, place: int) -> int:
    """Byte at which the first line at or behind byte ``place`` begins."""
    if not place:
        return 0
    with open(path, "rb") as file:
        file.seek(place - 1)
        file.readline()
        return file.tell()


def _lines_spread_over(path: Path, number: int) -> Iterator[Any]:
    """The rows of about ``number`` lines at equal distances in a file."""
    size, seen = path.stat().st_size, -1
    with open(path, "rb") as file:
        for i in range(max(number, 1)):
            place = size * i // max(number, 1)
            if place <= seen:
                continue
            file.seek(place)
            if place:
                file.readline()
            line = file.readline()
            seen = file.tell()
            if line.strip():
                yield _parsed(line)
