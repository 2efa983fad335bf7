"""Draw the comparisons of README from the tables in benchmarks/results.

python -m benchmarks.comparisons --output docs/images/comparisons.png
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent / "results"
OURS, PEER = "#00695c", "#b0bec5"


class Bar(NamedTuple):
    """One bar: a label, and the row and column of a results file that its value stands in."""

    label: str
    row: tuple[str, ...]
    ours: bool = False


class Panel(NamedTuple):
    """Bars of one results file, all in one column."""

    title: str
    unit: str
    file: str
    column: str
    bars: list[Bar]
    shown: Callable[[float], str]


PANELS = [
    Panel(
        "Load 2 GB into float32 shards",
        "seconds, less is better",
        "loading.md",
        "median s",
        [
            Bar("fsdp_sft", ("ours: whole call",), ours=True),
            Bar("DCP's reader", ("DCP's Hugging Face reader: whole call",)),
            Bar("transformers", ("transformers native",)),
            Bar("from_pretrained +\nfully_shard", ("published recipe",)),
        ],
        "{:.2f}".format,
    ),
    Panel(
        "Loss of 4,096 bfloat16 tokens",
        "peak MiB, less is better",
        "loss.md",
        "peak MiB",
        [
            Bar("fsdp_sft", ("bfloat16", "32,000", "trained", "linear_cross_entropy_sum"), ours=True),
            Bar("torch, chunked", ("bfloat16", "32,000", "trained", "F.linear_cross_entropy, chunked")),
            Bar("logits +\ncross entropy", ("bfloat16", "32,000", "trained", "logits + cross entropy")),
        ],
        "{:,.0f}".format,
    ),
    Panel(
        "Train on padded rows",
        "tokens per second, more is better",
        "step.md",
        "tokens/s",
        [
            Bar("fsdp_sft", ("plain", "fsdp_sft"), ours=True),
            Bar("Trainer", ("plain", "transformers.Trainer")),
            Bar("SFTTrainer,\nTrainer's loss", ("plain", "trl.SFTTrainer, Trainer's loss")),
            Bar("SFTTrainer", ("plain", "trl.SFTTrainer")),
        ],
        "{:,.0f}".format,
    ),
    Panel(
        "Save 1.2 GB",
        "seconds, less is better",
        "checkpoints.md",
        "seconds",
        [
            Bar("fsdp_sft,\nchecksums", ("save_checkpoint",), ours=True),
            Bar("dcp.save,\nno checksums", ("dcp.save (no checksums)",)),
        ],
        "{:.2f}".format,
    ),
]


def cells(line: str) -> list[str]:
    """Cells of a line of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def value(file: str, column: str, row: tuple[str, ...]) -> float:
    """Number in the first row of a results file that begins with ``row``, in the column of that name."""
    head: list[str] = []
    for line in (RESULTS / file).read_text().splitlines():
        found = cells(line) if line.startswith("|") else []
        if not found:
            head = []
        elif not head:
            head = found
        elif column in head and tuple(found[: len(row)]) == row:
            return float(found[head.index(column)].replace(",", ""))
    raise LookupError(f"{file} has no row {row} with a column {column!r}")


def draw(output: Path) -> None:
    """Write the picture as PNG, with its figures as its description."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 5.2), layout="constrained")
    for axis, panel in zip(axes.flat, PANELS, strict=True):
        values = [value(panel.file, panel.column, bar.row) for bar in panel.bars]
        colours = [OURS if bar.ours else PEER for bar in panel.bars]
        axis.barh([bar.label for bar in panel.bars], values, color=colours, height=0.6)
        for place, number in enumerate(values):
            axis.text(number, place, f" {panel.shown(number)}", va="center", fontsize=10)
        axis.set_ylim(3.5, -0.5)  # room for four bars in each, so that all are equally thick
        axis.set_xlim(0, 1.15 * max(values))
        axis.set_title(f"{panel.title} ({panel.unit})", fontsize=11, loc="left")
        axis.tick_params(axis="y", length=0)
        axis.xaxis.set_visible(False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.supxlabel("On 2 CPU cores; the figures of benchmarks/results", fontsize=10)
    output.parent.mkdir(parents=True, exist_ok=True)
    drawn = [[text.get_text() for text in axis.texts] for axis in axes.flat]
    figure.savefig(output, dpi=120, metadata={"Description": str(drawn)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    draw(parser.parse_args().output)


if __name__ == "__main__":
    main()
