"""Where metrics go: the protocol of a sink, a JSONL file, and readable lines on a text stream."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Protocol, TypeAlias, runtime_checkable

from fsdp_sft._tensors.disk import full_path

Scalar: TypeAlias = float | int | str | bool | None


@runtime_checkable
class MetricSink(Protocol):
    """A place that `MetricLogger` writes to: anything with these two methods.

    A sink is made on every rank and used on the main one alone, so it must not open files or connections
    before its first `log`.
    """

    def log(self, metrics: Mapping[str, Scalar], step: int) -> None:
        """Write the metrics of one step; values are plain Python scalars, and steps need not ascend."""

    def close(self) -> None:
        """Write out what is left; may be called before any `log`, and more than once."""


class JsonlSink:
    """One line of strict JSON per step, appended to a file and flushed.

    A line is an object with `step`, `time` (Unix seconds) and the metrics in the order given; NaN and
    infinities are the strings "NaN", "Infinity", "-Infinity". A last line that a crash cut off is removed
    first.

    Args:
        path: File to append to; its parent folders are made.
        clock: Function that returns Unix seconds; for tests.
    """

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = full_path(path)
        self._clock = clock
        self._file: IO[str] | None = None

    def log(self, metrics: Mapping[str, Scalar], step: int) -> None:
        """Append one line."""
        self._file = self._file or _open_for_append(self._path)
        row = {key: _json_value(value) for key, value in metrics.items()}
        self._file.write(json.dumps({"step": step, "time": self._clock(), **row}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class LineSink:
    """One readable line per step, printed above the bars of tqdm where that is in use.

    Args:
        stream: Text stream to print to; None means `sys.stdout`, as it is at each `log`.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream

    def log(self, metrics: Mapping[str, Scalar], step: int) -> None:
        """Print one line and flush it."""
        _print_line(_format_line(metrics, step), self._stream or sys.stdout)

    def close(self) -> None:
        """Leave the stream open: it belongs to the caller."""


def _json_value(value: Scalar) -> Scalar:
    """The value in strict JSON, where NaN and infinities are strings."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _open_for_append(path: Path) -> IO[str]:
    """Open a JSONL file at its end, after removing a last line that has no newline and is not JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        content = path.read_bytes()
        start = content.rfind(b"\n") + 1
        if start < len(content):
            _mend_last_line(path, content[start:], start)
    return path.open("a", encoding="utf-8", newline="\n")


def _mend_last_line(path: Path, last_line: bytes, start: int) -> None:
    """Remove a last line that was cut off, or end one that only lacks its newline."""
    with path.open("r+b") as file:
        try:
            json.loads(last_line)
        except ValueError:
            file.truncate(start)
        else:
            file.seek(0, 2)
            file.write(b"\n")


def _format_line(row: Mapping[str, Scalar], step: int) -> str:
    return " | ".join(
        [f"step {step:>6}", *(f"{key} {_format_value(key, value):>9}" for key, value in row.items())]
    )


def _format_value(key: str, value: Scalar) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float):
        return str(value).replace("\n", "\\n")
    magnitude = abs(value)
    is_learning_rate = key.replace("/", "_").split("_")[-1] == "lr" or "learning_rate" in key
    if not math.isfinite(value):
        return str(value)
    if is_learning_rate or magnitude >= 1e9 or 0 < magnitude < 1e-3:
        return f"{value:.2e}"
    return f"{value:.1f}" if magnitude >= 1000 else f"{value:.4f}"


def _print_line(line: str, stream: IO[str]) -> None:
    # A plain print would cut through a bar of tqdm's. If there is a bar, tqdm has been imported already.
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None:
        print(line, file=stream)
    else:
        tqdm.write(line, file=stream)
    stream.flush()
