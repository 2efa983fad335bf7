"""The picture of the load of experts: layers by their numbers, whole experts, what has no token."""

from pathlib import Path
from typing import Any

import pytest

import fsdp_sft as fs


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved."""
    figure = pytest.importorskip("matplotlib.figure")
    kept: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *args, **kwargs: kept.append(self))
    return kept


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("model.layers.3.mlp.experts", "model.layers.4.mlp.experts"), ["3", "4"]),
        (("first.experts", "second.experts"), ["0", "1"]),
        (("towers.0.a", "towers.0.b"), ["0", "1"]),
    ],
)
def test_layers_have_their_numbers_and_experts_whole_ones(
    figures: list[Any], tmp_path: Path, names: tuple[str, str], labels: list[str]
) -> None:
    load = fs.ExpertLoad(names, ((6, 2, 0), (2, 3, 3)))
    fs.plot_expert_load(load, tmp_path / "load.png")
    axes = figures[0].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == labels
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert "1 has no token" in axes.get_title()
    crosses = axes.collections[0].get_offsets().tolist()
    assert crosses == [[2, 0]]
    mean = axes.images[0].norm(1.0)
    assert mean == 0.5, "white, the middle of the colours"
