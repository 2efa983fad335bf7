"""One picture of a run: loss, gradient norm, throughput and memory over the steps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fsdp_sft._tensors.disk import full_path
from fsdp_sft.metrics.figure import new_figure, save_figure
from fsdp_sft.metrics.memory import PEAKS

_RATES = ("lr", "learning_rate")
_SMOOTH_FROM = 60  # number of points from which on a running median is drawn over the raw curve
_LINE, _SECOND, _BAD = "#1f5fa8", "#d1660d", "#c62828"

Points = tuple[list[int], list[float]]
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
        ImportError: matplotlib is not installed.
        ValueError: The file holds no line with a step.

    Example:
        >>> with fs.MetricLogger(jsonl="metrics.jsonl", stdout=False) as logger:
        ...     for step in range(1, 6):
        ...         logger.log({"loss": 1 / step, "grad_norm": 1.0}, step)
        >>> fs.plot_run("metrics.jsonl", "run.png").name
        'run.png'
    """
    figure: Any = new_figure(11, 7)
    rows = _read(full_path(jsonl))
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.03, hspace=0.04)
    panels = (_loss_panel, _grad_norm_panel, _throughput_panel, _memory_panel)
    for axes, draw in zip(figure.subplots(2, 2).flat, panels, strict=True):
        draw(axes, rows)
    return save_figure(figure, out, file_format="png")


def _read(path: Path) -> Rows:
    """Rows by step, ascending; where a step has a metric twice, the later value counts."""
    rows: Rows = {}
    last = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the line a crash cut off
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            step = row["step"]
            if step < last:  # a run that was resumed, or begun anew in the same file: what came after is gone
                rows = {number: known for number, known in rows.items() if number < step}
            rows.setdefault(step, {}).update(row)
            last = step
    if not rows:
        raise ValueError(f"{path} holds no line with a step; it should be the jsonl of a MetricLogger")
    return dict(sorted(rows.items()))


def _points(rows: Rows, key: str, unit: float = 1.0) -> tuple[Points, list[int]]:
    """Steps and values of one metric, and the steps at which it was not finite."""
    steps, values, bad = [], [], []
    for step, row in rows.items():
        value = row.get(key)
        if value in ("NaN", "Infinity", "-Infinity"):
            bad.append(step)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            steps.append(step)
            values.append(value / unit)
    return (steps, values), bad


def _draw(axes: Any, rows: Rows, key: str, *, title: str, unit: str, scale: float = 1.0) -> Points:
    """Draw one metric into a panel, or say that it was not logged; returns its steps and values."""
    (steps, values), bad = _points(rows, key, scale)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)  # there is no step 1.25
    if not steps and not bad:
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color="0.5")
        axes.set_xticks([])
        axes.set_yticks([])
        return steps, values
    smooth = len(steps) >= _SMOOTH_FROM
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.plot(
        steps,
        values,
        "o-" if len(steps) == 1 else "-",  # a line through one point shows nothing
        color=_LINE,
        markersize=4,
        alpha=0.3 if smooth else 1.0,
        linewidth=1.0 if smooth else 1.6,
    )
    if smooth:
        axes.plot(steps, _running_median(values, len(values) // 40 + 3), color=_LINE, linewidth=1.8)
    if bad:
        label = f"not finite ({len(bad)})"
        axes.plot(
            bad,
            [0] * len(bad),
            "x",
            color=_BAD,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            label=label,
        )
        _legend(axes, "upper right")
    return steps, values


def _legend(axes: Any, where: str) -> None:
    axes.legend(loc=where, frameon=True, framealpha=1.0, edgecolor="none")


def _running_median(values: list[float], width: int) -> list[float]:
    half = width // 2
    medians = []
    for i in range(len(values)):
        window = sorted(values[max(0, i - half) : i + half + 1])
        medians.append(window[len(window) // 2])
    return medians


def _loss_panel(axes: Any, rows: Rows) -> None:
    _draw(axes, rows, "loss", title="Loss", unit="nats per target token")
    (steps, values), _ = _points(rows, "eval_loss")
    if steps:
        axes.plot(steps, values, "o-", color=_SECOND, markersize=4, linewidth=1.2, label="evaluation")
        _legend(axes, "upper right")


def _grad_norm_panel(axes: Any, rows: Rows) -> None:
    _, norms = _draw(axes, rows, "grad_norm", title="Gradient norm", unit="2-norm before clipping")
    positive = [norm for norm in norms if norm > 0]
    if positive and max(positive) > 30 * min(positive):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    key = next((key for key in _RATES if any(key in row for row in rows.values())), None)
    if key is not None:
        steps, rates = _points(rows, key)[0]
        right = axes.twinx()
        right.plot(steps, rates, color=_SECOND, linewidth=1.2, linestyle="--")
        right.set_ylim(0, 1.1 * max(rates, default=1) or None)
        right.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        right.set_ylabel("learning rate (dashed)", color=_SECOND)


def _throughput_panel(axes: Any, rows: Rows) -> None:
    _, rates = _draw(axes, rows, "tokens_per_second", title="Throughput", unit="tokens per second, all ranks")
    if rates:
        axes.set_ylim(0, 1.1 * max(rates) or None)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    percent_per_token = [
        100 * row["mfu"] / row["tokens_per_second"]
        for row in rows.values()
        if isinstance(row.get("mfu"), float) and row.get("tokens_per_second")
    ]
    if percent_per_token:  # MFU is throughput in other units, so it is a scale and not a curve
        factor = sorted(percent_per_token)[len(percent_per_token) // 2]
        scale = axes.secondary_yaxis("right", functions=(lambda y: y * factor, lambda y: y / factor))
        scale.set_ylabel("MFU (%)")


def _memory_panel(axes: Any, rows: Rows) -> None:
    key = next((k for k in PEAKS if any(k in row for row in rows.values())), PEAKS[0])
    name = key.removeprefix("peak_").removesuffix("_bytes")
    _, peaks = _draw(axes, rows, key, title=f"Peak memory ({name})", unit="GiB", scale=1 << 30)
    if peaks:
        axes.set_ylim(0, 1.1 * max(peaks) or None)
    (steps, values), _ = _points(rows, "num_alloc_retries")
    if any(values):
        first = next(step for step, value in zip(steps, values, strict=True) if value)
        axes.axvline(first, color=_BAD, linewidth=1.2, label=f"allocator retries from step {first}")
        _legend(axes, "lower right")
