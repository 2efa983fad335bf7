"""Plans as a table, and a breakdown as bars: in a terminal, and as a PNG."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_sft.metrics.plot import new_figure, save_figure
from fsdp_sft.planner import replay
from fsdp_sft.planner.budget import Budget
from fsdp_sft.planner.estimate import MemoryEstimate
from fsdp_sft.planner.plan import RunPlan

_GIB = 1 << 30
_EIGHTHS = " ▏▎▍▌▋▊▉"
_REST = "the rest"
# Kinds of memory in the order in which they are stacked; related ones have shades of one colour.
_COLOURS = {
    replay.MASTERS: "#08519c",
    replay.OPTIMIZER: "#3182bd",
    replay.GRADIENTS: "#9ecae1",
    replay.UPDATE: "#c6dbef",
    replay.UNSHARDED: "#006d2c",
    replay.ALL_GATHER: "#41ab5d",
    replay.DECODING: "#a1d99b",
    replay.WHOLE_GRADIENTS: "#807dba",
    replay.REDUCE_SCATTER: "#bcbddc",
    replay.KEPT: "#d94801",
    replay.CHECKPOINTED: "#fd8d3c",
    replay.INPUTS: "#fdd0a2",
    replay.WORKING: "#e7c93f",
    replay.HEAD: "#c51b8a",
    replay.WORKSPACE: "#737373",
    _REST: "#bdbdbd",
}
_SMALLEST_SHARE = 0.005  # of the peak; smaller parts are summed up as one


def plan_table(plans: Sequence[RunPlan]) -> str:
    """The plans as a table, one line each, without columns in which all have the usual value."""
    columns: dict[str, list[str]] = {
        "": [f"{index}." for index in range(1, len(plans) + 1)],
        "cp": [str(plan.cp) for plan in plans],
        "ep": [str(plan.ep_size) for plan in plans],
        "replicas": [str(plan.dp_replicate) for plan in plans],
        "micro batch": [str(plan.micro_batch_size) for plan in plans],
        "x accum.": [str(plan.grad_accum_steps) for plan in plans],
        "reduced": ["once" if p.grad_sync == "last" and p.grad_accum_steps > 1 else "each" for p in plans],
        "checkpointed": [_checkpointed(plan) for plan in plans],
        "resharded": ["yes" if plan.reshard_after_forward else "no" for plan in plans],
        "optimizer": [plan.setup.optimizer for plan in plans],
        "GiB per GPU": [f"{plan.peak_bytes / _GIB:.1f}" for plan in plans],
        "left": [f"{plan.left_bytes / _GIB:.1f}{' (tight)' if plan.is_tight else ''}" for plan in plans],
        "peak in": [plan.estimate.peak_phase for plan in plans],
        "step": [f"{plan.time.total:.3g} s" for plan in plans],
        "tokens/s per GPU": [f"{plan.tokens_per_second:,.0f}" for plan in plans],
        "bound by": [plan.time.bound for plan in plans],
    }
    usual = {
        "optimizer": plans[0].setup.optimizer,
        "cp": "1",
        "ep": "1",
        "replicas": "1",
        "reduced": "each",
        "resharded": "yes",
    }
    shown = {name: cells for name, cells in columns.items() if set(cells) != {usual.get(name)}}
    return aligned([tuple(shown), *zip(*shown.values(), strict=True)])


def _checkpointed(way: RunPlan) -> str:
    """Which blocks are checkpointed, in a few words."""
    where = ", offloaded" if way.sac_offload and way.sac_ratio else ""
    if way.sac_ratio in (0, 1):
        return f"all{where}" if way.sac_ratio else "none"
    return f"{way.sac_ratio} {way.sac_placement}{where}"


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Rows of cells as lines with columns aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def bars(estimate: MemoryEstimate, *, budget: Budget | None = None, width: int = 40) -> str:
    """The breakdown at the peak as lines of text, largest part first.

    Args:
        estimate: The estimate to show.
        budget: The device's budget, with which the last line compares the sum; None leaves that out.
        width: Characters of the longest bar.
    """
    parts = _parts(estimate)
    largest = parts[0][1]
    names = max(len(name) for name, _ in parts)
    lines = [
        f"{name:<{names}}  {size / _GIB:7.2f} GiB  {_bar(size / largest, width)}".rstrip()
        for name, size in parts
    ]
    total = f"{'in all':<{names}}  {estimate.peak_bytes / _GIB:7.2f} GiB"
    if budget is not None:
        total += f"  of {budget}"
    return "\n".join([*lines, total])


def draw(
    path: str | os.PathLike[str],
    estimates: Sequence[tuple[str, MemoryEstimate]],
    *,
    budget: Budget | None = None,
    title: str,
) -> Path:
    """Draw one stacked bar for each labelled estimate: a PNG, or what the suffix names.

    Estimates with equal bars share one, under all their labels.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    shown = _joined(estimates)
    figure: Any = new_figure(9, 1.9 + 0.55 * len(shown), dpi=150)
    axes = figure.subplots()
    seen = {name for estimate in shown.values() for name, _ in _parts(estimate)}
    end = max(estimate.peak_bytes for estimate in shown.values()) / _GIB
    if budget is not None:
        usable, end = budget.usable_bytes / _GIB, max(end, budget.memory_bytes / _GIB)
        axes.axvline(usable, color="black", linewidth=1, linestyle="--", zorder=3)  # over bars that exceed it
        axes.annotate(
            f"usable: {usable:.1f} of {budget.memory_bytes / _GIB:.1f} GiB",
            (usable, 1),
            (0, 3),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            ha="right" if usable > end / 2 else "left",
            fontsize=8,
        )
    for row, estimate in enumerate(shown.values()):
        left = 0.0
        for name, size in sorted(_parts(estimate), key=lambda part: list(_COLOURS).index(part[0])):
            axes.barh(row, size / _GIB, left=left, color=_COLOURS[name], edgecolor="white", height=0.62)
            left += size / _GIB
        # In a separate column: beside its bar a number would cover the dashed line.
        axes.annotate(
            f"{left:.1f}",
            (1, row),
            (6, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    axes.set_yticks(range(len(shown)), list(shown), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    axes.set_xlim(0, end)
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items() if name in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    return save_figure(figure, Path(path))


def _joined(estimates: Sequence[tuple[str, MemoryEstimate]]) -> dict[str, MemoryEstimate]:
    """Estimates by label; those with indistinguishable bars share one entry under all their labels."""
    labels: dict[tuple[tuple[str, float], ...], list[str]] = {}
    first: dict[tuple[tuple[str, float], ...], MemoryEstimate] = {}
    for label, estimate in estimates:
        bar = tuple(sorted((name, round(size / _GIB, 1)) for name, size in _parts(estimate)))
        labels.setdefault(bar, []).append(label)
        first.setdefault(bar, estimate)
    return {"\n".join(labels[bar]): estimate for bar, estimate in first.items()}


def _parts(estimate: MemoryEstimate) -> list[tuple[str, int]]:
    """The parts of the peak, largest first, with the small ones summed up."""
    parts = sorted(estimate.breakdown.items(), key=lambda item: -item[1])
    large = [(name, size) for name, size in parts if size >= _SMALLEST_SHARE * estimate.peak_bytes]
    rest = estimate.peak_bytes - sum(size for _, size in large)
    return [*large, (_REST, rest)] if rest else large


def _bar(share: float, width: int) -> str:
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
