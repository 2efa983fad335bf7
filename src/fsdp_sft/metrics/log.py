"""Metrics that are checked once and written to a JSONL file, to a stream and to any function, on one rank."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Self, TypeAlias

import torch

from fsdp_sft._process.words import answered
from fsdp_sft._ranks.agree import this_rank
from fsdp_sft._tensors.disk import full_path

Scalar: TypeAlias = float | int | str | bool | None


class MetricLogger:
    """Writes metrics to standard output, a JSONL file and whatever functions are given, on rank 0 alone.

    Every rank calls `log`; the main rank writes: rank 0 of the default process group at the first `log`, or
    the only process if there is none. `log` is not a collective: values that differ between ranks go through
    `aggregate_metrics` first. Arguments are checked on every rank; tensors are read (a device
    synchronisation) on the main rank alone.

    A JSONL line is strict JSON, an object with `step`, `time` (Unix seconds) and the metrics in the order
    given; NaN and infinities are the strings "NaN", "Infinity", "-Infinity", which Python's `float` and
    pandas' `to_numeric` read. An existing file is appended to; a last line that a crash cut off is removed
    first. `plot_run` draws such a file.

    Args:
        jsonl: File to append to; its parent folders are made. None writes no file.
        stdout: Print one readable line per `log`, above the bars of tqdm where that is in use.
        sinks: Functions that are called as `sink(metrics, step)`, with plain Python scalars; None is a value
            that is not known. The page "Watch a run" has those of wandb, TensorBoard and trackio.
        stream: Text stream to print to instead of `sys.stdout`.
        is_main: Whether this rank writes; None decides at the first `log`, as above.
        clock: Function that returns Unix seconds; for tests.

    Raises:
        TypeError: A sink that cannot be called.

    Example:
        >>> with fs.MetricLogger(jsonl="metrics.jsonl") as logger:
        ...     logger.log({"loss": 0.5, "lr": 1e-5}, step=1)
        step      1 | loss    0.5000 | lr  1.00e-05
        >>> print(Path("metrics.jsonl").read_text())
        {"step": 1, "time": ..., "loss": 0.5, "lr": 1e-05}
    """

    @answered
    def __init__(
        self,
        *,
        jsonl: str | Path | None = None,
        stdout: bool = True,
        sinks: Iterable[Callable[[Mapping[str, Scalar], int], object]] = (),
        stream: IO[str] | None = None,
        is_main: bool | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sinks = list(sinks)
        for sink in self._sinks:
            if not callable(sink):
                raise TypeError(f"a sink is called as sink(metrics, step), got {type(sink).__name__}")
        self._jsonl = None if jsonl is None else full_path(jsonl)
        self._file: IO[str] | None = None
        self._stdout, self._stream = stdout, stream
        self._clock = clock
        self._is_main = is_main
        self._closed = False

    def log(self, metrics: Mapping[str, object], step: int) -> None:
        """Write one line to the file and to the stream, flush them, and call each sink.

        Args:
            metrics: Values are float, int, str, bool, None or a real tensor of no dimensions.
            step: Optimizer step, an int >= 0.

        Raises:
            TypeError: A value (named by its key) of another type, a key that is not a str, a step that is not
                an int.
            ValueError: A key is "step" or "time", a step is negative, or the logger is closed.
        """
        if self._closed:
            raise ValueError(
                "log() was called on a closed MetricLogger; make a new one, it appends to the same file"
            )
        _check(metrics, step)
        if self._is_main is None:
            self._is_main = this_rank() == 0
        if not self._is_main:
            return
        row: dict[str, Scalar] = {
            key: value.item() if isinstance(value, torch.Tensor) else value  # type: ignore[misc]
            for key, value in metrics.items()
        }
        if self._jsonl is not None:
            self._file = self._file or _open_for_append(self._jsonl)
            values: dict[str, Scalar] = {"step": step, "time": self._clock()}
            values |= {key: _json_value(value) for key, value in row.items()}
            self._file.write(json.dumps(values, allow_nan=False) + "\n")
            self._file.flush()
        if self._stdout:
            _print_line(_format_line(row, step), self._stream or sys.stdout)
        for sink in self._sinks:
            sink(row, step)

    def close(self) -> None:
        """Close the file; may be called more than once."""
        self._closed = True
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        """Return the logger itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the logger."""
        self.close()


def _check(metrics: Mapping[str, object], step: int) -> None:
    """Refuse steps, names and values that cannot be logged."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            "metrics must be a dict of numbers by their names, such as {'loss': result.loss}, got "
            f"{type(metrics).__name__}"
        )
    if not isinstance(step, int) or isinstance(step, bool):
        raise TypeError(f"step must be an int, got {type(step).__name__}")
    if step < 0:
        raise ValueError(f"step must be >= 0, got {step}")
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise TypeError(f"metric names must be str, got {key!r}")
        if key in ("step", "time"):
            raise ValueError(f"metric name {key!r} is taken by the logger itself; rename it")
        if hasattr(value, "full_tensor"):
            raise TypeError(
                f"metric {key!r} is a DTensor; call .full_tensor() on all ranks before logging it"
            )
        if isinstance(value, torch.Tensor):
            if value.ndim != 0 or value.is_complex() or value.is_meta:
                raise TypeError(
                    f"metric {key!r} must be a real tensor of no dimensions, got shape {tuple(value.shape)}, "
                    f"{value.dtype} on {value.device}; reduce it first, for example with .mean()"
                )
        elif value is not None and not isinstance(value, (float, int, str)):
            raise TypeError(
                f"metric {key!r} must be a float, int, str, bool, None or 0-dim tensor, "
                f"got {type(value).__name__}; convert it first, for example with float()"
            )


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
