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
_SMOOTH_FROM = 60  # number of points from which on a running mean is drawn over the raw curve

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
    figure = new_figure(11, 7)
    rows = _read(full_path(jsonl))
    loss, norm, speed, memory = figure.subplots(2, 2).flat
    _draw(loss, rows, "loss", "Loss", "nats per target token")
    _draw_beside(loss, rows, "eval_loss", "evaluation", own_scale=False)
    _draw(norm, rows, "grad_norm", "Gradient norm", "2-norm before clipping")
    _draw_beside(norm, rows, _logged(rows, ("lr", "learning_rate")), "learning rate (dashed)")
    _draw(speed, rows, "tokens_per_second", "Throughput", "tokens per second, all ranks")
    _draw_beside(speed, rows, "mfu", "MFU (dashed)")
    peak = _logged(rows, PEAKS)
    title = f"Peak memory ({peak.removeprefix('peak_').removesuffix('_bytes')})"
    _draw(memory, rows, peak, title, "GiB", unit=1 << 30)
    for axes in (speed, memory):
        axes.set_ylim(bottom=0)
    return save_figure(figure, out, file_format="png")


def new_figure(width: float, height: float, *, dpi: int = 120) -> Any:
    """An empty figure of so many inches, drawn without pyplot, which would choose a backend for the process.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("matplotlib is not installed: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained", dpi=dpi)


def save_figure(figure: Any, out: str | Path, *, file_format: str | None = None) -> Path:
    """Write a figure, in the format of the file's suffix if none is given; parent folders are made."""
    path = full_path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi="figure", format=file_format)
    return path


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


def _logged(rows: Rows, names: tuple[str, ...]) -> str:
    """The first of these metrics that was logged, or the first of all."""
    return next((name for name in names if any(name in row for row in rows.values())), names[0])


def _points(rows: Rows, key: str, unit: float = 1.0) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; values that are not finite are NaN."""
    found = {step: row[key] for step, row in rows.items() if row.get(key) is not None}
    values = [float(value) / unit for value in found.values()]
    return list(found), [value if math.isfinite(value) else math.nan for value in values]


def _draw(axes: Any, rows: Rows, key: str, title: str, label: str, unit: float = 1.0) -> None:
    """Draw one metric into a panel, or say that it was not logged."""
    steps, values = _points(rows, key, unit)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)  # there is no step 1.25
    if not steps:
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", va="center", color="0.5")
        return
    smooth = len(steps) >= _SMOOTH_FROM
    style = "o-" if len(steps) == 1 else "-"  # a line through one point shows nothing
    axes.plot(steps, values, style, color=_LINE, linewidth=1.4, alpha=0.3 if smooth else 1.0)
    if smooth:
        width = len(values) // 40 + 3
        medians = [median(values[max(0, i - width) : i + width + 1]) for i in range(len(values))]
        axes.plot(steps, medians, color=_LINE, linewidth=1.8)
    bad = [step for step, value in zip(steps, values, strict=True) if math.isnan(value)]
    axes.plot(bad, [0] * len(bad), "x", color=_BAD, transform=axes.get_xaxis_transform(), clip_on=False)


def _draw_beside(axes: Any, rows: Rows, key: str, label: str, *, own_scale: bool = True) -> None:
    """Draw another metric into a panel, if it was logged: on the right-hand scale, or on the same one."""
    steps, values = _points(rows, key)
    if not steps:
        return
    if own_scale:
        axes = axes.twinx()
        axes.set_ylabel(label, color=_SECOND)
    axes.plot(steps, values, "--" if own_scale else "o-", color=_SECOND, linewidth=1.2, label=label)
    if not own_scale:
        axes.legend()
