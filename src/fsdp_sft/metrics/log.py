"""Metrics: reduced over ranks, and written to a JSONL file, to a stream and to any function, on one rank."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Literal, TypeAlias

import torch

from fsdp_sft._ranks.agree import all_gather_objects, this_rank
from fsdp_sft._tensors.disk import full_path

Scalar: TypeAlias = float | int | str | bool | None
_REDUCED: dict[str, Callable[[Collection[float | int]], float | int]] = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "min": min,
    "max": max,
}


class MetricLogger(AbstractContextManager["MetricLogger"]):
    """Writes metrics to standard output, a JSONL file and whatever functions are given, on rank 0 alone.

    Every rank calls `log`; rank 0 of the default process group at the first `log` writes, or the only process
    if there is none.
    `log` is not a collective: values that differ between ranks go through `aggregate_metrics` first.
    Arguments are checked on every rank; tensors are read (a device synchronisation) on rank 0 alone.

    A JSONL line is strict JSON, an object with `step`, `time` (Unix seconds) and the metrics in the order
    given; NaN and infinities are the strings "NaN", "Infinity", "-Infinity", which Python's `float` and
    pandas' `to_numeric` read. An existing file is appended to; a last line that a crash cut off is removed
    first. `plot_run` draws such a file.

    Args:
        jsonl: File to append to; its parent folders are made. None writes no file.
        stdout: Print one readable line per `log`, above the bars of tqdm where that is in use.
        sinks: Functions that are called as `sink(metrics, step)`, with plain Python scalars; None is a value
            that is not known. The page "Watch a run" has those of wandb, TensorBoard and trackio.

    Example:
        >>> with fs.MetricLogger(jsonl="metrics.jsonl") as logger:
        ...     logger.log({"loss": 0.5, "lr": 1e-5}, step=1)
        step      1 | loss    0.5000 | lr  1.00e-05
        >>> print(Path("metrics.jsonl").read_text())
        {"step": 1, "time": ..., "loss": 0.5, "lr": 1e-05}
    """

    def __init__(
        self,
        *,
        jsonl: str | Path | None = None,
        stdout: bool = True,
        sinks: Iterable[Callable[[Mapping[str, Scalar], int], object]] = (),
    ) -> None:
        self._jsonl = None if jsonl is None else full_path(jsonl)
        self._stdout, self._sinks = stdout, list(sinks)
        self._is_main: bool | None = None
        self._file: IO[str] | None = None

    def log(self, metrics: Mapping[str, object], step: int) -> None:
        """Write one line to the file and to the stream, flush them, and call each sink.

        Args:
            metrics: Values are float, int, str, bool, None or a real tensor of no dimensions.
            step: Optimizer step, an int >= 0.

        Raises:
            TypeError: A value (named by its key) of another type; raised on every rank.
            ValueError: A key is "step" or "time".
        """
        _check(metrics)
        if self._is_main is None:  # once: without its process group each process would take itself for rank 0
            self._is_main = this_rank() == 0
        if not self._is_main:
            return
        row: dict[str, Scalar] = {
            key: value.item() if isinstance(value, torch.Tensor) else value  # type: ignore[misc]
            for key, value in metrics.items()
        }
        if self._jsonl is not None:
            self._file = self._file or _open_for_append(self._jsonl)
            values = {key: _json_value(value) for key, value in row.items()}
            line = json.dumps({"step": int(step), "time": time.time(), **values}, allow_nan=False)
            print(line, file=self._file, flush=True)
        if self._stdout:
            from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

            named = [f"{key} {_format_value(key, value):>9}" for key, value in row.items()]
            # A plain print would cut through a bar.
            tqdm.write(" | ".join([f"step {step:>6}", *named]), file=sys.stdout)
            sys.stdout.flush()
        for sink in self._sinks:
            sink(row, step)

    def __exit__(self, *exc_info: object) -> None:
        """Close the file; a later `log` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _check(metrics: Mapping[str, object]) -> None:
    """Refuse on every rank what rank 0 alone could not log, so that the others do not wait for it."""
    for key, value in metrics.items():
        if key in ("step", "time"):
            raise ValueError(f"metric name {key!r} is taken by the logger itself; rename it")
        if hasattr(value, "full_tensor"):
            raise TypeError(
                f"metric {key!r} is a DTensor; call .full_tensor() on all ranks before logging it"
            )
        is_number = isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_complex()
        if not is_number and value is not None and not isinstance(value, (float, int, str)):
            raise TypeError(
                f"metric {key!r} must be a float, int, str, bool, None or a real tensor of no dimensions, "
                f"got {type(value).__name__}"
            )


def _json_value(value: Scalar) -> Scalar:
    """The value in strict JSON, where NaN and infinities are strings."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _open_for_append(path: Path) -> IO[str]:
    """Open a JSONL file at its end, after removing a last line that a crash cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    return path.open("a", encoding="utf-8", newline="\n")


def _format_value(key: str, value: Scalar) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value).replace("\n", "\\n")
    is_learning_rate = key.replace("/", "_").split("_")[-1] == "lr" or "learning_rate" in key
    if is_learning_rate or abs(value) >= 1e9 or 0 < abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:.1f}" if abs(value) >= 1000 else f"{value:.4f}"


def aggregate_metrics(
    metrics: Mapping[str, float | int | None],
    *,
    reduce: Literal["mean", "sum", "min", "max", "spread"] = "mean",
) -> dict[str, float | int | None]:
    """Reduce each metric over all ranks, in one exchange; every rank gets the same result.

    What `train_step` returns is the same on all ranks already. Memory, allocator retries and the time spent
    waiting for data are not, and one slow rank slows all of them down.

    Args:
        metrics: Numbers of this rank; one that is None, or that is not there, is known to other ranks alone.
        reduce: `"mean"`, `"sum"`, `"min"` or `"max"` over the ranks that have a value. `"spread"` gives four
            metrics for each: `<name>_min`, `<name>_mean`, `<name>_max` and `<name>_max_rank`, the lowest rank
            that has the maximum.

    Returns:
        Metrics ready for `MetricLogger.log`. None where no rank has a value; NaN where any rank has NaN.

    Collective: all ranks, over the control group.

    Example:
        >>> spread = fs.aggregate_metrics({"data_wait_share": 0.25}, reduce="spread")
        >>> spread["data_wait_share_max_rank"]
        0
    """
    by_rank = all_gather_objects(dict(metrics))
    result: dict[str, float | int | None] = {}
    for name in dict.fromkeys(name for row in by_rank for name in row):
        known = {rank: row[name] for rank, row in enumerate(by_rank) if row.get(name) is not None}
        if reduce != "spread":
            result[name] = _reduced(known.values(), reduce)
            continue
        result |= {f"{name}_{one}": _reduced(known.values(), one) for one in ("min", "mean", "max")}
        result[f"{name}_max_rank"] = next(
            (rank for rank, value in known.items() if value == result[f"{name}_max"] or math.isnan(value)),
            None,
        )
    return result


def _reduced(values: Collection[float | int], reduce: str) -> float | int | None:
    """The values reduced to one; None without values."""
    if not values:
        return None
    if any(math.isnan(value) for value in values):
        return math.nan
    return _REDUCED[reduce](values)
