"""A picture of the load of experts."""

from pathlib import Path

from fsdp_sft.experts.load import ExpertLoad


def plot_expert_load(load: ExpertLoad, out: str | Path) -> Path:
    """Draw the load of each expert: a row per layer, a column per expert.

    A colour is the expert's number of tokens divided by the mean of its layer; the scale ends at 4. Experts
    without a token are marked.

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
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError("matplotlib is not installed: pip install matplotlib") from error
    widest, layers = max(map(len, load.counts)), len(load.layers)
    busy = [[count * len(row) / max(sum(row), 1) for count in row] for row in load.counts]
    rows = [row + [float("nan")] * (widest - len(row)) for row in busy]
    size = (max(6.0, min(16.0, 2.5 + widest * 0.16)), max(2.6, min(14.0, 1.6 + layers * 0.22)))
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine())
    FigureCanvasAgg(figure)  # not by pyplot, which would choose a backend for the whole process
    axes = figure.subplots()
    picture = axes.imshow(rows, aspect="auto", cmap="viridis", vmin=0, vmax=4, interpolation="nearest")
    dead = [(x, y) for y, counts in enumerate(load.counts) for x, number in enumerate(counts) if not number]
    if dead:
        xs, ys = zip(*dead, strict=True)
        axes.scatter(xs, ys, marker="x", s=14, color="#ff5252", linewidths=1)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer of experts")
    axes.set_yticks(range(0, layers, max(1, layers // 12)))
    worst = max(load.largest_over_mean)
    title = f"Load of experts: the busiest has {worst:.1f} times its layer's mean"
    axes.set_title(title + (f", {len(dead)} have no token (x)" if dead else ""), fontsize=10)
    figure.colorbar(picture, ax=axes, label="tokens over the layer's mean", extend="max")
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    return path
