"""The planner's pictures: nothing covers the line of what is usable, and no two bars are the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fsdp_sft as fs
from fsdp_sft._process.gpus import gpu_named
from fsdp_sft.planner.budget import budget_of
from fsdp_sft.planner.estimate import MemoryEstimate
from fsdp_sft.planner.picture import draw
from tests.planner.families import qwen

BUDGET = budget_of(gpu_named("h100-3gib"), 2)
TITLE = (
    "A model: memory per GPU\na model of 7.62B parameters, on 8 x h100, 64 sequences of 4096 tokens a step"
)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved."""
    figure = pytest.importorskip("matplotlib.figure")
    backend_agg = pytest.importorskip("matplotlib.backends.backend_agg")
    kept: list[Any] = []
    plain = figure.Figure.savefig

    def savefig(self: Any, *args: Any, **kwargs: Any) -> None:
        backend_agg.FigureCanvasAgg(self)  # measures texts
        kept.append(self)
        plain(self, *args, **kwargs)

    monkeypatch.setattr(figure.Figure, "savefig", savefig)
    return kept


def _estimates() -> list[tuple[str, MemoryEstimate]]:
    options: dict[str, Any] = {"num_gpus": 2, "seq_length": 512, "gpu": "h100-3gib"}
    config = qwen(256, 512, 6, 4, 2, vocab_size=4096)
    small, large = (fs.estimate_memory(config, fs.Run(**options, micro_batch_size=rows)) for rows in (1, 4))
    # As large as the line is far to the right: numbers beside the bars would lie on it.
    factor = 0.97 * BUDGET.usable_bytes / large.peak_bytes
    breakdown = {name: int(size * factor) for name, size in large.breakdown.items()}
    nearly = replace(large, breakdown=breakdown, peak_bytes=sum(breakdown.values()))
    twice = {name: 2 * size for name, size in breakdown.items()}
    over = replace(large, breakdown=twice, peak_bytes=sum(twice.values()))
    return [("one", small), ("two", nearly), ("three", nearly), ("four", small), ("five", over)]


def _boxes(figure: Any) -> list[Any]:
    renderer = figure.canvas.get_renderer()
    axes = figure.axes[0]
    texts = [*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels(), *figure.texts]
    texts += [axes.xaxis.label, axes.yaxis.label, axes.title]
    return [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t.get_text() and t.get_visible()]


def _overlaps(figure: Any) -> list[tuple[str, str]]:
    boxes = _boxes(figure)
    return [
        (one, other)
        for i, (one, here) in enumerate(boxes)
        for other, there in boxes[i + 1 :]
        if here.overlaps(there)
    ]


def test_no_number_covers_the_line_and_equal_bars_are_one(figures: list[Any], tmp_path: Path) -> None:
    for end in (4, 5):
        draw(tmp_path / "plans.png", _estimates()[:end], budget=BUDGET, title=TITLE)
        axes = figures[-1].axes[0]
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert labels == ["one\nfour", "two\nthree", "five"][: end - 2]
        line = axes.transData.transform((axes.lines[0].get_xdata()[0], 0))[0]
        inside = axes.get_window_extent()
        for text, box in _boxes(figures[-1]):
            crosses = box.x0 <= line <= box.x1 and box.y1 > inside.y0 and box.y0 < inside.y1
            assert not crosses, text
        assert _overlaps(figures[-1]) == []
        assert axes.get_xlim()[1] * (1 << 30) >= BUDGET.memory_bytes
