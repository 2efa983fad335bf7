"""Plans as a table, and a breakdown as bars: in a terminal, and as a PNG."""

import os
from collections.abc import Sequence
from pathlib import Path

from fsdp_sft.planner import replay
from fsdp_sft.planner.estimate import MemoryEstimate
from fsdp_sft.planner.search import USABLE, RunPlan

_GIB = 1 << 30
_EIGHTHS = " ▏▎▍▌▋▊▉"
_REST = "the rest"
# In the order in which they are stacked, related ones in shades of one colour.
_COLOURS = {
    replay.MASTERS: "#08519c",
    replay.OPTIMIZER: "#3182bd",
    replay.GRADIENTS: "#9ecae1",
    replay.UPDATE: "#c6dbef",
    replay.UNSHARDED: "#006d2c",
    replay.ALL_GATHER: "#41ab5d",
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
_SMALLEST_SHARE = 0.005  # of the peak: what is less is summed up as one bar


def plan_table(plans: Sequence[RunPlan]) -> str:
    """The plans, one line each, fastest first."""
    rows = [("", "micro batch", "x accum.", "checkpointed", "resharded", "GiB per GPU", "peak in", "speed")]
    for index, plan in enumerate(plans, start=1):
        ratio = "none" if plan.sac_ratio == 0 else "all" if plan.sac_ratio == 1 else str(plan.sac_ratio)
        placement = f" {plan.sac_placement}" if 0 < plan.sac_ratio < 1 else ""
        rows.append(
            (
                f"{index}.",
                str(plan.micro_batch_size),
                str(plan.grad_accum_steps),
                ratio + placement,
                "yes" if plan.reshard_after_forward else "no",
                f"{plan.peak_bytes / _GIB:.1f}",
                plan.estimate.peak_phase,
                f"{plan.relative_speed:.2f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def bars(estimate: MemoryEstimate, *, memory_bytes: int | None = None, width: int = 40) -> str:
    """The breakdown at the peak, largest first, as lines of text.

    Args:
        estimate: What to show.
        memory_bytes: Of the device; adds a line that compares.
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
    if memory_bytes is not None:
        share = estimate.peak_bytes / memory_bytes
        total += f"  of {memory_bytes / _GIB:.1f} GiB: {share:.0%}, {USABLE:.0%} is usable"
    return "\n".join([*lines, total])


def draw(
    path: str | os.PathLike[str],
    estimates: Sequence[tuple[str, MemoryEstimate]],
    *,
    memory_bytes: int | None = None,
    title: str = "Memory per GPU at the peak",
) -> Path:
    """Write a PNG (or what else the suffix names) with one stacked bar for each labelled estimate.

    Raises:
        ModuleNotFoundError: If matplotlib is missing; the message names the extra that brings it.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures need matplotlib: pip install 'fsdp-sft[plot]'") from error
    figure = Figure(figsize=(9, 1.9 + 0.55 * len(estimates)), layout="constrained", dpi=150)
    axes = figure.subplots()
    seen = {name for _, estimate in estimates for name, _ in _parts(estimate)}
    if memory_bytes is not None:
        usable = USABLE * memory_bytes / _GIB
        axes.axvline(usable, color="black", linewidth=1, linestyle="--", zorder=0)
        axes.set_title(f"dashed: {usable:.1f} GiB, {USABLE:.0%} of the device", fontsize=8, loc="right")
    for row, (_, estimate) in enumerate(estimates):
        left = 0.0
        for name, size in sorted(_parts(estimate), key=lambda part: list(_COLOURS).index(part[0])):
            axes.barh(row, size / _GIB, left=left, color=_COLOURS[name], edgecolor="white", height=0.62)
            left += size / _GIB
        label = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"}
        axes.annotate(
            f"{left:.1f}",
            (left, row),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            bbox=label,
        )
    axes.set_yticks(range(len(estimates)), [label for label, _ in estimates])
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [_patch(colour, name) for name, colour in _COLOURS.items() if name in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)
    return Path(path)


def _patch(colour: str, label: str) -> object:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _parts(estimate: MemoryEstimate) -> list[tuple[str, int]]:
    parts = sorted(estimate.breakdown.items(), key=lambda item: -item[1])
    large = [(name, size) for name, size in parts if size >= _SMALLEST_SHARE * estimate.peak_bytes]
    rest = estimate.peak_bytes - sum(size for _, size in large)
    return [*large, (_REST, rest)] if rest else large


def _bar(share: float, width: int) -> str:
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
