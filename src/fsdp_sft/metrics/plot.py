"""One picture of a run: loss, gradient norm, throughput and memory over the steps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

from fsdp_sft._tensors.disk import full_path
from fsdp_sft.metrics.memory import PEAKS

_LINE, _SECOND, _BAD = "#1f5fa8", "#d1660d", "#c62828"
_SMOOTH_FROM = 60  # number of points from which on a running median is drawn over the raw curve
# Title, unit, names of the metric (the first that was logged), the same of the one beside it, and its label.
_PANELS = (
    ("Loss", "nats per target token", ("loss",), ("eval_loss",), "evaluation"),
    ("Gradient norm", "2-norm before clipping", ("grad_norm",), ("lr", "learning_rate"), "learning rate"),
    ("Throughput", "tokens per second, all ranks", ("tokens_per_second",), ("mfu",), "MFU"),
    ("Peak memory", "GiB", PEAKS, (), ""),
)

Rows = dict[int, dict[str, Any]]


def plot_run(jsonl: str | Path, out: str | Path) -> Path:
    """Draw the JSONL file of a `MetricLogger` as one PNG with four panels.

    The panels are `loss` with `eval_loss`, `grad_norm` with `lr` (or `learning_rate`), `tokens_per_second`
    with `mfu`, and the peak of `memory_stats`. A panel whose metric was not logged says so. Where a run was
    resumed, or begun anew in the same file, what had been logged from that step on is left out. Steps with a
    value that is not finite are marked red on the lower edge; a broken last line is left out.

    Args:
        jsonl: File written by `MetricLogger(jsonl=...)`.
        out: PNG to write; its parent folders are made.

    Returns:
        `out` as a path.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (`pip install matplotlib`).
        ValueError: The file holds no line with a step.

    Example:
        >>> with fs.MetricLogger(jsonl="metrics.jsonl", stdout=False) as logger:
        ...     for step in range(1, 6):
        ...         logger.log({"loss": 1 / step, "grad_norm": 1.0}, step)
        >>> fs.plot_run("metrics.jsonl", "run.png").name
        'run.png'
    """
    from matplotlib.figure import Figure  # without pyplot, which would choose a backend for the process

    figure = Figure(figsize=(11, 7), layout="constrained", dpi=120)
    rows = _read(full_path(jsonl))
    logged = {name for row in rows.values() for name, value in row.items() if value is not None}
    for axes, (title, unit, names, beside, label) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        name = next((name for name in names if name in logged), names[0])
        _draw(axes, rows, name, title, unit)
        for other in (name for name in beside if name in logged):
            _draw_beside(axes, rows, other, label)
        if title in ("Throughput", "Peak memory"):
            axes.set_ylim(bottom=0)
    path = full_path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _read(path: Path) -> Rows:
    """Rows by step, ascending; where a step has a metric twice, the later value counts."""
    rows: Rows = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the line a crash cut off
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            step = row["step"]
            # A run that was resumed, or begun anew in the same file: what came after is gone.
            if rows and step < next(reversed(rows)):
                rows = {number: known for number, known in rows.items() if number < step}
            rows.setdefault(step, {}).update(row)
    if not rows:
        raise ValueError(f"{path} holds no line with a step; it should be the jsonl of a MetricLogger")
    return rows


def _points(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, bytes as GiB; values that are not finite are NaN."""
    found = {step: row[key] for step, row in rows.items() if row.get(key) is not None}
    values = [float(value) / (2**30 if key.endswith("_bytes") else 1) for value in found.values()]
    return list(found), [value if math.isfinite(value) else math.nan for value in values]


def _draw(axes: Any, rows: Rows, key: str, title: str, unit: str) -> None:
    """Draw one metric into a panel, or say that it was not logged."""
    steps, values = _points(rows, key)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set(xlabel="optimizer step", ylabel=unit)
    axes.grid(alpha=0.25)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)  # there is no step 1.25
    if not steps:
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color="0.5")
        return
    smooth = len(steps) >= _SMOOTH_FROM
    # A line through one point shows nothing.
    axes.plot(
        steps,
        values,
        "o-" if len(steps) == 1 else "-",
        color=_LINE,
        linewidth=1.4,
        alpha=0.3 if smooth else 1,
    )
    if smooth:
        width = len(values) // 40 + 3
        medians = [median(values[max(0, i - width) : i + width + 1]) for i in range(len(values))]
        axes.plot(steps, medians, color=_LINE, linewidth=1.8)
    bad = [step for step, value in zip(steps, values, strict=True) if math.isnan(value)]
    if bad:  # an empty line that is not clipped leaves the panels no room
        axes.plot(bad, [0] * len(bad), "x", color=_BAD, transform=axes.get_xaxis_transform(), clip_on=False)


def _draw_beside(axes: Any, rows: Rows, key: str, label: str) -> None:
    """Draw another metric into a panel: a loss on the same scale, others dashed, on one at the right."""
    steps, values = _points(rows, key)
    if key == "eval_loss":
        axes.plot(steps, values, "o-", color=_SECOND, linewidth=1.2, label=label)
        axes.legend()
    else:
        right = axes.twinx()
        right.set_ylabel(f"{label} (dashed)", color=_SECOND)
        right.plot(steps, values, "--", color=_SECOND, linewidth=1.2)
