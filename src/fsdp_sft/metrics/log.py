"""Metrics that are checked once and written to every sink, on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Self

import torch

from fsdp_sft._process.words import answered
from fsdp_sft._ranks.agree import this_rank
from fsdp_sft.metrics.sinks import JsonlSink, LineSink, MetricSink, Scalar


class MetricLogger:
    """Writes metrics to standard output, a JSONL file and other sinks, on rank 0 alone.

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
        sinks: More places to write to: `ProgressBar`, `TensorBoardSink`, `WandbSink`, `TrackioSink`, or
            anything with `log(metrics, step)` and `close()`.
        stream: Text stream to print to instead of `sys.stdout`.
        is_main: Whether this rank writes; None decides at the first `log`, as above.
        clock: Function that returns Unix seconds; for tests.

    Raises:
        TypeError: A sink lacks `log` or `close`.

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
        sinks: Iterable[MetricSink] = (),
        stream: IO[str] | None = None,
        is_main: bool | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sinks: list[MetricSink] = []
        if jsonl is not None:
            self._sinks.append(JsonlSink(jsonl, clock=clock))
        if stdout:
            self._sinks.append(LineSink(stream))
        for sink in sinks:
            if not isinstance(sink, MetricSink):
                raise TypeError(f"a sink needs log(metrics, step) and close(), got {type(sink).__name__}")
            self._sinks.append(sink)
        self._is_main = is_main
        self._closed = False

    def log(self, metrics: Mapping[str, object], step: int) -> None:
        """Write one line to each sink, and flush it.

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
        for sink in self._sinks:
            sink.log(row, step)

    def close(self) -> None:
        """Close every sink; may be called more than once."""
        self._closed = True
        for sink in self._sinks:
            sink.close()

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
