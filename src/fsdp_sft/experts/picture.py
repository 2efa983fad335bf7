"""A picture of the load of experts."""

import re
from pathlib import Path
from typing import Any

from fsdp_sft.experts.load import ExpertLoad
from fsdp_sft.metrics.figure import new_figure, save_figure


def plot_expert_load(load: ExpertLoad, out: str | Path) -> Path:
    """Draw the load of each expert: a row per layer, a column per expert.

    A colour is the expert's number of tokens divided by the mean of its layer: white at the mean, blue below
    it, red above; the scale ends at 4. Experts without a token are marked.

    Args:
        load: Load to draw, ``StepResult.expert_load``.
        out: PNG file to write; its parent folders are made.

    Returns:
        ``out`` as a path.

    Raises:
        ImportError: If matplotlib is not installed.

    Example:
        >>> names = ("layers.0.experts", "layers.1.experts")
        >>> load = fs.ExpertLoad(names, ((6, 2, 0, 0), (2, 2, 3, 1)))
        >>> fs.plot_expert_load(load, "load.png").name
        'load.png'
    """
    widest, layers = max(map(len, load.counts)), len(load.layers)
    busy = [[count * len(row) / max(sum(row), 1) for count in row] for row in load.counts]
    rows = [row + [float("nan")] * (widest - len(row)) for row in busy]
    size = (max(6.0, min(16.0, 2.5 + widest * 0.16)), max(2.6, min(14.0, 1.6 + layers * 0.22)))
    figure: Any = new_figure(*size)
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.ticker import MaxNLocator

    axes = figure.subplots()
    shades = TwoSlopeNorm(vcenter=1, vmin=0, vmax=4)
    picture = axes.imshow(rows, aspect="auto", cmap="RdBu_r", norm=shades, interpolation="nearest")
    dead = [(x, y) for y, counts in enumerate(load.counts) for x, number in enumerate(counts) if not number]
    if dead:
        xs, ys = zip(*dead, strict=True)
        axes.scatter(xs, ys, marker="x", s=14, color="white", linewidths=1)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    ticks = range(0, layers, max(1, layers // 12))
    axes.set_yticks(ticks, [_numbers(load.layers)[tick] for tick in ticks])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    worst = max(load.largest_over_mean)
    title = f"Load of experts: the busiest has {worst:.1f} times its layer's mean"
    have = "has" if len(dead) == 1 else "have"
    axes.set_title(title + (f", {len(dead)} {have} no token (x)" if dead else ""), fontsize=9)
    figure.colorbar(picture, ax=axes, label="times the mean", extend="max", ticks=[0, 0.5, 1, 2, 3, 4])
    return save_figure(figure, out, file_format="png")


def _numbers(layers: tuple[str, ...]) -> list[str]:
    """Labels of the layers: their numbers in the model where names have them, or counted from 0."""
    found = [re.findall(r"\d+", name)[:1] for name in layers]
    numbers = [number[0] for number in found if number]
    return numbers if len(set(numbers)) == len(layers) else [str(index) for index in range(len(layers))]
