"""The picture of gpu.py: a column for each size, a row for each of speed, MFU and peak memory."""

from pathlib import Path
from typing import Any

_OURS, _OTHERS, _TARGET = "#1f5fa8", "#9aa5b1", "#c62828"
_GIB = 1 << 30


def draw(path: Path, rows: list[dict], targets: dict[str, float], title: str) -> None:
    """Draw measured rows; one that failed says why in place of its bar.

    Args:
        path: PNG to write.
        rows: With ``size``, ``label``, ``ours`` and either ``error`` or ``rate``, ``mfu`` (None where the
            device is unknown) and ``peak`` bytes.
        targets: MFU to aim at, by size.
        title: Above all.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it would choose a backend for the whole process.
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    panels: list[tuple[str, str, float, str]] = [("rate", "tokens/s per GPU", 1, "{:,.0f}")]
    if any(row.get("mfu") is not None for row in rows):
        panels.append(("mfu", "MFU, %", 0.01, "{:.1f}"))
    panels.append(("peak", "peak memory, GiB", _GIB, "{:.1f}"))
    tallest = max(sum(row["size"] == size for row in rows) for size in sizes)
    figure = Figure(
        figsize=(1.6 + 4.2 * len(sizes), 0.9 + len(panels) * (0.8 + 0.36 * tallest)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(panels), len(sizes), squeeze=False, sharey="col")
    for column, size in enumerate(sizes):
        chosen = [row for row in rows if row["size"] == size]
        for line, (key, name, unit, form) in enumerate(panels):
            axes = grid[line][column]
            _bars(axes, chosen, key, unit, form)
            axes.set_xlabel(name)
            if line == 0:
                axes.set_title(size, loc="left", fontsize=11, fontweight="bold")
            if key == "mfu" and size in targets:
                axes.axvline(100 * targets[size], color=_TARGET, linewidth=1.2, linestyle="--")
                axes.set_xlim(0, max(axes.get_xlim()[1], 115 * targets[size]))
                axes.set_xlabel(f"{name} (dashed: the aim)")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)


def _bars(axes: Any, rows: list[dict], key: str, unit: float, form: str) -> None:
    values = [(row.get(key) or 0) / unit for row in rows]
    colours = [_OURS if row["ours"] else _OTHERS for row in rows]
    axes.barh(range(len(rows)), values, color=colours, height=0.7)
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.25 * max(values) or 1)
    axes.locator_params(axis="x", nbins=5)
    axes.spines[["top", "right"]].set_visible(False)
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        text = row["error"][:32] if row.get("error") else form.format(value) if value else "unknown"
        axes.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
